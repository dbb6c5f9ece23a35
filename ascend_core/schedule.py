"""Simulate a pipeline schedule: when each action runs on each rank, how long ranks idle, how many microbatches are alive.

The actions are those that torch's schedule classes run, taken from the classes themselves; GPipe and 1F1B, which torch
runs by loops instead of lists, are written down by the rule of their loops. Nothing here needs a process group.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import get_schedule_class

from ascend_core.errors import ConfigError, nearest
from ascend_core.schedule_rules import (
    MULTI_STAGE_SCHEDULES,
    SCHEDULES,
    check_microbatches,
    check_stages_per_rank,
    stage_owner,
)

KINDS = {"F": "forward", "B": "backward", "I": "backward of activations", "W": "backward of parameters"}
"""Kinds of actions by torch's letters. B is I and W in one."""

Seconds = float | Sequence[float]
"""One number for every stage, or one per stage."""


@dataclass(frozen=True, order=True)
class Action:
    """One computation of one stage on one microbatch.

    Attributes:
        stage: Stage index.
        kind: A key of :data:`KINDS`.
        microbatch: Its number in the step.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        """Torch's notation, such as ``3F0``."""
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class TimedAction:
    """An action with the rank and the time it ran, in seconds from the start of the step."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """What :func:`simulate` found.

    Attributes:
        schedule: torch's name.
        num_ranks: Pipeline ranks.
        num_microbatches: Microbatches of the step.
        stages_per_rank: Stages of each rank.
        makespan_s: From the first action's start to the last one's end.
        busy_s: Per rank, the time spent in actions.
        peak_live: Per rank, the most microbatches whose activations are held at once; a microbatch counts as
            1 / ``stages_per_rank`` for each stage that has run forward and not yet all of its backward.
        actions: Every action, by rank and time.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    stages_per_rank: int
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_live: tuple[float, ...]
    actions: tuple[TimedAction, ...] = field(repr=False)

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time, 0 to 1."""
        return 1 - sum(self.busy_s) / (self.num_ranks * self.makespan_s)


Step = tuple[Action, ...]
"""One entry of a rank's list: an action, or two that torch calls overlapped and runs one after the other."""


def actions(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> list[list[Action]]:
    """What each rank runs, in order.

    Args:
        schedule: torch's name.
        num_ranks: Pipeline ranks.
        num_microbatches: Microbatches of the step.
        stages_per_rank: Stages of each rank; default: 1 for GPipe and 1F1B, else 2.

    Returns:
        One list per rank.

    Raises:
        ConfigError: The schedule is unknown or does not run with these numbers.
    """
    chunks = _check(schedule, num_ranks, num_microbatches, stages_per_rank)
    return [[a for step in rank for a in step] for rank in _steps(schedule, num_ranks, num_microbatches, chunks)]


@functools.lru_cache(maxsize=32)
def _steps(schedule: str, num_ranks: int, m: int, chunks: int) -> list[list[Step]]:
    if schedule == "GPipe":
        return [[(Action(r, kind, i),) for kind in "FB" for i in range(m)] for r in range(num_ranks)]
    if schedule == "1F1B":
        return [_one_forward_one_backward(r, num_ranks, m) for r in range(num_ranks)]
    stages: Any = [SimpleNamespace(num_stages=num_ranks * chunks, group_size=num_ranks, group_rank=0, submod=None)] * chunks
    order = get_schedule_class(schedule)(stages, m).pipeline_order_with_comms  # type: ignore[attr-defined]
    return [[step for entry in order[r] if (step := _computations(entry))] for r in range(num_ranks)]


def _one_forward_one_backward(rank: int, num_ranks: int, m: int) -> list[Step]:
    ahead = min(m, num_ranks - rank)
    order = [Action(rank, "F", i) for i in range(ahead)]
    for i in range(m):
        order.append(Action(rank, "B", i))
        if ahead + i < m:
            order.append(Action(rank, "F", ahead + i))
    return [(a,) for a in order]


def _computations(entry: Any) -> Step:
    parts = entry.sub_actions or (entry,)
    return tuple(
        Action(p.stage_index, p.computation_type.value, p.microbatch_index) for p in parts if p.computation_type.value in KINDS
    )


def _check(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None) -> int:
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"schedule={schedule!r} is not known.", "Schedules use torch's spelling.", nearest(schedule, SCHEDULES)
        )
    for name, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ConfigError(f"{name}={value!r}: must be at least 1.", "", f"Set {name} to at least 1.")
    chunks = stages_per_rank if stages_per_rank is not None else 2 if schedule in MULTI_STAGE_SCHEDULES else 1
    check_stages_per_rank(schedule, chunks)
    check_microbatches(schedule, num_ranks, num_microbatches)
    return chunks


def simulate(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int | None = None,
    forward_s: Seconds = 1.0,
    backward_input_s: Seconds = 1.0,
    backward_weight_s: Seconds = 1.0,
    p2p_s: float = 0.0,
) -> Simulation:
    """Run a step in simulated time.

    A rank runs its actions in their order, each as soon as its input is there: the activation of the stage before, or the
    gradient from the stage after. What crosses ranks arrives ``p2p_s`` after the action that made it and keeps neither
    rank busy. torch skips the activation gradients of stage 0 (nobody needs them): there, a split backward is all in W.

    Args:
        schedule: torch's name.
        num_ranks: Pipeline ranks.
        num_microbatches: Microbatches of the step.
        stages_per_rank: Stages of each rank; default: 1 for GPipe and 1F1B, else 2.
        forward_s: Forward of one microbatch through one stage.
        backward_input_s: Its gradients of activations.
        backward_weight_s: Its gradients of parameters; a whole backward takes the sum.
        p2p_s: One transfer between ranks.

    Returns:
        Times, bubble and live microbatches.

    Raises:
        ConfigError: The schedule is unknown, or does not run with these numbers.
    """
    chunks = _check(schedule, num_ranks, num_microbatches, stages_per_rank)
    cost = _costs(num_ranks * chunks, forward_s, backward_input_s, backward_weight_s)
    if p2p_s < 0:
        raise ConfigError(f"p2p_s={p2p_s!r}: must be at least 0.", "", "Give seconds.")
    ran = _run(_steps(schedule, num_ranks, num_microbatches, chunks), cost, schedule, p2p_s)
    return Simulation(
        schedule,
        num_ranks,
        num_microbatches,
        chunks,
        max(a.end_s for rank in ran for a in rank),
        tuple(sum(a.end_s - a.start_s for a in rank) for rank in ran),
        tuple(peak_live([a.action for a in rank]) / chunks for rank in ran),
        tuple(a for rank in ran for a in rank),
    )


def _costs(num_stages: int, forward: Seconds, backward_input: Seconds, backward_weight: Seconds) -> dict[str, list[float]]:
    """Seconds by kind and stage, checked."""
    given = {"forward_s": forward, "backward_input_s": backward_input, "backward_weight_s": backward_weight}
    each: dict[str, list[float]] = {}
    for name, value in given.items():
        each[name] = [float(value)] * num_stages if isinstance(value, (int, float)) else [float(v) for v in value]
        if len(each[name]) != num_stages or min(each[name]) < 0:
            raise ConfigError(
                f"{name}={value!r} for {num_stages} stages.",
                "A cost is one number for all stages, or one for each; none is negative.",
                f"Give {num_stages} numbers of at least 0.",
            )
    f, i, w = each.values()
    whole = [a + b for a, b in zip(i, w, strict=True)]
    return {"F": f, "B": whole, "I": [0.0, *i[1:]], "W": [whole[0], *w[1:]]}


def _run(order: list[list[Step]], cost: dict[str, list[float]], schedule: str, p2p_s: float) -> list[list[TimedAction]]:
    """Run every rank's steps as early as their inputs allow."""
    ran: list[list[TimedAction]] = [[] for _ in order]
    clock, done = [0.0] * len(order), [0] * len(order)
    there: dict[Action, float] = {}  # when the input of a forward or backward is on its rank
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(order):
            while done[rank] < len(steps):
                step = steps[done[rank]]
                inputs = [_input_time(a, len(cost["F"]), there) for a in step]
                if None in inputs:
                    break
                for action, ready in zip(step, inputs, strict=True):
                    start = max(clock[rank], ready or 0.0)
                    clock[rank] = start + cost[action.kind][action.stage]
                    ran[rank].append(TimedAction(rank, action, start, clock[rank]))
                for action in step:  # overlapped actions send only when both are done
                    _hand_on(action, clock[rank], p2p_s, schedule, len(order), there)
                done[rank] += 1
                moved = True
    assert all(d == len(steps) for d, steps in zip(done, order, strict=True)), "torch's lists never wait for each other"
    return ran


def _input_time(action: Action, num_stages: int, there: dict[Action, float]) -> float | None:
    """When an action's input is there: 0 if it needs none from another stage, None if that is not known yet."""
    ends = {"F": 0, "B": num_stages - 1, "I": num_stages - 1}
    if action.kind == "W" or action.stage == ends[action.kind]:
        return 0.0
    return there.get(_key(action))


def _key(action: Action) -> Action:
    return Action(action.stage, "F" if action.kind == "F" else "B", action.microbatch)


def _hand_on(action: Action, now: float, p2p_s: float, schedule: str, num_ranks: int, there: dict[Action, float]) -> None:
    if action.kind == "W":
        return
    to = Action(action.stage + (1 if action.kind == "F" else -1), action.kind, action.microbatch)
    here, other = (stage_owner(schedule, s, num_ranks) for s in (action.stage, to.stage))
    there[_key(to)] = now + (p2p_s if here != other else 0.0)


def peak_live(order: Sequence[Action]) -> int:
    """The most stage activations one rank holds at once: those with a forward and no B or W yet."""
    live = peak = 0
    for action in order:
        live += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        peak = max(peak, live)
    return peak
