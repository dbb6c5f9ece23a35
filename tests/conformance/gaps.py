"""The known gaps: which operator differs in which check, how, and why; kept in ``gaps.toml`` beside this file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("gaps.toml")


@dataclass(frozen=True)
class Gap:
    """One known difference.

    Attributes:
        operators: Full names.
        checks: Names of the checks in which they differ.
        text: Regular expression that finds the failure's text; all of them must match.
        reason: Why it is so.
        within: The largest gap allowed between values, relative to the largest element; default none at all.
        sometimes: The difference depends on chance, so a run without it is no surprise.
        dies: The CPU kernel itself ends the process, so the check is not run.
        dtypes: Types of the samples it holds for; default any.
    """

    operators: tuple[str, ...]
    checks: tuple[str, ...]
    text: str
    reason: str
    within: float = 0.0
    sometimes: bool = False
    dies: bool = False
    dtypes: tuple[str, ...] = ()

    def explains(self, text: str) -> bool:
        """Whether a failure with this text is the known one."""
        if re.search(self.text, text) is None:
            return False
        distance = re.search(r"differ by up to (\S+) of the largest", text)
        return distance is None or float(distance[1]) <= self.within


def load(file: Path = FILE) -> list[Gap]:
    """Read the list.

    Raises:
        ValueError: Two gaps name the same operator, check and text.
    """
    gaps = []
    for entry in tomllib.loads(file.read_text())["gap"]:
        known = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
        gaps.append(Gap(**known))
    seen: set[tuple[str, str, str]] = set()
    for gap in gaps:
        for key in ((o, c, d) for o in gap.operators for c in gap.checks for d in gap.dtypes or ("",)):
            if (*key, gap.text) in seen:
                raise ValueError(f"{file.name} lists {key} twice.")
            seen.add((*key, gap.text))  # type: ignore[arg-type]
    return gaps


def deadly(gaps: Iterable[Gap], operator: str) -> set[str]:
    """The checks of an operator that must not be run."""
    return {c for g in gaps if g.dies and operator in g.operators for c in g.checks}


def judge(gaps: list[Gap], records: list[dict[str, Any]], *, whole: bool = False) -> tuple[list[str], list[str]]:
    """Hold a run against the list.

    Args:
        gaps: The known gaps.
        records: From :func:`conformance.suite.run_operator`.
        whole: Whether the run was one of the whole database, in which every listed gap must show.

    Returns:
        The failures that no gap explains, and the gaps that did not show though their check ran.
    """
    unexplained: list[str] = []
    shown: set[tuple[int, str, str]] = set()
    ran: set[tuple[str, str]] = set()
    for record in records:
        name, dtype = record["operator"], record["dtype"]
        ran.update((name, kind) for kind in record["checks"])
        for kind, number, text in record["failures"]:
            match = next((i for i, g in enumerate(gaps) if _about(g, name, kind, dtype) and g.explains(text)), None)
            if match is None:
                unexplained.append(f"{name} ({dtype}), {kind}, sample {number}: {text}")
            else:
                shown.add((match, name, kind))
    stale = [
        f"{name}, {kind}: {gap.text}"
        for i, gap in enumerate(gaps)
        for name in gap.operators
        for kind in gap.checks
        if not gap.sometimes and not gap.dies and (i, name, kind) not in shown and (whole or (name, kind) in ran)
    ]
    return unexplained, stale


def _about(gap: Gap, operator: str, kind: str, dtype: str) -> bool:
    return operator in gap.operators and kind in gap.checks and (not gap.dtypes or dtype in gap.dtypes)
