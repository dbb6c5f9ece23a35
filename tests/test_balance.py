"""Stages of equal cost: the cut is the best one, costs are right, and a model cut anywhere trains like one process."""

from __future__ import annotations

import itertools
from typing import Any

import balanced
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool
from torch import nn

from ascend_core.errors import ModelError
from ascend_core.parallel.balance import balance
from ascend_core.parallel.block_costs import BlockCosts, estimated_costs, measured_costs
from ascend_core.parallel.blocks import equal_cut, find_blocks
from ascend_core.schedule import simulate
from ascend_core.schedule_rules import stage_owner


@settings(deadline=None)
@given(
    blocks=st.lists(st.integers(0, 9), min_size=4, max_size=8), ends=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    schedule=st.sampled_from(["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]),
)  # fmt: skip
def test_no_cut_has_a_cheaper_largest_stage(blocks: list[int], ends: tuple[int, int], schedule: str) -> None:
    """Against all cuts of up to eight blocks into four stages."""
    costs = BlockCosts(tuple(map(float, blocks)), *map(float, ends))
    cut = balance(costs, 4, schedule, 4 if schedule == "1F1B" else 2)
    assert [i for first, end in cut for i in range(first, end)] == list(range(len(blocks)))
    assert all(first < end for first, end in cut)
    every = [list(itertools.pairwise((0, *inner, len(blocks)))) for inner in itertools.combinations(range(1, len(blocks)), 3)]
    assert max(costs.stages(cut)) == min(max(costs.stages(c)) for c in every)


def test_without_extras_the_cut_is_as_equal_as_can_be_and_early_stages_are_the_small_ones() -> None:
    for n, stages in ((7, 2), (8, 4), (10, 4), (24, 8), (5, 5)):
        cut = balance(BlockCosts((1.0,) * n), stages, "1F1B", stages)
        assert sorted(b - a for a, b in cut) == sorted(b - a for a, b in equal_cut(n, stages))
        assert [b - a for a, b in cut] == sorted(b - a for a, b in cut)


def test_a_large_head_takes_blocks_off_the_last_stage() -> None:
    costs = BlockCosts((1.0,) * 24, after=2.4)
    assert [b - a for a, b in balance(costs, 4, "1F1B", 4)] == [6, 7, 7, 4]
    stages = balance(costs, 8, "ZBVZeroBubble", 4)
    ranks = [0.0] * 4
    for stage, cost in enumerate(costs.stages(stages)):
        ranks[stage_owner("ZBVZeroBubble", stage, 4)] += cost
    assert max(costs.stages(stages)) <= 4 and max(ranks) <= 7, "no rank has two of the larger stages"
    heavy = balance(BlockCosts((1.0,) * 12, after=5.0), 8, "ZBVZeroBubble", 4)
    assert heavy[0] == (0, 1), "the rank of a last stage that cannot be lighter gets the lightest first stage"


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("head", [2.4, 6.0])
def test_a_balanced_cut_is_faster(schedule: str, head: float) -> None:
    """Simulated step of 24 blocks and a head on 4 ranks, against equal numbers of blocks."""
    stages = 4 if schedule == "1F1B" else 8
    costs = BlockCosts((1.0,) * 24, after=head)
    spans = []
    for cut in (balance(costs, stages, schedule, 4), equal_cut(24, stages)):
        each = costs.stages(cut)
        spans.append(simulate(schedule, 4, 8, forward_s=each, backward_input_s=each, backward_weight_s=each).makespan_s)
    assert spans[0] < spans[1]


def test_estimates_count_what_is_multiplied() -> None:
    """A block of the small GPT has 2 norms, 4 linear layers; its embedding costs nothing, its tied head counts."""
    model = tiny.build(layers=3)
    costs = estimated_costs(model, find_blocks(model, root_is_boundary=True))
    block = sum(p.numel() for p in model.blocks[0].parameters())
    assert costs.blocks == (3.0 * block,) * 3
    assert costs.before == 0
    assert costs.after == 3 * (tiny.VOCAB * tiny.DIM + 2 * tiny.DIM)


def test_estimates_know_what_is_not_trained() -> None:
    """Frozen blocks at the start have no backward; frozen ones after trained ones still pass gradients on."""
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    for i in (0, 2):
        model[i].requires_grad_(False)
    assert estimated_costs(model, find_blocks(model)).blocks == (16.0, 48.0, 32.0, 48.0)


def test_estimates_know_strides() -> None:
    """Each halving of a picture quarters what a weight of a convolution costs; what pools to one position costs little."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1, bias=False)),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.ConvTranspose2d(32, 16, 2, stride=2, bias=False),
    )
    costs = estimated_costs(net, find_blocks(net)).blocks
    assert costs == (3 * 216, 3 * 1152 / 4, 3 * 4608 / 16, 3 * 2048 / 4)


class Slow(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(size, size), nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear(torch.ones(512, self.linear.in_features))
        return self.drop(self.norm(x))


def test_measured_costs_follow_the_clock_and_leave_no_trace() -> None:
    model = nn.Sequential(Slow(512), Slow(8), Slow(512), nn.Linear(8, 8))
    blocks = find_blocks(model)
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    costs = measured_costs(model, blocks, lambda: model(torch.ones(4, 8)), repeats=5)
    assert min(costs.blocks[0], costs.blocks[2]) > 3 * max(costs.blocks[1], costs.blocks[3]) > 0
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items()) and torch.equal(random, torch.get_rng_state())
    with pytest.raises(ModelError, match="not called once each"):
        measured_costs(model, blocks, lambda: None)


@pytest.mark.parametrize(
    ("cut", "expected"),
    [(None, [(0, 5), (5, 6)]), ([2], [(0, 2), (2, 6)]), (BlockCosts((9.0, 1, 1, 1, 1, 1)), [(0, 1), (1, 6)])],
    ids=["estimated", "given", "costs"],
)
def test_a_model_cut_anywhere_trains_like_one_process(pool: RankPool, cut: Any, expected: list[tuple[int, int]]) -> None:
    """Six blocks and a head of 3.4 (not trained: its last part); fp32, three steps of SGD: 1e-5. Only rank 0's wish counts."""
    for stages, worst in pool.run(2, balanced.compare, cut):
        assert stages == expected
        assert worst < 1e-5


@pytest.mark.parametrize(
    ("config", "cut", "text"),
    [
        ({"pipeline_parallel_size": 2}, [0], "names the first block of every stage but the first"),
        ({"pipeline_parallel_size": 2}, [2, 4], "Give 1 increasing numbers from 1 to 5"),
        ({"pipeline_parallel_size": 2}, BlockCosts((1.0,)), "costs of 1 blocks, and blocks has 6"),
        ({"tensor_parallel_size": 2}, [3], "stage_cuts without a pipeline"),
    ],
)
def test_cuts_that_do_not_fit_are_refused(pool: RankPool, config: dict[str, Any], cut: Any, text: str) -> None:
    for message in pool.run(2, balanced.refusal, config, cut):
        assert text in message
