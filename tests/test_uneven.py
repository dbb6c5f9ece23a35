"""D14: replicas with different numbers of batches."""

from __future__ import annotations

from typing import Any

import pytest
import uneven
from rank_pool import RankError, RankPool


@pytest.mark.parametrize("config", [{"zero_stage": 3}, {"zero_stage": 2}, {}], ids=["zero3", "zero2", "replicate"])
def test_validation_of_three_batches_and_one(pool: RankPool, config: dict[str, Any]) -> None:
    """The metric is the mean over the 16 samples, the same on both ranks; training goes on as if lengths were equal."""
    results = pool.run(2, uneven.fit, config, [2, 2], [3, 1], deadline_s=60)
    assert [r["id"] for r in results] == [7.5, 7.5]
    assert max(r["seconds"] for r in results) < 10
    even = pool.run(2, uneven.fit, config, [2, 2], [2, 2], deadline_s=60)
    assert results[0]["weights"] == even[0]["weights"]


@pytest.mark.parametrize(
    ("train", "val", "match"),
    [
        ([3, 1], [1, 1], "different numbers of training batches: 3 on replica 0, 1 on replica 1"),
        ([1, 1], [3, 0], "no validation batch at all: 3 on replica 0, 0 on replica 1"),
    ],
)
def test_what_would_wait_for_ever_is_an_error_on_every_rank(pool: RankPool, train: Any, val: Any, match: str) -> None:
    with pytest.raises(RankError, match=match) as raised:
        pool.run(2, uneven.fit, {"zero_stage": 3}, train, val, deadline_s=60)
    assert sorted(raised.value.errors) == [0, 1]
