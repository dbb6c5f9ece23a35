"""HybridConfig: fields, files, the source documents' JSON, and refusals that name the field."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from ascend_core import HybridConfig
from ascend_core.config import FIELDS, resolve
from ascend_core.errors import ConfigError, NotAvailableError
from ascend_core.mesh import Layout, resolve_layout, warn_across_nodes

SOURCE_JSON = {
    "parallel_mode": "hybrid",
    "pipeline_config": {"stage_num": 24, "micro_batch_num": 16},
    "tensor_parallel": {"qkv_split": "column", "split_num": 8},
}


def test_defaults_are_those_of_the_design() -> None:
    c = HybridConfig()
    assert (c.pipeline_parallel_size, c.tensor_parallel_size, c.data_parallel_size) == (1, 1, "auto")
    assert (c.zero_stage, c.schedule, c.num_microbatches, c.tensor_parallel_plan) == (0, "1F1B", "auto", "auto")
    assert HybridConfig(**c.to_dict()) == c


def test_source_documents_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SOURCE_JSON))
    c = HybridConfig.from_file(path)
    assert (c.pipeline_parallel_size, c.num_microbatches, c.tensor_parallel_size, c.qkv_split) == (24, 16, 8, "column")
    assert c.schedule == "GPipe", "24 stages cannot run 16 microbatches in 1F1B"
    assert resolve_layout(c, 1536) == Layout(pp=24, dp_replicate=8, dp_shard=1, tp=8)


def test_source_documents_form_with_a_schedule() -> None:
    """A schedule that is named is kept, and refused when it cannot run."""
    small = {**SOURCE_JSON, "pipeline_config": {"stage_num": 4, "micro_batch_num": 8}}
    assert HybridConfig.from_dict(small).schedule == "1F1B"
    with pytest.raises(ConfigError, match=r"at least as many microbatches as pipeline ranks \(16 < 24\).*\n.*GPipe"):
        HybridConfig.from_dict({**SOURCE_JSON, "schedule": "1F1B"})


def test_argument_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("pipeline_parallel_size: 2\nschedule: GPipe\n")
    monkeypatch.setenv("ASCEND_CONFIG", str(path))
    c = resolve(None, {"schedule": "1F1B"})
    assert (c.pipeline_parallel_size, c.schedule, c.tensor_parallel_size) == (2, "1F1B", 1)
    assert resolve({"tensor_parallel_size": 2}, {}).pipeline_parallel_size == 1, "a given config replaces ASCEND_CONFIG"


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"schedul": "GPipe"}, "unknown key 'schedul'.*\n.*\n.*did you mean 'schedule'"),
        ({"pipeline_config": {"stage_nums": 2}}, "pipeline_config: unknown key 'stage_nums'.*\n.*\n.*'stage_num'"),
        ({"tensor_parallel": {"split": 2}}, "tensor_parallel: unknown key 'split'"),
        ({"parallel_mode": "data"}, "parallel_mode='data'"),
        ({"pipeline_config": {"stage_num": 2}, "pipeline_parallel_size": 4}, "given twice, as 2 and 4"),
        ({"pipeline_config": 3}, "pipeline_config holds int"),
    ],
)
def test_unknown_and_conflicting_keys(values: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HybridConfig.from_dict(values)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0: must be a whole number"),
        ({"tensor_parallel_size": "auto"}, "tensor_parallel_size='auto'"),
        ({"zero_stage": 4}, "zero_stage=4"),
        ({"schedule": "1f1b"}, "did you mean '1F1B'"),
        ({"pipeline_parallel_size": 2, "schedule": "ZBVZeroBubble", "stages_per_rank": 4}, "each rank has exactly two"),
        ({"pipeline_parallel_size": 4, "schedule": "DualPipeV", "num_microbatches": 6}, "as many microbatches as stages"),
        ({"num_microbatches": 4}, "would be ignored"),
        ({"pipeline_parallel_size": 4, "num_microbatches": 2}, r"\(2 < 4\)"),
        (
            {"pipeline_parallel_size": 4, "num_microbatches": 11, "schedule": "Interleaved1F1B"},
            "do not divide into 2 equal rounds",
        ),
        ({"pipeline_parallel_size": 2, "stages_per_rank": 2}, "GPipe and 1F1B run one stage per rank"),
        ({"stages_per_rank": 2}, "stages_per_rank=2 with pipeline_parallel_size=1"),
        ({"pipeline_parallel_size": 2, "zero_stage": 3}, "zero_stage=2 with pipeline_parallel_size > 1"),
        ({"data_parallel_shard_size": 2}, "Nothing is sharded at stage 0"),
        ({"data_parallel_size": 4, "data_parallel_shard_size": 3, "zero_stage": 2}, "does not divide data_parallel_size=4"),
        ({"tensor_parallel_plan": {"*": "colwise"}}, "plan would be ignored"),
        ({"tensor_parallel_plan": {}, "tensor_parallel_size": 2}, "tensor_parallel_plan"),
        ({"qkv_split": "rows"}, "qkv_split='rows'"),
        ({"expert_parallel_size": 0}, "expert_parallel_size=0: must be a whole number"),
        ({"expert_parallel_size": 4, "data_parallel_size": 6}, "does not divide data_parallel_size=6"),
        ({"activation_checkpoint_blocks": -1}, "activation_checkpoint_blocks=-1: must be a whole number of at least 0"),
        ({"activation_checkpoint_blocks": True}, "activation_checkpoint_blocks=True"),
    ],
)
def test_wrong_values(fields: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HybridConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"compression": {"algorithm": "onebit_adam"}}, {"max_staleness": 1}, {"compile": True}, {"fused_kernels": True},
    ],
)  # fmt: skip
def test_fields_without_mechanism_are_refused_by_name(fields: dict) -> None:
    name = list(fields)[-1]
    with pytest.raises(NotAvailableError, match=f"{name}=.* is not available yet"):
        HybridConfig(**fields)


@pytest.mark.parametrize(
    ("text", "suffix", "match"),
    [
        ("[1]", ".json", "not a mapping"),
        ("{", ".json", "does not parse"),
        ("a: [", ".yaml", "does not parse"),
        (None, ".yaml", "Cannot read"),
    ],
)
def test_unreadable_files(tmp_path: Path, text: str | None, suffix: str, match: str) -> None:
    path = tmp_path / f"c{suffix}"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        HybridConfig.from_file(path)


def test_layouts() -> None:
    c = HybridConfig(pipeline_parallel_size=2, tensor_parallel_size=2, zero_stage=2, data_parallel_shard_size=2)
    assert resolve_layout(c, 16) == Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    with pytest.raises(
        ConfigError, match="World size 6 does not factor into pipeline_parallel_size 2 x tensor_parallel_size 2"
    ):
        resolve_layout(c, 6)
    with pytest.raises(ConfigError, match=r"data_parallel_size 2 x pp 1 x tp 1 = 2, but the world size is 4"):
        resolve_layout(HybridConfig(data_parallel_size=2), 4)


def test_auto_pipeline_picks_what_the_blocks_allow() -> None:
    """D87: four ranks, two blocks: two stages and two replicas."""
    c = HybridConfig(pipeline_parallel_size="auto")
    assert resolve_layout(c, 4, num_blocks=2) == Layout(pp=2, dp_replicate=2, dp_shard=1, tp=1)
    assert resolve_layout(c, 4, num_blocks=9).pp == 4
    with pytest.raises(ConfigError, match="needs the model's blocks"):
        resolve_layout(c, 4)


def test_tensor_parallel_over_nodes_warns() -> None:
    layout = Layout(pp=1, dp_replicate=1, dp_shard=1, tp=4)
    with pytest.warns(UserWarning, match="span nodes"):
        warn_across_nodes(layout, devices_per_node=6)


def test_strategy_arguments_are_the_config_fields() -> None:
    from lightning_ascend import AscendHybridStrategy

    parameters = inspect.signature(AscendHybridStrategy).parameters
    assert set(FIELDS) <= set(parameters)
    strategy = AscendHybridStrategy(pipeline_parallel_size=2, num_microbatches=8)
    assert strategy.config == HybridConfig(pipeline_parallel_size=2, num_microbatches=8)
