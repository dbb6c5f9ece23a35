"""The rank pool itself: errors, deaths and hangs end quickly and show what every rank was doing."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankError, RankPool


def rank_and_sum() -> tuple[int, float]:
    t = torch.ones(())
    dist.all_reduce(t)
    return dist.get_rank(), float(t)


def raise_on_one() -> Any:
    if dist.get_rank() == 1:
        raise ValueError("one failed")
    return dist.get_rank()


def die_on_one() -> Any:
    if dist.get_rank() == 1:
        os._exit(3)
    return dist.get_rank()


def spin_on_one() -> None:
    while dist.get_rank() == 1:
        time.sleep(0.01)


@pytest.mark.parametrize("world", [1, 3, 8])
def test_results_by_rank(pool: RankPool, world: int) -> None:
    assert pool.run(world, rank_and_sum) == [(r, float(world)) for r in range(world)]


def test_an_exception_names_its_rank(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1: error") as caught:
        pool.run(2, raise_on_one)
    assert caught.value.errors == {1: ("ValueError", "one failed")}


def test_a_death_is_seen_and_mended(pool: RankPool) -> None:
    with pytest.raises(RankError, match="exit code 3"):
        pool.run(2, die_on_one)
    assert pool.run(2, rank_and_sum)[1] == (1, 2.0)


def test_a_hang_shows_the_stack(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="spin_on_one"):
        pool.run(2, spin_on_one, deadline_s=2)
    assert time.monotonic() - start < 10
    assert pool.run(2, rank_and_sum)[1] == (1, 2.0)
