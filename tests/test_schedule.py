"""Simulated schedules against theory, and their rules."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from ascend_core.errors import ConfigError
from ascend_core.schedule import Action, Simulation, actions, simulate
from ascend_core.schedule_rules import SCHEDULES, V_SCHEDULES, microbatch_problem, stage_owner

CASES = [(s, v) for s in SCHEDULES for v in ((1,) if s in ("GPipe", "1F1B") else (2,) if s in V_SCHEDULES else (2, 3))]


def equal(schedule: str, ranks: int, m: int, chunks: int, p2p_s: float = 0.0) -> Simulation:
    """A rank's share of the model takes 1 s forward, 1 s for gradients of activations and 1 s for those of parameters."""
    cost = 1 / chunks
    return simulate(
        schedule, ranks, m, stages_per_rank=chunks, forward_s=cost, backward_input_s=cost, backward_weight_s=cost, p2p_s=p2p_s
    )


@pytest.mark.parametrize(("ranks", "m"), [(2, 4), (4, 8), (4, 16), (8, 16)])
@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_bubbles_are_those_of_theory(schedule: str, chunks: int, ranks: int, m: int) -> None:
    """Idle seconds of a rank over its makespan: (p-1)(F+B)/v, (p-1)(F+I-W)/v for zero bubble, (p-1)(F+2I-W)/v for DualPipeV."""
    idle = (ranks - 1) * {"InterleavedZeroBubble": 1, "ZBVZeroBubble": 1, "DualPipeV": 2}.get(schedule, 3) / chunks
    run = equal(schedule, ranks, m, chunks)
    assert run.makespan_s == pytest.approx(3 * m + idle)
    assert run.bubble == pytest.approx(idle / (3 * m + idle))
    if schedule in ("GPipe", "1F1B"):
        assert run.bubble == pytest.approx((ranks - 1) / (m + ranks - 1))
    if schedule in ("Interleaved1F1B", "LoopedBFS"):
        assert run.bubble == pytest.approx((ranks - 1) / (chunks * m + ranks - 1))


def test_four_by_eight_with_transfers() -> None:
    """Bubbles of 4 ranks and 8 microbatches in percent, with transfers of 0, 0.1 and 0.25 forwards, and activations held."""
    table = {
        ("GPipe", 1): (27.3, 28.6, 30.4, 8),
        ("1F1B", 1): (27.3, 30.6, 35.1, 4),
        ("Interleaved1F1B", 2): (15.8, 19.7, 25.0, 5.5),
        ("LoopedBFS", 2): (15.8, 17.5, 20.0, 8),
        ("InterleavedZeroBubble", 2): (5.9, 11.4, 18.6, 4),
        ("ZBVZeroBubble", 2): (5.9, 10.4, 16.5, 4),
        ("DualPipeV", 2): (11.1, 16.4, 25.0, 4.5),
    }
    for (schedule, chunks), (*bubbles, live) in table.items():
        for p2p_s, bubble in zip((0.0, 0.1, 0.25), bubbles, strict=True):
            run = equal(schedule, 4, 8, chunks, p2p_s)
            assert 100 * run.bubble == pytest.approx(bubble, abs=0.05), (schedule, p2p_s)
        assert run.peak_live[0] == live
    assert equal("1F1B", 4, 8, 1).peak_live == (4, 3, 2, 1)
    assert equal("ZBVZeroBubble", 4, 8, 2).bubble < 0.11


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_every_action_runs_once_after_what_it_needs(schedule: str, chunks: int) -> None:
    run = simulate(
        schedule, 4, 8, stages_per_rank=chunks, forward_s=[1 + s % 3 for s in range(4 * chunks)], backward_weight_s=0.7, p2p_s=0.25
    )  # fmt: skip
    stages = 4 * chunks
    count = Counter(t.action for t in run.actions)
    ends = {t.action: t.end_s for t in run.actions}
    back = {(a.stage, a.microbatch): a for a in count if a.kind in "BI"}
    assert set(count.values()) == {1} and len(back) == stages * 8
    for t in run.actions:
        a = t.action
        assert t.rank == stage_owner(schedule, a.stage, 4)
        if a.kind == "F":
            needs = [Action(a.stage - 1, "F", a.microbatch)] if a.stage else []
        elif a.kind == "W":
            needs = [Action(a.stage, "I", a.microbatch)]
        else:
            needs = [Action(a.stage, "F", a.microbatch)]
            needs += [back[a.stage + 1, a.microbatch]] if a.stage < stages - 1 else []
        for need in needs:
            away = stage_owner(schedule, need.stage, 4) != t.rank
            assert t.start_s >= ends[need] + (0.25 if away else 0.0) - 1e-9
    for rank in range(4):
        mine = [t for t in run.actions if t.rank == rank]
        assert [t.action for t in mine] == actions(schedule, 4, 8, chunks)[rank]
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(mine))


def test_stage_zero_does_its_split_backward_at_once() -> None:
    """torch skips gradients of stage 0's input; the rest of its backward is one piece, where W stands."""
    spans = {(t.action.stage, t.action.kind): t.end_s - t.start_s for t in equal("ZBVZeroBubble", 2, 4, 2).actions}
    assert spans[0, "I"] == 0 and spans[0, "W"] == pytest.approx(1.0) and spans[1, "I"] == spans[1, "W"] == 0.5


def test_a_slow_stage_sets_the_pace() -> None:
    slow = simulate("1F1B", 4, 64, forward_s=[1, 1, 2, 1], backward_input_s=[1, 1, 2, 1], backward_weight_s=[1, 1, 2, 1])
    assert slow.makespan_s > 64 * 6 and slow.busy_s == (192, 192, 384, 192) and slow.bubble > 0.37


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("1f1b", 2, 4), "did you mean '1F1B'"),
        (("1F1B", 4, 3), "needs at least as many microbatches"),
        (("Interleaved1F1B", 4, 9), "equal rounds"),
        (("GPipe", 2, 4, 2), "run one stage per rank"),
        (("ZBVZeroBubble", 2, 4, 3), "exactly two"),
        (("GPipe", 0, 4), "num_ranks=0"),
        (("GPipe", 2, 0), "num_microbatches=0"),
    ],
)
def test_what_cannot_run_is_refused(arguments: tuple[object, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        actions(*arguments)  # type: ignore[arg-type]


def test_costs_are_checked() -> None:
    with pytest.raises(ConfigError, match="for 4 stages"):
        simulate("1F1B", 4, 8, forward_s=[1, 2])
    with pytest.raises(ConfigError, match="none is negative"):
        simulate("1F1B", 4, 8, backward_weight_s=-1)
    with pytest.raises(ConfigError, match="p2p_s"):
        simulate("1F1B", 4, 8, p2p_s=-1)


def test_what_the_rules_allow_torch_can_list() -> None:
    """Our rules and torch's own checks agree: what we let through, its classes can lay out."""
    for schedule, chunks in CASES:
        for ranks in (1, 2, 3, 4):
            for m in range(1, 13):
                if microbatch_problem(schedule, ranks, m) is None:
                    assert sum(map(len, actions(schedule, ranks, m, chunks))) >= 2 * m * ranks * chunks
