"""D62: nothing in a step relies on sends that return before they are received; what can never finish says what it waits for."""

from __future__ import annotations

from collections import Counter

import pytest
import rendezvous
from rank_pool import RankPool


def test_d62_these_sends_do_block(pool: RankPool) -> None:
    """Both ranks of a pair send first: with the sends of these tests, that never finishes."""
    for text, log in pool.run(2, rendezvous.both_send_first):
        assert text and ("recv", 0) not in log and ("recv", 1) not in log


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "GPipe", "ZBVZeroBubble"])
def test_d62_steps_finish_when_sends_block(pool: RankPool, schedule: str, ranks: int) -> None:
    """8 microbatches, gradients of one process (1e-5, fp32), and each message is received where it was sent."""
    layers = ranks * (2 if schedule in ("Interleaved1F1B", "ZBVZeroBubble") else 1)
    config = {"pipeline_parallel_size": ranks, "schedule": schedule}
    results = pool.run(ranks, rendezvous.train, config, layers, deadline_s=60)
    exchanged = Counter((kind, rank, peer) for rank, r in enumerate(results) for kind, peer in r["log"])
    assert sum(exchanged.values()) >= 2 * 2 * 8 * (ranks - 1)
    for (kind, rank, peer), count in exchanged.items():
        assert exchanged["recv" if kind == "send" else "send", peer, rank] == count
    for result in results:
        assert result["seconds"] < 10 and result["gap"] < 1e-5


def test_d62_a_deadlock_names_what_is_under_way_on_both_sides(pool: RankPool) -> None:
    first, second = pool.run(2, rendezvous.unmatched, deadline_s=60)
    for rank, text in enumerate((first, second)):
        assert text.startswith("PeerError: The exchange between pipeline stages failed on pipeline rank")
        assert f"on pipeline rank {rank}" in text
    assert "last sent the activation of microbatch 3 to rank 1" in first
    assert "last sent the gradient of microbatch 1 to rank 0" in second
