"""Split the tensors of a model: plan, proof, application, and what must hold afterwards."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor

from ascend_core.config import HybridConfig
from ascend_core.errors import ModelError
from ascend_core.mesh import HybridMesh
from ascend_core.parallel.block_inputs import BlockInput
from ascend_core.parallel.tensor import apply_tensor_parallel, expand_plan
from ascend_core.parallel.tp_plans import auto_plan


def split_tensors(
    model: nn.Module, config: HybridConfig, mesh: HybridMesh, local_names: list[str], inputs: Mapping[str, BlockInput]
) -> frozenset[str]:
    """Split a model in place.

    Args:
        model: The model, pruned for this pipeline rank, with equal values on all tensor-parallel ranks.
        config: The configuration.
        mesh: The mesh.
        local_names: Names of this rank's blocks.
        inputs: What blocks are called with, for those where it is known.

    Returns:
        Names of whole parameters that get part of their gradient on every rank.

    Raises:
        ConfigError: The plan does not fit the model.
        ModelError: A tied parameter would be split differently in its places.
    """
    if config.tensor_parallel_plan == "auto":
        plan = auto_plan(model, local_names, mesh.size("tp"), qkv_split=config.qkv_split, inputs=inputs)
    else:
        assert isinstance(config.tensor_parallel_plan, Mapping)
        plan = expand_plan(model, config.tensor_parallel_plan)
    tied = _tied(model)
    apply_tensor_parallel(model, plan, mesh.device_mesh["tp"])
    _tie_again(model, tied)
    summed = {id(p) for n in plan.summed for p in model.get_submodule(n).parameters(recurse=False)}
    return frozenset(n for n, p in model.named_parameters() if id(p) in summed)


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Places that share one parameter, for every shared parameter."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(p), []).append((module, name))
    return [spots for spots in places.values() if len(spots) > 1]


def _tie_again(model: nn.Module, tied: list[list[tuple[nn.Module, str]]]) -> None:
    """Sharding makes new Parameters; places that shared one must share it again, with the same placement."""
    for spots in tied:
        values = [getattr(module, name) for module, name in spots]
        if all(v is values[0] for v in values):
            continue
        placements = {v.placements if isinstance(v, DTensor) else None for v in values}
        if len(placements) > 1:
            names = {id(m): n for n, m in model.named_modules()}
            where = ", ".join(f"{names[id(m)]}.{n}" for m, n in spots)
            raise ModelError(
                f"The tied parameter of {where} would be split differently in each place.",
                "Both places use one tensor, so they need the same tensor-parallel placement.",
                "Give both modules matching styles ('embedding' with 'colwise_gather'), or leave both out of the plan.",
            )
        for module, name in spots[1:]:
            setattr(module, name, values[0])
