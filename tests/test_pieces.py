"""Small pieces by themselves: microbatches, dealing of samples, block search, errors."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ascend_core.errors import ConfigError, ModelError, nearest
from ascend_core.parallel.blocks import deal, find_blocks, hollow
from ascend_core.parallel.microbatch import batch_size, choose_microbatches, split_batch
from ascend_core.schedule_rules import microbatch_problem
from lightning_ascend.data import EveryNth, fingerprint

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: torch.Tensor
    names: list[str]
    scale: float


def test_split_keeps_structure() -> None:
    x = torch.arange(6)
    batch = OrderedDict(
        pair=Pair(x, {"deep": [x, torch.ones(())]}), record=Record(x, list("abcdef"), 0.5), mask=torch.ones(2, 2), flag=True
    )
    parts = split_batch(batch, 3)
    assert len(parts) == 3 and batch_size(batch) == 6
    second = parts[1]
    assert isinstance(second, OrderedDict) and isinstance(second["pair"], Pair)
    assert second["pair"].x.tolist() == [2, 3]
    assert second["pair"].y["deep"][0].tolist() == [2, 3] and second["pair"].y["deep"][1].dim() == 0
    assert second["record"].names == ["c", "d"] and second["record"].scale == 0.5
    assert second["mask"].shape == (2, 2) and second["flag"] is True


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(ModelError, match="holds no tensor with a batch dim"):
        batch_size({"a": "text", "b": torch.ones(())})
    with pytest.raises(ModelError, match="empty batch"):
        choose_microbatches("1F1B", 2, 4, 0)


@given(
    schedule=st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"]), ranks=st.integers(1, 8),
    wanted=st.one_of(st.just("auto"), st.integers(1, 32)), size=st.integers(1, 200),
)  # fmt: skip
def test_the_number_of_microbatches_divides_and_is_legal(schedule: str, ranks: int, wanted: Any, size: int) -> None:
    chosen, m = choose_microbatches(schedule, ranks, wanted, size)
    assert size % m == 0
    assert microbatch_problem(chosen, ranks, m) is None
    if wanted != "auto" and size % wanted == 0 and microbatch_problem(schedule, ranks, wanted) is None:
        assert (chosen, m) == (schedule, wanted), "a number that works is taken as it is"


@given(count=st.integers(0, 40), size=st.integers(1, 6))
def test_iterable_samples_are_dealt_evenly(count: int, size: int) -> None:
    dealt = [list(EveryNth(range(count), r, size)) for r in range(size)]
    assert len({len(d) for d in dealt}) == 1
    assert {i for d in dealt for i in d} == set(range(count))
    assert sum(len(d) for d in dealt) - count < size


def test_fingerprints_tell_batches_apart() -> None:
    a = {"x": torch.ones(3), "n": ["a", 1]}
    assert fingerprint(a) == fingerprint({"x": torch.ones(3), "n": ["a", 1]})
    for other in (
        {"x": torch.ones(3), "n": ["a", 2]},
        {"x": torch.ones(3, 1), "n": ["a", 1]},
        {"x": torch.ones(3).bfloat16(), "n": ["a", 1]},
    ):
        assert fingerprint(a) != fingerprint(other)


def test_blocks_are_the_longest_large_list() -> None:
    gpt = tiny.TinyGPT(layers=3)
    found = find_blocks(gpt, root_is_boundary=True)
    assert found.names == ("blocks.0", "blocks.1", "blocks.2") and found.boundary == ""
    wrapped = nn.ModuleDict({"model": gpt})
    assert find_blocks(nn.ModuleDict({"a": wrapped})).boundary == "a"
    assert find_blocks(wrapped, "model").boundary == "model"
    net = nn.Module()
    net.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert find_blocks(net).names == ("net.0", "net.1", "net.2") and find_blocks(net).boundary == "net"
    bare = nn.Module()
    bare.layers = nn.ModuleList([nn.Linear(4, 4)] + [nn.Linear(4, 4)])
    assert find_blocks(bare).boundary is None
    with pytest.raises(ModelError, match="no list of blocks"):
        find_blocks(nn.Linear(2, 2))


@given(blocks=st.integers(1, 30), stages=st.integers(1, 30))
def test_every_block_is_dealt_once(blocks: int, stages: int) -> None:
    found = find_blocks(nn.Sequential(*[nn.Linear(1, 1) for _ in range(blocks)]), root_is_boundary=True)
    if stages > blocks:
        with pytest.raises(ConfigError, match=f"the most stages this model allows is {blocks}"):
            deal(found, stages)
        return
    runs = deal(found, stages)
    assert [i for first, end in runs for i in range(first, end)] == list(range(blocks))
    sizes = [end - first for first, end in runs]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


def test_hollow_keeps_what_others_use() -> None:
    gpt = tiny.TinyGPT(layers=2, tied=True)
    hollow([gpt.tok, gpt.blocks[0]], gpt)
    assert gpt.tok.weight is gpt.head.weight
    assert not list(gpt.blocks[0].parameters()) and gpt.blocks[0].attn.qkv.in_features == tiny.DIM
    assert next(iter(gpt.state_dict())) == "pos" and "blocks.1.norm1.weight" in gpt.state_dict()


def test_errors_answer_three_questions_and_travel() -> None:
    error = ConfigError("a is 3.", "a must be even.", "Set a to 4.")
    assert str(error) == "a is 3.\nWhy: a must be even.\nDo: Set a to 4."
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ConfigError and str(copy) == str(error) and isinstance(copy, ValueError)
    assert nearest("shedule", ["schedule", "zero_stage"]) == "did you mean 'schedule'?"
    assert nearest("zzz", ["b", "a"]) == "known: a, b"
