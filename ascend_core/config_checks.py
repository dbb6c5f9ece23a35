"""The checks of :class:`ascend_core.config.HybridConfig`: every field, and every pair of fields that must fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ascend_core.errors import ConfigError, NotAvailableError, nearest
from ascend_core.schedule_rules import SCHEDULES, check_microbatches, check_stages_per_rank

if TYPE_CHECKING:
    from ascend_core.config import HybridConfig

_LATER: dict[str, Any] = {
    "compression": None,
    "max_staleness": 0,
    "compile": False,
}
"""Documented fields whose mechanism is not there yet, with the only value they accept now."""


def check(c: HybridConfig) -> None:
    """Check a configuration.

    Raises:
        ConfigError: A value is out of range or does not fit with another.
        NotAvailableError: A field asks for something this version does not have.
    """
    _check_sizes(c)
    _check_available(c)
    _check_pipeline(c)
    _check_data(c)
    _check_tensor(c)
    _check_experts(c)


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
    n = c.activation_checkpoint_blocks
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ConfigError(
            f"activation_checkpoint_blocks={n!r}: must be a whole number of at least 0.",
            "Activations are recomputed in groups of so many blocks; 0 keeps them.",
            "Set activation_checkpoint_blocks to the blocks of a group, for example 4.",
        )


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
    check_stages_per_rank(c.schedule, chunks)
    if pp != "auto" and m != "auto":
        check_microbatches(c.schedule, int(pp), int(m))


def _check_data(c: HybridConfig) -> None:
    if c.zero_stage not in (0, 1, 2, 3) or isinstance(c.zero_stage, bool):
        raise ConfigError(f"zero_stage={c.zero_stage!r}: must be 0, 1, 2 or 3.", "", "Set zero_stage to one of them.")
    for name in ("partition_gradients", "contiguous_gradients", "overlap_gradients"):
        value = getattr(c, name)
        if value != "auto" and not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r}: must be 'auto', True or False.", "", f"Leave {name} out.")
        if value is True and name == "overlap_gradients" and c.pipeline_parallel_size != 1:
            raise ConfigError(
                "overlap_gradients=True with a pipeline.",
                "Gradients are complete after the last microbatch only; there is no backward left to hide them behind.",
                "Leave overlap_gradients out.",
            )
        if value is False and c.zero_stage >= 2:
            raise ConfigError(
                f"{name}=False with zero_stage={c.zero_stage}.",
                "FSDP2 always reduces gradients in flat buffers, onto the rank that needs them, while backward runs.",
                f"Leave {name} out, or use zero_stage=1.",
            )
    if c.partition_gradients is True and c.zero_stage == 0:
        raise ConfigError(
            "partition_gradients=True with zero_stage=0.",
            "Every rank updates all parameters and needs all gradients.",
            "Set zero_stage to 1, 2 or 3.",
        )
    shard, dp = c.data_parallel_shard_size, c.data_parallel_size
    if shard != "auto" and c.zero_stage == 0 and shard != 1:
        raise ConfigError(
            f"data_parallel_shard_size={shard} with zero_stage=0.",
            "Nothing is sharded at stage 0.",
            "Set zero_stage to 1, 2 or 3.",
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
    if c.self_check not in ("auto", "first_batch", "off"):
        raise ConfigError(f"self_check={c.self_check!r}.", "", "Use 'auto', 'first_batch' or 'off'.")
    if not isinstance(c.sequence_parallel, bool):
        raise ConfigError(f"sequence_parallel={c.sequence_parallel!r}: must be True or False.", "", "Use True or False.")
    if c.sequence_parallel and c.tensor_parallel_size == 1:
        raise ConfigError(
            "sequence_parallel=True with tensor_parallel_size=1.",
            "Tokens are spread over the tensor-parallel ranks; the value would be ignored.",
            "Set tensor_parallel_size above 1, or leave sequence_parallel out.",
        )
    if c.qkv_split not in ("column", "heads"):
        raise ConfigError(f"qkv_split={c.qkv_split!r}.", "", "Use 'column' or 'heads'.")


def _check_experts(c: HybridConfig) -> None:
    dp = c.data_parallel_size
    if dp != "auto" and int(dp) % c.expert_parallel_size:
        raise ConfigError(
            f"expert_parallel_size={c.expert_parallel_size} does not divide data_parallel_size={dp}.",
            "Experts are spread over ranks of the data-parallel axis.",
            "Choose a divisor of data_parallel_size.",
        )
