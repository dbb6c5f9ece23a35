"""Split the tensors of a model: plan, proof, application, and what must hold afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ascend_core.config import HybridConfig
from ascend_core.errors import ConfigError, ModelError
from ascend_core.mesh import HybridMesh
from ascend_core.parallel.block_check import BlockCheck
from ascend_core.parallel.block_inputs import BlockInput
from ascend_core.parallel.sequence import SequenceBlock, spread_sequence
from ascend_core.parallel.tensor import apply_tensor_parallel, expand_plan
from ascend_core.parallel.tp_plans import auto_plan
from ascend_core.parallel.tp_proof import modules_between
from ascend_core.parallel.tp_styles import TensorPlan


def split_tensors(
    model: nn.Module,
    config: HybridConfig,
    mesh: HybridMesh,
    runs: list[list[str]],
    inputs: Mapping[str, BlockInput],
    experts: list[str],
) -> frozenset[str]:
    """Split a model in place.

    Args:
        model: The model, pruned for this pipeline rank, with equal values on all tensor-parallel ranks.
        config: The configuration.
        mesh: The mesh.
        runs: Names of this rank's blocks, stage by stage.
        inputs: What blocks are called with, for those where it is known.
        experts: Names of modules whose experts are spread; tensor parallel leaves them whole.

    Returns:
        Names of whole parameters that get part of their gradient on every rank.

    Raises:
        ConfigError: The plan does not fit the model.
        ModelError: A tied parameter would be split differently in its places, or a split block differs from the whole one.
    """
    local_names = [n for run in runs for n in run]
    check = BlockCheck(model, local_names, inputs)
    if config.tensor_parallel_plan == "auto":
        plan = auto_plan(model, local_names, mesh.size("tp"), qkv_split=config.qkv_split, inputs=inputs)
    else:
        assert isinstance(config.tensor_parallel_plan, Mapping)
        plan = expand_plan(model, config.tensor_parallel_plan)
        _refuse_experts(plan, experts)
        _refuse_holes(plan, check)
        _find_between(model, plan, check)
    plan.leave_out(experts)
    tied = _tied(model)
    tp_mesh = mesh.device_mesh["tp"]
    regions = apply_tensor_parallel(model, plan, tp_mesh)
    _tie_again(model, tied)
    if config.sequence_parallel:
        _refuse_unchecked(local_names, model, check)
        spread_sequence(model, local_names, plan, regions)
    parts = {id(p) for n in plan.summed for p in model.get_submodule(n).parameters(recurse=False)}
    summed = frozenset(n for n, p in model.named_parameters() if id(p) in parts and not isinstance(p, DTensor))
    check.compare(mesh.group("tp"), summed, sequence=config.sequence_parallel)
    if config.sequence_parallel:
        for run in runs:
            for name in run:
                block: Any = model.get_submodule(name)
                block.forward = SequenceBlock(block, tp_mesh, cuts=name == run[0], gathers=name == run[-1])
    return summed


def _refuse_unchecked(names: list[str], model: nn.Module, check: BlockCheck) -> None:
    """Sequence parallel is used only where a run of the block shows that it is right."""
    for name in names:
        if name not in check.covered:
            raise ModelError(
                f"sequence_parallel=True: block {name!r} ({type(model.get_submodule(name)).__name__}) cannot be tried out.",
                "It needs arguments that are not known, or it is not a module with norms and projections inside.",
                "Set sequence_parallel=False.",
            )


def _refuse_experts(plan: TensorPlan, experts: list[str]) -> None:
    """Refuse a user's plan for experts that are spread."""
    inside = [n for n in plan.styles if any(n == e or n.startswith(f"{e}.") for e in experts)]
    if inside:
        raise ConfigError(
            f"tensor_parallel_plan splits {inside[0]!r}, which belongs to experts that are spread.",
            "With expert_parallel_size > 1 every tensor-parallel rank holds its experts whole.",
            "Leave the experts out of the plan, or set expert_parallel_size=1.",
        )


def _refuse_holes(plan: TensorPlan, check: BlockCheck) -> None:
    """Refuse an output that stays split where nothing is known to take it."""
    for region in plan.regions:
        if region.row is None and not check.covers(region.columns[0]):
            raise ConfigError(
                f"tensor_parallel_plan: the output of {region.columns[0]!r} stays split, and no 'rowwise' module takes it.",
                "The code behind it would see a part of the columns as if it were all of them.",
                "Use 'colwise_gather' there, or give the module that takes it the style 'rowwise'.",
            )


def _find_between(model: nn.Module, plan: TensorPlan, check: BlockCheck) -> None:
    """Whole modules inside the regions of a user's plan get part of their gradient on every rank."""
    for region in plan.regions:
        block = check.block_of(region.columns[0])
        if block is None or region.row is None or not region.row.startswith(f"{block}."):
            continue
        short = tuple(c[len(block) + 1 :] for c in region.columns)
        row = region.row[len(block) + 1 :]
        between = modules_between(model.get_submodule(block), check.input_of(block), short, row)
        plan.summed += [f"{block}.{n}" for n in between]


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
