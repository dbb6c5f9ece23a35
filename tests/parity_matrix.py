"""The parity matrix: layout x schedule x ZeRO x sequence parallel x recomputation x accumulation, cell by cell.

    python -m tests.parity_matrix [--only TEXT ...]        # all cells, and docs/parity.md

A cell trains a small GPT for three optimizer steps and is compared with one process, or is refused when it is built. The
axes of lesser weight rotate, so that each of their values meets each value of the others.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "parity.md"
TOLERANCE = 1e-5
STEPS = 3

SIZES = (
    (1, 1, 2), (1, 1, 4), (1, 2, 1), (1, 4, 1), (1, 2, 2), (1, 2, 4), (1, 4, 2),
    (2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 4, 1), (4, 2, 1), (2, 1, 2), (2, 1, 4), (4, 1, 2), (2, 2, 2),
)  # fmt: skip
"""Pipeline, tensor and data-parallel size."""

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
ZERO: dict[str, dict[str, Any]] = {
    "0": {},
    "1": {"zero_stage": 1},
    "1 partitioned": {"zero_stage": 1, "partition_gradients": True, "contiguous_gradients": True},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "3 hybrid": {"zero_stage": 3, "data_parallel_shard_size": 2},
}


@dataclass(frozen=True)
class Cell:
    """One combination.

    Attributes:
        sizes: Pipeline, tensor and data-parallel size.
        schedule: Schedule, or "" without a pipeline.
        zero: Key of ``ZERO``.
        sequence_parallel: Whether it is on.
        recompute: Blocks of a group; 0 for none.
        accumulate: Batches of an optimizer step.
    """

    sizes: tuple[int, int, int]
    schedule: str
    zero: str
    sequence_parallel: bool
    recompute: int
    accumulate: int

    @property
    def world(self) -> int:
        """Ranks."""
        pp, tp, dp = self.sizes
        return pp * tp * dp

    @property
    def name(self) -> str:
        """Short and unique."""
        pp, tp, dp = self.sizes
        parts = [f"pp{pp}", self.schedule, f"tp{tp}", "sp" * self.sequence_parallel, f"dp{dp}", f"zero{self.zero}" * (dp > 1)]
        return " ".join(p for p in (*parts, f"ac{self.recompute}" * bool(self.recompute), f"acc{self.accumulate}") if p)

    @property
    def row(self) -> list[str]:
        """The first cells of its row in the page."""
        pp, tp, dp = self.sizes
        values = [pp, tp, dp, self.schedule, self.zero if dp > 1 else "", "yes" if self.sequence_parallel else ""]
        return [str(v) for v in (*values, self.recompute or "", self.accumulate)]

    @property
    def config(self) -> dict[str, Any]:
        """Fields of the configuration."""
        pp, tp, _ = self.sizes
        fields: dict[str, Any] = {"tensor_parallel_size": tp, **ZERO[self.zero]}
        if pp > 1:
            fields |= {"pipeline_parallel_size": pp, "schedule": self.schedule}
            fields["num_microbatches"] = 2 * pp if self.schedule == "DualPipeV" else pp
        if self.sequence_parallel:
            fields["sequence_parallel"] = True
        if self.recompute:
            fields["activation_checkpoint_blocks"] = self.recompute
        return fields

    @property
    def model(self) -> dict[str, Any]:
        """Options of the model: each stage has a block at least."""
        return {"layers": 8 if self.sizes[0] == 4 else 4}

    @property
    def refused_by(self) -> str | None:
        """Why the combination is refused, or None."""
        return "ZeRO-3 gathers parameters again for every microbatch" if self.sizes[0] > 1 and self.zero == "3" else None


def cells() -> list[Cell]:
    """All cells, in a fixed order."""
    found = []
    for sizes in SIZES:
        pp, tp, dp = sizes
        for schedule in SCHEDULES if pp > 1 else ("",):
            for zero in _zero_of(dp, pp):
                for again in range(1 if pp > 1 else 2):
                    turn = len(found)
                    sequence_parallel = tp > 1 and (turn // 2 + again) % 2 == 0
                    recompute = (0, 2, 3)[(turn + again) % 3]
                    found.append(Cell(sizes, schedule, zero, sequence_parallel, recompute, 1 + (turn + turn // 3) % 2))
    return found


def _zero_of(dp: int, pp: int) -> tuple[str, ...]:
    if dp == 1:
        return ("0",)
    if pp > 1:
        return ("0", "1 partitioned", "2", "3")
    return ("0", "1", "1 partitioned", "2", "3") + (("3 hybrid",) if dp == 4 else ())


def bounded(limit: int = 24) -> list[Cell]:
    """A few cells on up to four ranks in which every value of every axis meets every value of the others that it can meet.

    Greedy: the cell with most new pairs comes next.
    """

    def pairs(cell: Cell) -> set[tuple[Any, ...]]:
        values = list(
            enumerate((cell.sizes, cell.schedule, cell.zero, cell.sequence_parallel, cell.recompute, cell.accumulate))
        )
        return {(a, b) for i, a in enumerate(values) for b in values[i + 1 :]}

    left, seen, chosen = [c for c in cells() if c.world <= 4], set(), []
    while left and len(chosen) < limit:
        best = max(left, key=lambda c: len(pairs(c) - seen))
        chosen.append(best)
        seen |= pairs(best)
        left.remove(best)
    return chosen


def run(pool: Any, cell: Cell, device_type: str = "cpu") -> dict[str, float]:
    """Train a cell; returns the largest difference of each kind over all ranks."""
    import parity

    results = pool.run(cell.world, parity.compare, cell.config, cell.model, device_type, STEPS, cell.accumulate, deadline_s=200)
    return {key: max(r[key] for r in results if key in r) for key in results[0]}


def page(results: dict[str, dict[str, float]]) -> str:
    """The page for these results."""
    done = [c for c in cells() if c.name in results]
    exact = [c for c in done if not c.refused_by]
    worst = {key: max(results[c.name][key] for c in exact) for key in results[exact[0].name]}
    lines = [
        "# Parity matrix",
        "",
        "Written by `make parity`. Every cell trains a small GPT (4 or 8 blocks, tied embedding, fused attention) for three",
        "optimizer steps with AdamW, norm clipping and an evaluation in between, and is compared with the same model, data and",
        "global batch in one process, fp32, on CPU ranks. A cell passes when loss, gradient norm, gradients of the first step",
        f"and parameters all differ by less than {TOLERANCE:g}; the numbers are the largest differences. `make test` runs a part.",
        "",
        f"{len(done)} cells: {len(exact)} exact, {len(done) - len(exact)} refused when they are built. Largest differences: "
        + ", ".join(f"{key} {value:.1e}" for key, value in worst.items())
        + ".",
        "",
        "| pp | tp | dp | schedule | ZeRO | SP | AC | accumulation | loss | norm | gradients | parameters |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for c in done:
        r = results[c.name]
        tail = [f"{r[k]:.1e}" for k in ("loss", "norm", "grad", "param")] if not c.refused_by else ["refused", "", "", ""]
        lines.append("| " + " | ".join((*c.row, *tail)) + " |")
    reasons = sorted({str(c.refused_by) for c in done if c.refused_by})
    lines += ["", "Refused: " + "; ".join(f"{r} under a pipeline" for r in reasons) + ".", ""]
    return "\n".join(lines)


def main() -> int:
    """Run the cells, print one line each, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only cells whose names contain all of these; no page")
    only = parser.parse_args().only
    sys.path.insert(0, str(ROOT / "tests"))
    from rank_pool import RankPool

    from ascend_core import HybridConfig
    from ascend_core.errors import ConfigError

    pool, failures, results = RankPool(8), [], {}
    chosen = [c for c in cells() if not only or all(text in c.name.split() for text in only)]
    for number, cell in enumerate(chosen, 1):
        started = time.monotonic()
        try:
            if cell.refused_by:
                try:
                    HybridConfig(**cell.config)
                    failures.append(f"{cell.name}: not refused")
                except ConfigError:
                    results[cell.name] = {}
                continue
            results[cell.name] = run(pool, cell)
            worst = max(results[cell.name].values())
            if not worst < TOLERANCE:
                failures.append(f"{cell.name}: differs by {worst:.1e}")
            print(f"[{number}/{len(chosen)}] {cell.name}: {worst:.1e} in {time.monotonic() - started:.0f} s", flush=True)
        except AssertionError as error:
            failures.append(f"{cell.name}: {str(error).strip().splitlines()[-1]}")
            print(f"[{number}/{len(chosen)}] {cell.name}: FAILED {failures[-1]}", flush=True)
    pool.close()
    if not only and not failures:
        PAGE.write_text(page(results))
    print("\n".join(failures) or f"{len(results)} cells, none differs")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
