"""Activation checkpointing in groups of blocks: bit-equal to training without, one recomputation, less memory."""

from __future__ import annotations

import pytest
import recomputed
import torch
from npu_pool import NpuPool
from rank_pool import RankError, RankPool
from recomputed import BLOCKS, LAYOUTS

STEPS = 3


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_is_the_same_to_the_bit(pool: RankPool, name: str) -> None:
    """With dropout and batch norm, in groups that do not divide the blocks; one recomputation a group and microbatch."""
    world, config = LAYOUTS[name]
    stages = config.get("pipeline_parallel_size", 1)
    passes = config.get("num_microbatches", 1)
    for size in (1, 4):
        results = pool.run(world, recomputed.same_as_without, name, size, deadline_s=60)
        assert all(r["losses"] and not r["differing"] for r in results), results
        per_stage = [b - a for a, b in _cuts(stages if len(LAYOUTS[name]) and "schedule" not in config else 2 * stages)]
        groups = sum(-(-n // size) for n in per_stage)
        assert sum(r["count"] for r in results) == groups * passes * STEPS * world // stages


def _cuts(stages: int) -> list[tuple[int, int]]:
    return [(BLOCKS * s // stages, BLOCKS * (s + 1) // stages) for s in range(stages)]


def test_under_autocast(pool: RankPool) -> None:
    for name in ("plain", "pp2-zbv"):
        for result in pool.run(LAYOUTS[name][0], recomputed.same_as_without, name, 3, "cpu", torch.bfloat16):
            assert result["losses"] and not result["differing"], result


@pytest.mark.parametrize("name", ["plain", "dp2-zero3", "pp2-zero-bubble"])
def test_on_npus(npu_pool: NpuPool, name: str) -> None:
    for result in npu_pool.run(LAYOUTS[name][0], recomputed.same_as_without, name, 4, "npu", deadline_s=60):
        assert result["losses"] and not result["differing"], result


def test_device_memory_shrinks(npu_pool: NpuPool) -> None:
    """Eight blocks: without groups all activations live at once, with groups of two those of one group and three inputs."""
    (all_bytes, loss), (group_bytes, same) = (npu_pool.run(1, recomputed.peak_bytes, size)[0] for size in (0, 2))
    assert group_bytes < 0.45 * all_bytes and loss == same


def test_code_between_blocks_is_said(pool: RankPool) -> None:
    same, count, said = pool.run(1, recomputed.broken_chain, 3)[0]
    assert same and count == BLOCKS * STEPS
    assert len(said) == 1 and "Move the code between the blocks into them" in said[0]


def test_a_graph_used_twice(pool: RankPool) -> None:
    assert pool.run(1, recomputed.two_passes)[0]


def test_gathers_of_zero_3(pool: RankPool) -> None:
    """A group's blocks are gathered once more, as backward does anyway, and not a third time."""
    plain, grouped = pool.run(2, recomputed.gathers, 0)[0], pool.run(2, recomputed.gathers, 3)[0]
    assert grouped <= plain + BLOCKS


def test_what_cannot_work_is_said(pool: RankPool) -> None:
    with pytest.raises(RankError, match="did not do what forward did"):
        pool.run(1, recomputed.moody)
    with pytest.raises(RankError, match="activation_checkpoint_blocks=2: Linear has no list of blocks"):
        pool.run(1, recomputed.no_blocks)
