"""The pipeline schedules by torch's names: how many stages a rank has, which ones, and which numbers of microbatches run."""

from __future__ import annotations

from ascend_core.errors import ConfigError

SINGLE_STAGE_SCHEDULES = ("GPipe", "1F1B")
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
"""Rank ``r`` of ``p`` owns stages ``r`` and ``2p - 1 - r``: the first and the last stage are on one rank."""

SPLIT_BACKWARD_SCHEDULES = ("InterleavedZeroBubble", *V_SCHEDULES)
"""Gradients of activations come first, those of parameters later, in what would be idle time."""

MULTI_STAGE_SCHEDULES = ("Interleaved1F1B", "LoopedBFS", *SPLIT_BACKWARD_SCHEDULES)
SCHEDULES = SINGLE_STAGE_SCHEDULES + MULTI_STAGE_SCHEDULES


def check_microbatches(schedule: str, pipeline_parallel_size: int, num_microbatches: int) -> None:
    """Check that a schedule can run with so many microbatches.

    Raises:
        ConfigError: 1F1B and Interleaved1F1B have fewer microbatches than ranks, or Interleaved1F1B a number that does
            not divide into whole rounds.
    """
    problem = microbatch_problem(schedule, pipeline_parallel_size, num_microbatches)
    if problem:
        raise ConfigError(
            f"num_microbatches={num_microbatches} with schedule={schedule!r} and "
            f"pipeline_parallel_size={pipeline_parallel_size}.",
            problem,
            f"Set num_microbatches to a multiple of {2 * pipeline_parallel_size}, or use schedule='GPipe'.",
        )


def check_stages_per_rank(schedule: str, stages_per_rank: int) -> None:
    """Check that a schedule can run with so many stages on each rank.

    Raises:
        ConfigError: GPipe and 1F1B have more than one, another schedule has one, or a V schedule has not two.
    """
    if (stages_per_rank > 1) != (schedule in MULTI_STAGE_SCHEDULES):
        raise ConfigError(
            f"stages_per_rank={stages_per_rank} with schedule={schedule!r}.",
            "GPipe and 1F1B run one stage per rank; the other schedules run several.",
            "Change stages_per_rank or schedule.",
        )
    if schedule in V_SCHEDULES and stages_per_rank != 2:
        raise ConfigError(
            f"stages_per_rank={stages_per_rank} with schedule={schedule!r}.",
            "Its stages go down the ranks and up again: each rank has exactly two.",
            "Leave stages_per_rank out, or use InterleavedZeroBubble.",
        )


def microbatch_problem(schedule: str, pipeline_parallel_size: int, num_microbatches: int) -> str | None:
    """Say why a schedule cannot run with so many microbatches, or None when it can."""
    p, m = pipeline_parallel_size, num_microbatches
    if schedule in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble") and m < p:
        return f"{schedule} needs at least as many microbatches as pipeline ranks ({m} < {p})."
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and m % max(1, m // p):
        return f"{schedule} runs in rounds, and {m} microbatches do not divide into {m // p} equal rounds."
    if schedule == "DualPipeV" and m < 2 * p:
        return f"DualPipeV needs at least as many microbatches as stages ({m} < {2 * p})."
    return None


def stage_owner(schedule: str, stage: int, pipeline_size: int) -> int:
    """Pipeline rank that owns a stage: round robin, or down the ranks and up again for V schedules."""
    place = stage % (2 * pipeline_size)
    if schedule in V_SCHEDULES and place >= pipeline_size:
        return 2 * pipeline_size - 1 - place
    return stage % pipeline_size
