"""The document about a run: ``docs/conformance.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import Any

from conformance.gaps import Gap

MAIN = "float32"
SECONDARY = ("float16", "bfloat16", "int64", "bool", "complex64")
"""Types of which only the first sample of each operator is run."""

MEANING = {
    "forward": "result, memory layout, what it shares memory with, and what became of the inputs",
    "method": "the same through the tensor's method",
    "backward": "result and gradients of all differentiable inputs, for the same random gradient of the output",
    "noncontiguous": "the same with strided inputs",
    "empty": "the same with the first dimension cut to size zero",
    "random": "the same seed gives the same numbers, and the generator moves on; values are not compared with the CPU's",
    "in-place": "the result is the input itself",
    "in-place strided": "on a transposed view: the memory around it is untouched",
    "in-place gradient": "gradients through an in-place change",
    "out right": "`out=` of the right shape: written where it is",
    "out empty": "`out=` without elements grows",
    "out longer": "`out=` of a wrong shape takes the right one, with torch's warning",
    "out strided": "`out=` that is a strided view stays one",
    "out dtype": "`out=` of a type that cannot hold the result",
    "out device": "`out=` on the CPU is refused",
    "view": "what is written to a view is seen in the input",
    "view gradient": "gradients through a change of a view",
    "errors": "the database's wrong inputs",
}


def write(
    path: Path, records: list[dict[str, Any]], known: list[Gap], layers: dict[str, int], names: dict[str, list[str]]
) -> None:
    """Write the document.

    Args:
        path: Where.
        records: Of the whole run, all types.
        known: The known gaps.
        layers: How many of torch's operators each layer of the emulator serves.
        names: ``skipped``, operators without a CPU kernel; ``uninitialized``, ones that return memory as it is.
    """
    import torch

    skipped, uninitialized = names["skipped"], names["uninitialized"]

    main, other = [r for r in records if r["main"]], [r for r in records if not r["main"]]
    ran, unlike = {r["operator"] for r in main}, {o for g in known for o in g.operators}
    elsewhere = sorted({r["operator"] for r in main if r["dtype"] != MAIN})
    served = ", ".join(f"{count} {name}" for name, count in sorted(layers.items()))
    path.write_text(
        f"""# Conformance of the emulated NPU's operators

Written by `make conformance`; do not edit. PyTorch's own operator database (`op_db` of torch {torch.__version__.split("+")[0]}): every sample input of
every operator runs on the CPU and on the emulated NPU. Results must be equal to the last bit, with the same types, shapes
and strides; where the CPU raises, the NPU must raise the same type of error. Numbers and limits of real NPUs are no
subject here: see [emulator.md](emulator.md).

- {len(ran)} operators, {sum(r["samples"] for r in main)} samples, {MAIN} where the operator takes it; {len(ran - unlike)} operators differ in nothing.
- Operators of torch by layer of the emulator: {served}.
- {len(elsewhere)} operators take no {MAIN} and run with int64 or complex64: {", ".join(f"`{n}`" for n in elsewhere)}.
- {len(skipped)} more have no CPU kernel to compare with: {", ".join(f"`{n}`" for n in skipped)}.
- Random numbers, and memory that was never written, are compared in type, shape and strides only: {_count(main, "random")} samples that draw,
  and {", ".join(f"`{n}`" for n in uninitialized)}.
- A part of it runs with the tests: `tests/test_conformance.py`.

## Checks

| check | what is compared | equal | same error | known difference |
|---|---|--:|--:|--:|
{_checks(main)}
## Other types

The first sample of each operator that supports the type on the CPU.

| type | operators | equal | same error | known difference |
|---|--:|--:|--:|--:|
{_types(other)}
{gap_section(known)}"""
    )


def _checks(records: Iterable[dict[str, Any]]) -> str:
    totals: dict[str, Counter[str]] = {kind: Counter() for kind in MEANING}
    for record in records:
        for kind, counts in record["checks"].items():
            totals[kind].update(counts)
    return "".join(f"| {k} | {MEANING[k]} | {c['equal']} | {c['refused']} | {c['failed']} |\n" for k, c in totals.items())


def _count(records: list[dict[str, Any]], kind: str) -> int:
    return sum(sum(r["checks"].get(kind, {}).values()) for r in records)


def _types(records: list[dict[str, Any]]) -> str:
    lines = ""
    for dtype in SECONDARY:
        mine = [r for r in records if r["dtype"] == dtype]
        total: Counter[str] = Counter()
        for record in mine:
            for counts in record["checks"].values():
                total.update(counts)
        lines += f"| {dtype} | {len(mine)} | {total['equal']} | {total['refused']} | {total['failed']} |\n"
    return lines


def gap_section(known: list[Gap]) -> str:
    """The part of the document that follows from ``gaps.toml`` alone."""
    text = "## Known differences\n\nEach is listed in `tests/conformance/gaps.toml`; a run fails on any other, and on one of these that is no more.\n"
    for gap in known:
        limits = [f"at most {gap.within:.0e} of the largest element"] if 0 < gap.within < inf else []
        limits += ["not in every run"] if gap.sometimes else []
        limits += ["not run"] if gap.dies else []
        text += f"\n**{gap.reason}**{' (' + '; '.join(limits) + ')' if limits else ''}\n\n"
        text += f"- operators: {', '.join(f'`{o}`' for o in gap.operators)}\n- checks: {', '.join(gap.checks)}\n"
        text += f"- types: {', '.join(gap.dtypes)}\n" if gap.dtypes else ""
    return text
