"""The one configuration of both frameworks: what is split how, checked at construction.

Reading files is :mod:`ascend_core.config_file`, the checks are :mod:`ascend_core.config_checks`, turning sizes into ranks
:mod:`ascend_core.mesh`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_core import config_checks, env
from ascend_core.config_file import normalize_fields, read_fields
from ascend_core.schedule_rules import MULTI_STAGE_SCHEDULES


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """How a model is spread over ranks. Frozen; every field is checked when it is built.

    Args:
        pipeline_parallel_size: Ranks that share the layers, or ``"auto"`` for as many as the model's blocks allow.
        tensor_parallel_size: Ranks that share each layer's matrices.
        data_parallel_size: Replicas times shards, or ``"auto"`` for world / (pp x tp).
        zero_stage: 0 replicates; 1 shards optimizer state, 2 gradients as well, 3 parameters too (2 and 3 are FSDP2).
        data_parallel_shard_size: Ranks that share one sharded copy when ``zero_stage`` > 0; fewer than
            ``data_parallel_size`` gives hybrid sharding (HSDP). ``"auto"`` shards over all of them.
        partition_gradients: With ``zero_stage=1``: reduce gradients onto the rank that needs them (reduce-scatter), and
            not onto all (all-reduce). ``"auto"`` is False there; FSDP2 always does.
        contiguous_gradients: Keep gradients in flat buckets from the moment they are made, so that reducing them copies
            and allocates nothing. ``"auto"`` is False below stage 2; FSDP2 always reduces in flat buffers.
        overlap_gradients: Average gradients over the replicas while backward still runs. ``"auto"`` does so where
            nothing else decides it: without a pipeline, and without sharded gradients (FSDP2 overlaps by itself).
        expert_parallel_size: Data-parallel ranks that share the experts of each MoE layer (:mod:`ascend_core.parallel.expert`).
        schedule: torch's spelling: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble,
            DualPipeV.
        stages_per_rank: Stages each pipeline rank owns; ``"auto"`` is 1 for GPipe and 1F1B, else 2; ZBVZeroBubble and
            DualPipeV have exactly 2.
        num_microbatches: Parts a local batch is cut into, or ``"auto"`` for up to 4 x stages.
        sequence_parallel: Spread the activations between split regions over the sequence, on the tensor-parallel ranks.
        tensor_parallel_plan: ``"auto"``, or ``{module glob: style}`` (:mod:`ascend_core.parallel.tp_plans`).
        qkv_split: ``"column"`` splits attention by columns: by whole heads where that is exact, else by plain columns
            with a gather; ``"heads"`` refuses the gather.
        activation_checkpoint_blocks: Recompute activations in backward, in groups of so many blocks; 0 keeps them.
        compression: Not available yet.
        max_staleness: Not available yet.
        self_check: ``"first_batch"`` compares outputs and gradients with the unsplit model before the first step;
            ``"auto"`` does so for a ``tensor_parallel_plan`` of the user's; ``"off"`` never.
        fused_kernels: ``"auto"`` or False; no fused kernel exists yet, so True is refused.
        compile: Not available yet.

    Raises:
        ConfigError: A value is out of range or does not fit with another.
        NotAvailableError: A field asks for something this version does not have.
    """

    pipeline_parallel_size: int | str = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int | str = "auto"
    zero_stage: int = 0
    data_parallel_shard_size: int | str = "auto"
    partition_gradients: bool | str = "auto"
    contiguous_gradients: bool | str = "auto"
    overlap_gradients: bool | str = "auto"
    expert_parallel_size: int = 1
    schedule: str = "1F1B"
    stages_per_rank: int | str = "auto"
    num_microbatches: int | str = "auto"
    sequence_parallel: bool = False
    tensor_parallel_plan: str | Mapping[str, Any] = "auto"
    qkv_split: str = "column"
    activation_checkpoint_blocks: int = 0
    compression: Any = None
    max_staleness: int = 0
    self_check: str = "auto"
    fused_kernels: bool | str = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        """Check every field and every pair of fields that must fit."""
        config_checks.check(self)

    @property
    def num_stages_per_rank(self) -> int:
        """Stages each pipeline rank owns, with ``"auto"`` resolved."""
        if self.stages_per_rank != "auto":
            return int(self.stages_per_rank)
        return 2 if self.schedule in MULTI_STAGE_SCHEDULES and self.pipeline_parallel_size != 1 else 1

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values; ``HybridConfig(**c.to_dict()) == c``."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_file(cls, path: str | Path) -> HybridConfig:
        """Read a YAML or JSON file; see :func:`ascend_core.config_file.read_fields`."""
        return cls(**read_fields(path, FIELDS))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HybridConfig:
        """Build from a mapping, accepting the source documents' nested form as well."""
        return cls(**normalize_fields(values, "config", FIELDS))


FIELDS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(HybridConfig))


def resolve(config: HybridConfig | Mapping[str, Any] | str | Path | None, fields: Mapping[str, Any]) -> HybridConfig:
    """Build the configuration from everything a user may have given.

    An argument beats the file, the file beats the default.

    Args:
        config: A ready configuration, a mapping, a file, or None to look at ``ASCEND_CONFIG``.
        fields: Single fields given as arguments; they win.

    Returns:
        The checked configuration.
    """
    if isinstance(config, HybridConfig):
        base = config.to_dict()
    elif isinstance(config, Mapping):
        base = normalize_fields(config, "config", FIELDS)
    else:
        path = config if config is not None else env.read("ASCEND_CONFIG")
        base = read_fields(str(path), FIELDS) if path is not None else {}
    return HybridConfig(**{**base, **normalize_fields(fields, "argument", FIELDS)})


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
