"""The one configuration of both frameworks: what is split how, checked at construction.

Reading files is :mod:`ascend_core.config_file`, turning sizes into ranks :mod:`ascend_core.mesh`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_core import env
from ascend_core.config_file import normalize_fields, read_fields
from ascend_core.errors import ConfigError, NotAvailableError, nearest

SINGLE_STAGE_SCHEDULES = ("GPipe", "1F1B")
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
"""Rank ``r`` of ``p`` owns stages ``r`` and ``2p - 1 - r``: the first and the last stage are on one rank."""

SPLIT_BACKWARD_SCHEDULES = ("InterleavedZeroBubble", *V_SCHEDULES)
"""Gradients of activations come first, those of parameters later, in what would be idle time."""

MULTI_STAGE_SCHEDULES = ("Interleaved1F1B", "LoopedBFS", *SPLIT_BACKWARD_SCHEDULES)
SCHEDULES = SINGLE_STAGE_SCHEDULES + MULTI_STAGE_SCHEDULES

_LATER: dict[str, Any] = {
    "expert_parallel_size": 1,
    "sequence_parallel": False,
    "activation_checkpoint_blocks": 0,
    "compression": None,
    "max_staleness": 0,
    "compile": False,
}
"""Documented fields whose mechanism is not there yet, with the only value they accept now."""


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """How a model is spread over ranks. Frozen; every field is checked when it is built.

    Args:
        pipeline_parallel_size: Ranks that share the layers, or ``"auto"`` for as many as the model's blocks allow.
        tensor_parallel_size: Ranks that share each layer's matrices.
        data_parallel_size: Replicas times shards, or ``"auto"`` for world / (pp x tp).
        zero_stage: 0 replicates; 2 shards gradients and optimizer state, 3 parameters too (both FSDP2).
        data_parallel_shard_size: Ranks that share one sharded copy when ``zero_stage`` > 0; fewer than
            ``data_parallel_size`` gives hybrid sharding (HSDP). ``"auto"`` shards over all of them.
        expert_parallel_size: Not available yet.
        schedule: torch's spelling: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble,
            DualPipeV.
        stages_per_rank: Stages each pipeline rank owns; ``"auto"`` is 1 for GPipe and 1F1B, else 2; ZBVZeroBubble and
            DualPipeV have exactly 2.
        num_microbatches: Parts a local batch is cut into, or ``"auto"`` for up to 4 x stages.
        sequence_parallel: Not available yet.
        tensor_parallel_plan: ``"auto"``, or ``{module glob: style}`` (:mod:`ascend_core.parallel.tp_plans`).
        qkv_split: ``"column"`` splits attention by columns: by whole heads where that is exact, else by plain columns
            with a gather; ``"heads"`` refuses the gather.
        activation_checkpoint_blocks: Not available yet.
        compression: Not available yet.
        max_staleness: Not available yet.
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
    fused_kernels: bool | str = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        """Check every field and every pair of fields that must fit."""
        _check_sizes(self)
        _check_available(self)
        _check_pipeline(self)
        _check_data(self)
        _check_tensor(self)

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


def _check_sizes(c: HybridConfig) -> None:
    for name, auto in (
        ("pipeline_parallel_size", True),
        ("tensor_parallel_size", False),
        ("data_parallel_size", True),
        ("data_parallel_shard_size", True),
        ("num_microbatches", True),
        ("stages_per_rank", True),
        ("expert_parallel_size", False),
    ):
        value = getattr(c, name)
        if auto and value == "auto":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            allowed = "a whole number of at least 1" + (" or 'auto'" if auto else "")
            raise ConfigError(f"{name}={value!r}: must be {allowed}.", "", f"Set {name} to {allowed}.")


def _check_available(c: HybridConfig) -> None:
    for name, only in _LATER.items():
        value = getattr(c, name)
        if type(value) is not type(only) or value != only:
            raise NotAvailableError(
                f"{name}={value!r} is not available yet.",
                "This version accepts the documented field but has no mechanism behind it, and ignores nothing.",
                f"Leave {name} out (its default is {only!r}).",
            )
    if c.fused_kernels not in ("auto", False):
        raise NotAvailableError(
            f"fused_kernels={c.fused_kernels!r} is not available yet.",
            "There are no fused kernels to switch on in this version.",
            "Leave fused_kernels at 'auto' or set it to False.",
        )


def _check_pipeline(c: HybridConfig) -> None:
    if c.schedule not in SCHEDULES:
        raise ConfigError(
            f"schedule={c.schedule!r} is not known.", "Schedules use torch's spelling.", nearest(c.schedule, SCHEDULES)
        )
    pp, chunks, m = c.pipeline_parallel_size, c.num_stages_per_rank, c.num_microbatches
    if pp == 1:
        if m != "auto" and m != 1:
            raise ConfigError(
                f"num_microbatches={m} with pipeline_parallel_size=1.",
                "Microbatches exist only in a pipeline; the value would be ignored.",
                "Leave num_microbatches out, or set pipeline_parallel_size above 1.",
            )
        if chunks != 1:
            raise ConfigError(f"stages_per_rank={chunks} with pipeline_parallel_size=1.", "", "Leave stages_per_rank out.")
        return
    if (chunks > 1) != (c.schedule in MULTI_STAGE_SCHEDULES):
        raise ConfigError(
            f"stages_per_rank={chunks} with schedule={c.schedule!r}.",
            "GPipe and 1F1B run one stage per rank; the other schedules run several.",
            "Change stages_per_rank or schedule.",
        )
    if c.schedule in V_SCHEDULES and chunks != 2:
        raise ConfigError(
            f"stages_per_rank={chunks} with schedule={c.schedule!r}.",
            "Its stages go down the ranks and up again: each rank has exactly two.",
            "Leave stages_per_rank out, or use InterleavedZeroBubble.",
        )
    if pp != "auto" and m != "auto":
        check_microbatches(c.schedule, int(pp), int(m))


def check_microbatches(schedule: str, pipeline_parallel_size: int, num_microbatches: int) -> None:
    """Check that a schedule can run with so many microbatches.

    Raises:
        ConfigError: 1F1B and Interleaved1F1B have fewer microbatches than ranks, or Interleaved1F1B a number that does
            not divide into whole rounds.
    """
    problem = microbatch_problem(schedule, pipeline_parallel_size, num_microbatches)
    if problem:
        raise ConfigError(
            f"num_microbatches={num_microbatches} with schedule={schedule!r} and "
            f"pipeline_parallel_size={pipeline_parallel_size}.",
            problem,
            f"Set num_microbatches to a multiple of {2 * pipeline_parallel_size}, or use schedule='GPipe'.",
        )


def microbatch_problem(schedule: str, pipeline_parallel_size: int, num_microbatches: int) -> str | None:
    """Say why a schedule cannot run with so many microbatches, or None when it can."""
    p, m = pipeline_parallel_size, num_microbatches
    if schedule in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble") and m < p:
        return f"{schedule} needs at least as many microbatches as pipeline ranks ({m} < {p})."
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and m % max(1, m // p):
        return f"{schedule} runs in rounds, and {m} microbatches do not divide into {m // p} equal rounds."
    if schedule == "DualPipeV" and m < 2 * p:
        return f"DualPipeV needs at least as many microbatches as stages ({m} < {2 * p})."
    return None


def stage_owner(schedule: str, stage: int, pipeline_size: int) -> int:
    """Pipeline rank that owns a stage: round robin, or down the ranks and up again for V schedules."""
    place = stage % (2 * pipeline_size)
    if schedule in V_SCHEDULES and place >= pipeline_size:
        return 2 * pipeline_size - 1 - place
    return stage % pipeline_size


def _check_data(c: HybridConfig) -> None:
    if c.zero_stage not in (0, 1, 2, 3) or isinstance(c.zero_stage, bool):
        raise ConfigError(f"zero_stage={c.zero_stage!r}: must be 0, 1, 2 or 3.", "", "Set zero_stage to 0, 2 or 3.")
    if c.zero_stage == 1:
        raise NotAvailableError(
            "zero_stage=1 is not available yet.",
            "Sharding optimizer state alone has no mechanism yet.",
            "Use zero_stage=2, which shards gradients as well.",
        )
    shard, dp = c.data_parallel_shard_size, c.data_parallel_size
    if shard != "auto" and c.zero_stage == 0 and shard != 1:
        raise ConfigError(
            f"data_parallel_shard_size={shard} with zero_stage=0.",
            "Nothing is sharded at stage 0.",
            "Set zero_stage to 2 or 3.",
        )
    if shard != "auto" and dp != "auto" and int(dp) % int(shard):
        raise ConfigError(
            f"data_parallel_shard_size={shard} does not divide data_parallel_size={dp}.",
            "data_parallel_size is replicas x shards.",
            "Choose a shard size that divides it.",
        )
    if c.zero_stage == 3 and c.pipeline_parallel_size != 1:
        raise ConfigError(
            "zero_stage=3 with a pipeline.",
            "Parameters would be gathered again for every microbatch, and gradients stay whole until the last one anyway.",
            "Use zero_stage=2 with pipeline_parallel_size > 1.",
        )


def _check_tensor(c: HybridConfig) -> None:
    plan = c.tensor_parallel_plan
    if plan != "auto" and not (isinstance(plan, Mapping) and plan):
        raise ConfigError(
            f"tensor_parallel_plan={plan!r}.",
            "A plan is 'auto' or a mapping of module glob to style.",
            "See docs/tensor_parallel.md.",
        )
    if plan != "auto" and c.tensor_parallel_size == 1:
        raise ConfigError(
            "tensor_parallel_plan with tensor_parallel_size=1.",
            "The plan would be ignored.",
            "Set tensor_parallel_size above 1.",
        )
    if c.qkv_split not in ("column", "heads"):
        raise ConfigError(f"qkv_split={c.qkv_split!r}.", "", "Use 'column' or 'heads'.")
