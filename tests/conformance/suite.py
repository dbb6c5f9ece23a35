"""Every check on every sample of an operator, and the record of it."""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from conformance import check, writes
from conformance.check import Case, Verdict
from conformance.compare import MismatchError, alike
from conformance.samples import draw

CHECKS: dict[str, Callable[[Case], Verdict]] = {
    "forward": check.forward,
    "method": check.method,
    "backward": check.backward,
    "noncontiguous": check.noncontiguous,
    "empty": check.empty,
    "random": check.seeded,
    "in-place": writes.in_place,
    "in-place strided": writes.in_place_strided,
    "in-place gradient": writes.in_place_gradient,
    **{f"out {kind}": partial(writes.out, kind=kind) for kind in writes.OUT_KINDS},
    "view": writes.through_views,
    "view gradient": writes.through_views_gradient,
}
"""The checks of a sample by name; ``errors`` is the one more, over the database's wrong inputs."""

MOST_TEXTS = 20


def run_operator(
    name: str, op: Any, dtype: torch.dtype, limit: int | None = None, skip: Collection[str] = ()
) -> dict[str, Any]:
    """Run an operator's checks.

    Args:
        name: The operator's full name.
        op: Its entry in the database.
        dtype: Type of the samples.
        limit: Use the first samples only.
        skip: Names of checks that are not run.

    Returns:
        The record: ``operator``, ``dtype``, ``samples``, ``checks`` (name to counts of equal, refused and failed),
        ``failures`` (check, number of the sample, text; distinct texts), ``seconds``.
    """
    start = time.monotonic()
    counts: dict[str, Counter[str]] = {}
    failures: list[tuple[str, int, str]] = []
    texts: dict[str, set[str]] = {}

    def record(kind: str, number: int, action: Callable[[], Verdict]) -> None:
        try:
            verdict = action()
        except MismatchError as difference:
            verdict, text = "failed", str(difference)
        except Exception as error:  # a fault of the comparison itself
            verdict, text = "failed", "check: " + traceback.format_exception_only(error)[-1].strip()[:300]
        if verdict is None:
            return
        counts.setdefault(kind, Counter())[verdict] += 1
        if verdict == "failed" and text not in texts.setdefault(kind, set()) and len(texts[kind]) < MOST_TEXTS:
            texts[kind].add(text)
            failures.append((kind, number, text))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = draw(op, dtype, limit)
        for number, sample in enumerate(samples):
            case = Case(op, sample)
            for kind, function in CHECKS.items():
                if kind not in skip:
                    record(kind, number, partial(function, case))
        if op.error_inputs_func is not None and "errors" not in skip:
            for number, wrong in enumerate(_error_samples(op)):
                record("errors", number, partial(_refuses, op, wrong))
    gc.collect()
    return {
        "operator": name, "dtype": str(dtype).removeprefix("torch."), "samples": len(samples),
        "checks": {k: dict(c) for k, c in counts.items()}, "failures": failures, "seconds": round(time.monotonic() - start, 2),
    }  # fmt: skip


def _error_samples(op: Any) -> list[Any]:
    with contextlib.suppress(NotImplementedError):
        return [wrong.sample_input for wrong in op.error_inputs("cpu")]
    return []


def _refuses(op: Any, sample: Any) -> Verdict:
    """Wrong inputs raise the same error on both devices."""
    cpu, npu = Case(op, sample).both(lambda call: call.run(op.op))
    return "equal" if alike(cpu, npu) else "refused"
