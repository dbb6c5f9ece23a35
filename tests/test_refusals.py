"""Wrong input is one clear error on every rank, before the first optimizer step, within ten seconds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import refusals
from rank_pool import RankPool

PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 2}

CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any], str, str]] = {
    "world": (3, "Plain", PP2, {}, "ConfigError", "World size 3 does not factor into pipeline_parallel_size 2"),
    "stages": (4, "TwoBlocks", {"pipeline_parallel_size": 4}, {}, "ConfigError", r"at most|most stages this model allows is 2: model.blocks.0, model.blocks.1"),
    "microbatches": (2, "Plain", {**PP2, "num_microbatches": 1}, {}, "ConfigError", r"at least as many microbatches as pipeline ranks \(1 < 2\)"),
    "key": (2, "Plain", {"config": {"pipeline_paralel_size": 2}}, {}, "ConfigError", "did you mean 'pipeline_parallel_size'"),
    "manual": (2, "Manual", PP2, {}, "ModelError", "Manual optimization"),
    "backward": (2, "OwnBackward", PP2, {}, "ModelError", r"overrides backward\(\)"),
    "twice": (2, "CallsTwice", PP2, {}, "ModelError", "called a second time in one step"),
    "never": (2, "NeverCalls", PP2, {}, "ModelError", "ended after 0 of 4 blocks"),
    "none": (2, "ReturnsNone", PP2, {}, "ModelError", "NoneType instead of a scalar loss"),
    "user-error": (2, "RaisesInLoss", PP2, {}, "ValueError", "labels are wrong"),
    "skip": (2, "SkipAround", PP2, {}, "ModelError", "skip connection around the blocks"),
    "order": (2, "Branches", PP2, {}, "ModelError", "Pipeline stages run the blocks in the order of their list"),
    "late": (2, "LateModule", PP2, {}, "ModelError", "registered after the blocks was called before them"),
    "empty-optimizer": (2, "HeadOnly", PP2, {}, "(ModelError|ValueError)", "empty parameter list"),
    "metric-object": (2, "LogsObject", PP2, {}, "ModelError", "of a MeanMetric in a pipelined training step"),
    "data": (2, "SplitByGlobalRank", PP2, {}, "ModelError", "Ranks of one replica read different batches"),
    "module": (2, "Plain", {**PP2, "pipeline_module": "modell"}, {}, "ConfigError", "did you mean 'model'"),
    "precision": (2, "Plain", PP2, {"precision": "transformer-engine"}, "(NotAvailableError|ModuleNotFoundError)", "transformer"),
    "syncbn": (2, "Plain", PP2, {"sync_batchnorm": True}, "NotAvailableError", "sync_batchnorm=True"),
    "no-plan": (2, "NoPlan", {"tensor_parallel_size": 2}, {}, "ConfigError", "No tensor-parallel plan was found for block 'model.0'"),
    "half-plan": (4, "HalfPlanned", {**PP2, "tensor_parallel_size": 2}, {}, "(ConfigError|PeerError)", "No tensor-parallel plan was found for block 'model.1'"),
    "plan-glob": (2, "Plain", {"tensor_parallel_size": 2, "tensor_parallel_plan": {"*.nothing": "colwise"}}, {}, "ConfigError", "matches no module"),
    "plan-style": (2, "Plain", {"tensor_parallel_size": 2, "tensor_parallel_plan": {"*.qkv": "colwize"}}, {}, "ConfigError", "did you mean 'colwise'"),
    "plan-kind": (2, "Plain", {"tensor_parallel_size": 2, "tensor_parallel_plan": {"*.norm1": "colwise"}}, {}, "ConfigError", "is a LayerNorm, and style 'colwise' is for Linear"),
    "plan-tied": (2, "Plain", {"tensor_parallel_size": 2, "tensor_parallel_plan": {"*.tok": "embedding"}}, {}, "(ModelError|ConfigError)", "(tied parameter|split differently)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused_on_every_rank(pool: RankPool, name: str) -> None:
    world, module, strategy, trainer, kind, text = CASES[name]
    for rank, result in enumerate(pool.run(world, refusals.attempt, module, strategy, trainer)):
        assert re.fullmatch(kind, result["type"]), (rank, result)
        assert re.search(text, result["text"]), (rank, result["text"])
        assert result["stepped"] == 0
        assert result["s"] < 10


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, PP2], ids=["dp2-tp2", "dp2-pp2"])
@pytest.mark.parametrize("kind", ["shuffle", "sampler", "batch_sampler", "iterable"])
def test_who_reads_which_samples(pool: RankPool, kind: str, layout: dict[str, Any]) -> None:
    """D27: ranks of one replica read the same ids, replicas disjoint ones, together all 16, in 4 steps."""
    seen = pool.run(4, refusals.read, kind, layout)
    replica = [(r // 2) if "tensor_parallel_size" in layout else r % 2 for r in range(4)]
    first, second = (next(s for s, d in zip(seen, replica, strict=True) if d == wanted) for wanted in (0, 1))
    for ids, d in zip(seen, replica, strict=True):
        assert ids == (first, second)[d]
        assert len(ids) == 4
    flat = [i for batch in first + second for i in batch]
    assert sorted(flat) == list(range(16))


def test_auto_pipeline_in_the_trainer(pool: RankPool) -> None:
    """D87: four ranks and two blocks give two stages and two replicas."""
    results = pool.run(4, refusals.attempt, "TwoBlocks", {"pipeline_parallel_size": "auto"})
    assert [r["type"] for r in results] == ["none"] * 4
    assert all(r["stepped"] == 2 for r in results)
