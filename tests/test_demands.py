"""User reports as tests; each names its number in the demand log."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import demands
import lit
import parity
import pytest
import tiny
import torch
from rank_pool import RankPool
from torch.utils.data import DataLoader, TensorDataset

from ascend_core.schedule_rules import SCHEDULES


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_d05_accumulation_adds_up(pool: RankPool, schedule: str) -> None:
    for seen in pool.run(2, demands.accumulated_gradients, schedule):
        assert seen == [1.0, 2.0, 3.0]


def test_d05_token_mean(pool: RankPool) -> None:
    assert max(pool.run(2, demands.token_mean, True)) < 1e-6
    assert max(pool.run(2, demands.token_mean, False)) > 1e-3, "without weights the two means differ; the test would not see it"


def test_d07_one_norm_over_stages(pool: RankPool) -> None:
    norms, grads = zip(*pool.run(2, demands.clipped, False), strict=True)
    assert norms == pytest.approx((5.0, 5.0))
    assert [g[0] for g in grads] == pytest.approx([0.6, 0.8], abs=1e-6)


def test_d07_a_tied_weight_counts_once(pool: RankPool) -> None:
    for norm, grads in pool.run(2, demands.clipped, True):
        assert norm == pytest.approx(7.0)
        assert grads == pytest.approx([1.0], abs=1e-6)


def test_d12_eight_layers_pp2_tp2(pool: RankPool, tmp_path: Path) -> None:
    config = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 4}
    ours = pool.run(4, lit.fit, "lightning.pytorch", str(tmp_path / "a"), config, {"layers": 8}, deadline_s=120)
    plain = pool.run(1, lit.fit_plain, "lightning.pytorch", str(tmp_path / "b"), {"layers": 8}, deadline_s=120)[0]
    for result in ours:
        assert len(result["history"]["loss"]) == 20
        assert result["history"]["loss"] == pytest.approx(plain["history"]["loss"], abs=1e-5)
        assert set(result["metrics"]) == {"train_loss", "val_loss", "val_mean"}


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (4, 2)])
def test_d25_tied_weights_stay_equal(pool: RankPool, world: int, replicas: int) -> None:
    assert all(pool.run(world, parity.replicas_equal, {"pipeline_parallel_size": 2, "num_microbatches": 4}, deadline_s=60))


def test_d25_stored_once(pool: RankPool) -> None:
    assert pool.run(2, stored, {"pipeline_parallel_size": 2})[0] == (True, True)


def stored(config: dict[str, Any]) -> tuple[bool, bool]:
    state = demands.spread(tiny.build(), None, **config).state_dict()
    tied = state and state["tok.weight"].data_ptr() == state["head.weight"].data_ptr()
    return bool(tied), bool(state)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_d60_outputs_meet_their_labels(pool: RankPool, schedule: str) -> None:
    assert pool.run(2, demands.index_loss, schedule) == [0.0, 0.0]


@pytest.mark.parametrize(("schedule", "size"), [("1F1B", 1), *((s, 8) for s in SCHEDULES)])
def test_d61_changing_lengths_and_sizes(pool: RankPool, schedule: str, size: int) -> None:
    """Batches of 8 and 7 samples and six lengths; 7 does not divide into 4 microbatches. Losses are near 30: 1e-5 is 3 ulp."""
    assert max(pool.run(2, demands.changing_lengths, schedule, size)) < 1e-5


def test_d64_data_and_tensor_parallel_without_fsdp(pool: RankPool) -> None:
    assert all(pool.run(4, parity.replicas_equal, {"tensor_parallel_size": 2}, deadline_s=60))


def test_unused_parameters(pool: RankPool) -> None:
    for grads in pool.run(2, demands.unused_branch):
        assert grads == {"used": 1.0, "sometimes": 0.5, "never": None}


def test_random_numbers_agree_over_stages(pool: RankPool) -> None:
    """The user's noise is the same on both stages and differs by microbatch and step; dropout differs by stage."""
    (first, first_masks, kept), (second, second_masks, kept_too) = pool.run(2, demands.random_numbers)
    assert first == second
    assert len(first) == 4
    assert kept and kept_too
    assert first_masks[-1] != second_masks[-1]
    trained = first_masks[1:]  # the first is the dry run that measures shapes
    assert len({tuple(m) for m in trained}) == len(trained) == 4


def test_modules_shared_by_blocks(pool: RankPool) -> None:
    assert max(pool.run(2, demands.shared_modules)) < 1e-6


@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_an_error_in_evaluation_reaches_every_stage(pool: RankPool, where: int) -> None:
    for text, seconds in pool.run(2, demands.failing_evaluation, where):
        assert "ValueError: this layer fails" in text
        assert seconds < 10


@pytest.mark.parametrize("kind", ["raises", "unpicklable"])
def test_results_that_cannot_be_shared_reach_every_stage_as_an_error(pool: RankPool, kind: str) -> None:
    for name, seconds in pool.run(2, demands.failing_payload, kind):
        assert name != "none"
        assert seconds < 10


def test_d55_pinning_that_is_not_possible_is_switched_off_with_one_warning() -> None:
    """Where there is no accelerator torch warns once per loader, and batches arrive unchanged."""
    data = TensorDataset(torch.arange(8.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = [x for (x,) in DataLoader(data, batch_size=4, pin_memory=True)]
    assert [str(w.message) for w in caught if "pin_memory" in str(w.message)] == [
        "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used."
    ]
    assert torch.equal(torch.cat(batches), data.tensors[0]) and not batches[0].is_pinned()
