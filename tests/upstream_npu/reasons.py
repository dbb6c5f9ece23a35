"""The list of reasons: which upstream tests do not pass here, and why. A run is judged by it, in both directions."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("reasons.toml")

NOT_APPLICABLE = {
    "kernel": "needs a real NPU kernel, compiler or graph executor",
    "fused": "needs a fused `npu::` operator that is not emulated",
    "profiler": "needs the profiler or its files",
    "cann": "needs files or tools of an installed CANN",
    "network": "needs data or packages that are not here",
    "hardware": "asserts on the hardware's numerics, formats or limits",
}
EXPLAINED = {
    "upstream": "fails by itself: the test does not fit the torch_npu or torch of the wheel, or is wrong",
    "limit": "a known limit of the emulator",
}
KINDS = NOT_APPLICABLE | EXPLAINED


@dataclass(frozen=True)
class Reason:
    """Why some tests do not pass.

    Attributes:
        file: Test file.
        tests: Names ``Class::test``; ``*`` stands for a file that cannot be collected.
        kind: One of :data:`KINDS`.
        why: In words.
        says: What the failure, or the test's output, must contain: a test that fails otherwise needs another reason.
    """

    file: str
    tests: tuple[str, ...]
    kind: str
    why: str
    says: str = ""

    def covers(self, outcome: dict[str, Any]) -> bool:
        """Whether a test failed in the way that this reason is for."""
        return self.says in outcome["why"] or self.says in outcome.get("output", "")


@dataclass
class Judged:
    """What a run says about the reasons.

    Attributes:
        reason_of: Reason of each ``(file, test)`` that did not pass.
        problems: Failures without a reason, and reasons that do not hold.
    """

    reason_of: dict[tuple[str, str], Reason] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def load(path: Path = FILE) -> list[Reason]:
    """Read and check the list."""
    rows = tomllib.loads(path.read_text()).get("reason", [])
    found = [Reason(r["file"], tuple(r["tests"]), r["kind"], r["why"], r.get("says", "")) for r in rows]
    unknown = [r for r in found if r.kind not in KINDS or not r.why or not r.tests]
    if unknown:
        raise ValueError(f"{path}: no such kind, or no words: {unknown[0]}")
    return found


def judge(results: dict[str, dict[str, Any]], listed: list[Reason]) -> Judged:
    """Hold results against the list.

    Args:
        results: Per file what :func:`tests.upstream_npu.run.run_file` returned.
        listed: The reasons.
    """
    judged = Judged()
    of_test = {(r.file, t): r for r in listed for t in r.tests}
    for file, result in results.items():
        for test, outcome in result["tests"].items():
            reason = of_test.pop((file, test), None)
            if outcome["outcome"] == "failed" and reason and reason.covers(outcome):
                judged.reason_of[file, test] = reason
            elif outcome["outcome"] == "failed":
                last = [line for line in outcome["why"].splitlines() if line.strip()]
                known = f" (not as listed: {reason.says!r})" if reason else ""
                judged.problems.append(f"FAILED {file}::{test}: {last[-1] if last else ''}{known}")
            elif reason is not None:
                judged.problems.append(f"{outcome['outcome'].upper()}, but listed as failing: {file}::{test}")
    judged.problems += [f"NOT THERE, but listed as failing: {file}::{test}" for file, test in of_test if file in results]
    return judged
