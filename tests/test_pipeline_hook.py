"""``configure_pipeline()``, and blocks that are called or return in unusual ways, against the unsplit model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import unlisted
from rank_pool import RankPool
from torch import nn
from unlisted import TwoTowers

from ascend_core.errors import ConfigError, ModelError
from ascend_core.parallel.blocks import deal, find_blocks

PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 4}


@pytest.mark.parametrize("kind", ["TwoTowers", "Wrapped"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_blocks_that_are_no_list(pool: RankPool, kind: str, schedule: str) -> None:
    """The bridge between the towers stays on both ranks; the embedding on the first, the head on the last."""
    (first_gap, first), (second_gap, second) = pool.run(2, unlisted.gap, kind, schedule)
    assert max(first_gap, second_gap) < 1e-6
    names = [{n.rpartition(".")[0].removeprefix("net.") for n in part} for part in (first, second)]
    assert all("bridge" in n for n in names)
    assert "embed" in names[0] and "embed" not in names[1]
    assert "block1.linear" in names[0] and "block1.linear" not in names[1]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_blocks_with_named_activations_and_tuples(pool: RankPool, schedule: str) -> None:
    """Five of them: taking [0] of a stand-in that is no tuple would lose a dim each time."""
    assert max(gap for gap, _ in pool.run(2, unlisted.gap, "Pair", schedule)) < 1e-6


def test_blocks_that_checkpoint_around_their_own_call(pool: RankPool) -> None:
    assert max(gap for gap, _ in pool.run(2, unlisted.gap, "Recomputed")) < 1e-6


@pytest.mark.parametrize("rank", [0, 1])
def test_an_evaluation_that_one_rank_cannot_begin(pool: RankPool, rank: int) -> None:
    """It is the same error on both, and they are in step afterwards."""
    for text, gap in pool.run(2, unlisted.failing_alone, rank):
        assert text == "ValueError: only here"
        assert gap < 1e-6


def test_split_points(pool: RankPool) -> None:
    assert pool.run(2, unlisted.stages, ["encoder.0"]) == [
        ["block1"],
        ["block6", "decoder.layers.0", "decoder.layers.1", "encoder.0", "encoder.1"],
    ]


@pytest.mark.parametrize("kind", ["LitBlocks", "LitSum"])
def test_in_a_lightning_module(pool: RankPool, kind: str) -> None:
    """Three blocks that the steps call themselves; a loss that is a mean, and one that is a sum over microbatches."""
    ours = pool.run(2, unlisted.lightning, PP2, kind)
    plain = pool.run(1, unlisted.lightning, None, kind)[0]
    for result in ours:
        assert result["losses"] == pytest.approx(plain["losses"], abs=1e-6)
        assert result["val"] == pytest.approx(plain["val"], abs=1e-6)
    assert max(float((ours[0]["state"][n] - t).abs().max()) for n, t in plain["state"].items()) < 1e-6


def test_what_the_hook_says() -> None:
    blocks = find_blocks(TwoTowers(), root_is_boundary=True)
    assert blocks.names == ("block1", "encoder.0", "encoder.1", "decoder.layers.0", "decoder.layers.1", "block6")
    assert blocks.boundary == "" and blocks.split_points is None
    inside = find_blocks(unlisted.Wrapped())
    assert inside.names[0] == "net.block1" and inside.boundary == "net"
    assert find_blocks(unlisted.Wrapped(), root_is_boundary=True).boundary == ""
    named = TwoTowers(lambda m: {"blocks": m.decoder["layers"], "pipeline_module": "decoder"})
    assert find_blocks(named).boundary == "decoder"
    assert find_blocks(unlisted.LitBlocks()).boundary is None


WRONG: dict[str, tuple[Callable[[TwoTowers], Any], str]] = {
    "nothing": (lambda m: None, r"TwoTowers.configure_pipeline\(\) returned no list of blocks \(but NoneType\)"),
    "text": (lambda m: "encoder", "returned no list of blocks"),
    "empty": (lambda m: [], "returned no list of blocks"),
    "key": (lambda m: {"block": m.encoder}, "unknown key 'block'.*did you mean 'blocks'"),
    "name": (lambda m: ["block2"], "names 'block2', which is no module of it.*did you mean 'block"),
    "stranger": (lambda m: [m.block1, nn.Linear(2, 2)], "returned a Linear that is not a module of this model"),
    "twice": (lambda m: [m.block1, "block1"], "returned block 'block1' twice"),
    "nested": (lambda m: [m.encoder, m.encoder[0]], "block 'encoder.0' is inside block 'encoder'"),
    "outside": (lambda m: {"blocks": [m.block1], "pipeline_module": "encoder"}, "'block1' is not inside pipeline_module 'encoder'"),
    "point": (lambda m: {"blocks": [m.block1], "split_points": ["block6"]}, "split point 'block6' is not one of its blocks"),
    "order": (lambda m: {"blocks": m.encoder, "split_points": ["encoder.0"]}, "split_points .* are out of order"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_returns_are_clear_errors(case: str) -> None:
    hook, text = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        find_blocks(TwoTowers(hook))
    assert re.search(text, str(caught.value), re.DOTALL), caught.value


def test_split_points_that_do_not_fit_the_stages() -> None:
    blocks = find_blocks(TwoTowers(lambda m: {"blocks": m.encoder, "split_points": [m.encoder[1]]}))
    assert deal(blocks, 2) == [(0, 1), (1, 2)]
    with pytest.raises(ConfigError, match="gives 1 split points, for 2 stages, but there are 4"):
        deal(blocks, 4)


def test_a_model_without_a_list_is_told_of_the_hook() -> None:
    with pytest.raises(ModelError, match=r"define configure_pipeline\(\)"):
        find_blocks(nn.Linear(2, 2))
