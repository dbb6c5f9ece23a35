"""``python -m ascend_core plan``: simulate pipeline schedules, print what they cost, and draw their timelines."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ascend_core import timeline_view
from ascend_core.config import HybridConfig
from ascend_core.errors import ConfigError
from ascend_core.parallel.balance import balance
from ascend_core.parallel.block_costs import BlockCosts
from ascend_core.parallel.blocks import equal_cut
from ascend_core.schedule import Simulation, simulate
from ascend_core.schedule_rules import MULTI_STAGE_SCHEDULES, SCHEDULES, V_SCHEDULES

_HEADER = ("schedule", "stages per rank", "makespan, ms", "bubble", "in theory", "peak live microbatches by rank")


@dataclass(frozen=True)
class Question:
    """What is simulated.

    Attributes:
        schedule: torch's name, or ``"all"``.
        num_ranks: Pipeline ranks.
        num_microbatches: Microbatches of a step.
        stages_per_rank: For schedules that have several; None for 2.
        forward_s: Forward of one microbatch through a rank's share of the model.
        backward_input_s: Gradients of its activations.
        backward_weight_s: Gradients of its parameters.
        p2p_s: One transfer between ranks.
        num_blocks: Blocks of the model, or None for stages of equal cost.
        head_cost: Cost of the output head in blocks.
        cut: ``"balanced"`` by cost, or ``"equal"`` numbers of blocks.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    stages_per_rank: int | None = None
    forward_s: float = 1e-3
    backward_input_s: float = 1e-3
    backward_weight_s: float = 1e-3
    p2p_s: float = 0.0
    num_blocks: int | None = None
    head_cost: float = 0.0
    cut: str = "balanced"

    def answers(self) -> dict[str, Simulation | ConfigError]:
        """Simulate each schedule that is asked for; of all schedules, some may not run with these numbers.

        Raises:
            ConfigError: None of them runs.
        """
        found: dict[str, Simulation | ConfigError] = {}
        for name in SCHEDULES if self.schedule == "all" else (self.schedule,):
            try:
                found[name] = self.simulate(name)
            except ConfigError as error:
                found[name] = error
        errors = [answer for answer in found.values() if isinstance(answer, ConfigError)]
        if len(errors) == len(found):
            raise errors[0]
        return found

    def simulate(self, schedule: str) -> Simulation:
        """Simulate one schedule.

        Raises:
            ConfigError: The schedule is unknown or does not run with these numbers.
        """
        chunks = self.stages_per_rank
        if self.schedule == "all" and (schedule in V_SCHEDULES or schedule not in MULTI_STAGE_SCHEDULES):
            chunks = None
        weights = self._stage_weights(schedule, chunks)
        return simulate(
            schedule,
            self.num_ranks,
            self.num_microbatches,
            stages_per_rank=chunks,
            forward_s=[self.forward_s * w for w in weights],
            backward_input_s=[self.backward_input_s * w for w in weights],
            backward_weight_s=[self.backward_weight_s * w for w in weights],
            p2p_s=self.p2p_s,
        )

    def _stage_weights(self, schedule: str, chunks: int | None) -> list[float]:
        """Cost of every stage in shares of a rank; together they cost as much as there are ranks."""
        stages = self.num_ranks * (chunks or (2 if schedule in MULTI_STAGE_SCHEDULES else 1))
        if self.num_blocks is None:
            return [self.num_ranks / stages] * stages
        if self.num_blocks < stages:
            raise ConfigError(
                f"{stages} stages, but {self.num_blocks} blocks.", "Each stage needs a block.", "Use fewer stages."
            )
        costs = BlockCosts((1.0,) * self.num_blocks, after=self.head_cost)
        balanced = self.cut == "balanced"
        cut = balance(costs, stages, schedule, self.num_ranks) if balanced else equal_cut(self.num_blocks, stages)
        each = costs.stages(cut)
        return [self.num_ranks * c / sum(each) for c in each]

    def theory(self, run: Simulation) -> float:
        """Bubble of stages of equal cost without transfers.

        GPipe, 1F1B and their interleaved forms idle for ``(p-1)(F+I+W)/v`` per rank (Narayanan et al. 2021), the
        zero-bubble ones for ``(p-1)(F+I-W)/v`` (Qi et al. 2023), DualPipeV for ``(p-1)(F+2I-W)/v`` (DeepSeek-AI 2024, for
        two passes that overlap without gain).
        """
        f, i, w = self.forward_s, self.backward_input_s, self.backward_weight_s
        one = {"InterleavedZeroBubble": f + i - w, "ZBVZeroBubble": f + i - w, "DualPipeV": f + 2 * i - w}
        idle = max(0.0, (self.num_ranks - 1) * one.get(run.schedule, f + i + w) / run.stages_per_rank)
        return idle / (self.num_microbatches * (f + i + w) + idle)


def table(question: Question, answers: Mapping[str, Simulation | ConfigError]) -> str:
    """Write answers as a table in Markdown."""
    rows = [list(_HEADER)]
    for name, run in answers.items():
        if isinstance(run, ConfigError):
            rows.append([name, "-", "-", "-", "-", f"cannot run: {run.why or run.what}"])
            continue
        live = [f"{v:.3g}" for v in run.peak_live]
        shares = [f"{100 * share:.1f} %" for share in (run.bubble, question.theory(run))]
        rows.append([name, str(run.stages_per_rank), f"{1e3 * run.makespan_s:.2f}", *shares, " ".join(live)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    rows.insert(1, ["-" * width for width in widths])
    return "".join("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |\n" for row in rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``plan``."""
    parser.add_argument("--config", type=Path, help="YAML or JSON configuration; options below win over it")
    parser.add_argument("--schedule", help="one of torch's schedules, or 'all' (default)")
    parser.add_argument("--pipeline-parallel-size", type=int, help="pipeline ranks")
    parser.add_argument("--num-microbatches", type=int, help="microbatches of a step (default: 4 per rank)")
    parser.add_argument("--stages-per-rank", type=int, help="for schedules with several (default 2)")
    parser.add_argument("--forward-ms", type=float, default=1.0, help="one microbatch through one rank's share of the model")
    parser.add_argument("--backward-input-ms", type=float, help="gradients of its activations (default: as forward)")
    parser.add_argument("--backward-weight-ms", type=float, help="gradients of its parameters (default: as forward)")
    parser.add_argument("--p2p-ms", type=float, default=0.0, help="one transfer between ranks (default 0)")
    parser.add_argument("--num-blocks", type=int, help="blocks of the model (default: stages of equal cost)")
    parser.add_argument("--head-cost", type=float, help="cost of the output head in blocks, with --num-blocks")
    parser.add_argument("--cut", choices=["balanced", "equal"], help="stages by cost (default), or by number of blocks")
    parser.add_argument("--timeline", type=Path, metavar="OUT.html", help="draw the timelines into a web page")


def question_from(options: argparse.Namespace) -> Question:
    """Build the question from options and configuration file.

    Raises:
        ConfigError: Nothing says how many ranks there are, or options do not fit together.
    """
    config = HybridConfig.from_file(options.config) if options.config is not None else None
    ranks = options.pipeline_parallel_size
    if ranks is None and config is not None and config.pipeline_parallel_size != "auto":
        ranks = int(config.pipeline_parallel_size)
    if ranks is None:
        raise ConfigError("The number of pipeline ranks is not known.", "", "Give --pipeline-parallel-size.")
    if options.num_blocks is None and (options.head_cost is not None or options.cut is not None):
        raise ConfigError("--head-cost or --cut without --num-blocks.", "They would be ignored.", "Give --num-blocks.")
    schedule, microbatches, chunks = options.schedule, options.num_microbatches, options.stages_per_rank
    if config is not None:
        schedule = schedule or config.schedule
        if config.num_microbatches != "auto" and microbatches is None:
            microbatches = int(config.num_microbatches)
        if chunks is None and config.stages_per_rank != "auto":
            chunks = int(config.stages_per_rank)
    forward = options.forward_ms
    if forward <= 0:
        raise ConfigError(f"--forward-ms {forward}: must be above 0.", "", "Give milliseconds.")

    def seconds(value: float | None) -> float:
        return (forward if value is None else value) / 1e3

    return Question(
        schedule or "all",
        ranks,
        4 * ranks if microbatches is None else microbatches,
        chunks,
        seconds(forward),
        seconds(options.backward_input_ms),
        seconds(options.backward_weight_ms),
        options.p2p_ms / 1e3,
        options.num_blocks,
        options.head_cost or 0.0,
        options.cut or "balanced",
    )


def run(options: argparse.Namespace) -> str:
    """Answer, and draw the timelines if asked to.

    Returns:
        What is printed.

    Raises:
        ConfigError: See :func:`question_from`; or the page cannot be written.
    """
    question = question_from(options)
    answers = question.answers()
    if options.timeline is not None:
        title = f"{question.num_ranks} pipeline ranks, {question.num_microbatches} microbatches"
        charts = {
            f"{name}: bubble {100 * r.bubble:.1f} %, makespan {1e3 * r.makespan_s:.2f} ms": r.actions
            for name, r in answers.items()
            if isinstance(r, Simulation)
        }
        try:
            options.timeline.write_text(timeline_view.page(title, charts), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"Cannot write {options.timeline}.", str(error), "Give a file in a folder that exists."
            ) from error
    return table(question, answers)
