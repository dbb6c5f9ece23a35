"""The one place that says in which order techniques are applied.

Agree on initial values; cut into pipeline stages; split tensors; spread experts; shard or replicate data-parallel; put
up the gates and, under them, activation checkpointing. Compile will go between tensor and data parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ascend_core import _shim
from ascend_core.config import HybridConfig
from ascend_core.errors import ConfigError, ModelError
from ascend_core.mesh import HybridMesh
from ascend_core.parallel.balance import cut_blocks
from ascend_core.parallel.block_costs import BlockCosts
from ascend_core.parallel.block_inputs import record_block_inputs
from ascend_core.parallel.blocks import BlockList, deal, find_blocks, move, prune
from ascend_core.parallel.data import shard_parameters
from ascend_core.parallel.expert import (
    connect_load_balance,
    find_experts,
    refuse_outside_blocks,
    spread_experts,
)
from ascend_core.parallel.failures import raise_together
from ascend_core.parallel.gates import BlockGates
from ascend_core.parallel.hugging_face import check, owner
from ascend_core.parallel.recompute import BlockRecompute
from ascend_core.parallel.rng import StepRng
from ascend_core.parallel.split import split_tensors
from ascend_core.parallel.state import Names, describe
from ascend_core.schedule_rules import stage_owner


@dataclass(frozen=True)
class Applied:
    """What :func:`apply` made of a model.

    Attributes:
        gates: Gates of the pipeline, or None without one.
        sharded: FSDP2 modules, outermost last.
        names: Names of the unsplit model.
        rng: Random streams of a step.
        recompute: Activation checkpointing, or None.
        summed: Names of whole parameters that get part of their gradient on every tensor-parallel rank.
    """

    gates: BlockGates | None
    sharded: list[nn.Module]
    names: Names
    rng: StepRng
    recompute: BlockRecompute | None = None
    summed: frozenset[str] = frozenset()


def apply(
    model: nn.Module,
    config: HybridConfig,
    mesh: HybridMesh,
    device: torch.device,
    *,
    pipeline_module: str = "auto",
    root_is_boundary: bool = True,
    stage_cuts: Sequence[int] | BlockCosts | None = None,
) -> Applied:
    """Spread a model in place.

    Args:
        model: The whole model, with real parameters, the same architecture on every rank.
        config: The configuration.
        mesh: The mesh.
        device: This rank's device.
        pipeline_module: Name of the module whose call is pipelined, or ``"auto"``.
        root_is_boundary: The model's own call is the pipelined one.
        stage_cuts: See :func:`ascend_core.parallel.parallelize`.

    Returns:
        The pieces a step needs.

    Communication:
        Broadcasts all parameters and buffers from rank 0; whatever DTensor and FSDP2 do to shard.
    """
    blocks = _blocks(model, config, mesh, pipeline_module, root_is_boundary)
    if blocks and mesh.size("pp") > 1:
        pretrained = owner(model, blocks.names[0])
        if pretrained is not None:
            check(pretrained)
    rng = StepRng.for_mesh(mesh, device)
    _refuse_meta(model)
    experts = find_experts(model, mesh.size("ep")) if mesh.size("ep") > 1 else []
    connect_load_balance(model, mesh)
    description = describe(model)
    share_initial_values(model, device)

    inputs = record_block_inputs(model, blocks.names) if blocks and mesh.size("tp") > 1 else {}
    stages = _stages(model, blocks, config, mesh.size("pp"), stage_cuts)
    local_names = list(blocks.names) if blocks else []
    runs: list[list[str]] = []
    if stages and blocks:
        refuse_outside_blocks(model, experts, blocks.names)
        here, owners = mesh.rank("pp"), [stage_owner(config.schedule, s, mesh.size("pp")) for s in range(len(stages))]
        local = {i for s, (first, end) in enumerate(stages) if owners[s] == here for i in range(first, end)}
        runs = [list(blocks.names[first:end]) for s, (first, end) in enumerate(stages) if owners[s] == here]
        prune(model, blocks, local, is_first=here == owners[0], is_last=here == owners[-1])
        local_names = [n for i, n in enumerate(blocks.names) if i in local]
    if stages:
        move(model, device)
    else:
        model.to(device)

    summed: frozenset[str] = frozenset()
    error: Exception | None
    if mesh.size("tp") > 1:
        error = None
        try:
            summed = split_tensors(model, config, mesh, runs or [local_names], inputs, experts)
        except Exception as caught:  # noqa: BLE001 - raised on every rank: stages may differ in what they can split
            error = caught
        raise_together(error)

    ignored: set[nn.Parameter] = set()
    if experts:
        error = None
        try:
            ignored = spread_experts(model, experts, mesh)
        except Exception as caught:  # noqa: BLE001 - raised on every rank: stages have different layers
            error = caught
        raise_together(error)

    sharded: list[nn.Module] = []
    if config.zero_stage >= 2:
        assert blocks is not None
        units, wrap = _shard_units(model, blocks, local_names, pipelined=bool(stages))
        reshard = config.zero_stage == 3
        sharded = list(shard_parameters(units, mesh, reshard_after_forward=reshard, wrap=wrap, ignored=ignored))  # type: ignore[arg-type]
        if stages:
            for module in sharded:
                _shim.defer_gradient_reduction(module)  # type: ignore[arg-type]

    recompute = _recompute(model, blocks, config, device)
    gates = None
    if stages and blocks:
        gates = BlockGates(model, blocks, stages, mesh.group("pp"), rng, config.schedule, recompute)
    elif recompute is not None:
        recompute.install()
    return Applied(gates, sharded, Names(*description, model), rng, recompute, summed)


def _recompute(model: nn.Module, blocks: BlockList | None, config: HybridConfig, device: torch.device) -> BlockRecompute | None:
    if not config.activation_checkpoint_blocks:
        return None
    if not blocks:
        raise ModelError(
            f"activation_checkpoint_blocks={config.activation_checkpoint_blocks}: "
            f"{type(model).__name__} has no list of blocks.",
            "Activations are recomputed in groups of blocks.",
            "Put the layers into an nn.ModuleList or nn.Sequential, or set activation_checkpoint_blocks=0.",
        )
    modules = dict(model.named_modules())
    return BlockRecompute([modules[n] for n in blocks.names], config.activation_checkpoint_blocks, device)


def _blocks(
    model: nn.Module, config: HybridConfig, mesh: HybridMesh, pipeline_module: str, root_is_boundary: bool
) -> BlockList | None:
    needed = mesh.size("pp") > 1 or mesh.size("tp") > 1 or config.zero_stage >= 2 or config.activation_checkpoint_blocks
    if not needed:
        return None
    try:
        return find_blocks(model, pipeline_module, root_is_boundary=root_is_boundary)
    except ModelError:
        if mesh.size("pp") == 1 and (mesh.size("tp") == 1 or config.tensor_parallel_plan != "auto"):
            return BlockList("", (), "" if root_is_boundary else None)  # one FSDP2 unit, or a user's own plan
        raise


def _stages(
    model: nn.Module, blocks: BlockList | None, config: HybridConfig, pp: int, wish: Sequence[int] | BlockCosts | None
) -> list[tuple[int, int]]:
    """``(first, one past last)`` block of every stage; none without a pipeline."""
    if pp > 1 and blocks is not None and blocks.split_points is not None and wish is None:
        return deal(blocks, pp * config.num_stages_per_rank)
    if pp > 1 and blocks is not None:
        return cut_blocks(model, blocks, pp * config.num_stages_per_rank, config.schedule, pp, wish)
    if wish is not None:
        raise ConfigError(
            "stage_cuts without a pipeline.", "It would be ignored.", "Set pipeline_parallel_size above 1, or leave it out."
        )
    return []


def _shard_units(
    model: nn.Module, blocks: BlockList, local_names: list[str], *, pipelined: bool
) -> tuple[list[nn.Module], nn.Module | None]:
    """What FSDP2 shards: each block, and around them the boundary, unless a pipeline cuts its forward.

    A model without blocks is sharded by its children that are modules in their own right.
    """
    modules = dict(model.named_modules())
    wrap = modules[blocks.boundary] if blocks.boundary is not None and not pipelined else None
    units = [modules[n] for n in local_names]
    if not units and wrap is None:
        containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
        units = [m for m in model.children() if not isinstance(m, containers) and any(True for _ in m.parameters())]
    if not units and wrap is None:
        raise ModelError(
            f"{type(model).__name__} has nothing that can be sharded.",
            "FSDP2 shards modules whose forward is called: blocks, or children of the model.",
            "Put the parameters into submodules, or set zero_stage=0.",
        )
    return units, wrap


def _refuse_meta(model: nn.Module) -> None:
    on_meta = [n for n, p in model.named_parameters() if p.is_meta]
    if on_meta:
        raise ModelError(
            f"{len(on_meta)} parameters have no values yet (meta device), the first is {on_meta[0]!r}.",
            "The model is split after its parameters are initialised.",
            "Build the model on the CPU.",
        )


def share_initial_values(model: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's parameters and buffers. Communication: one broadcast per tensor over all ranks."""
    own_buffers(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            moved = tensor.detach().to(device).contiguous()
            dist.broadcast(moved, src=0)
            tensor.copy_(moved)


def own_buffers(model: nn.Module) -> None:
    """Give expanded or strided buffers memory of their own, so that a collective can write into them."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if not buffer.is_contiguous():
                setattr(module, name, buffer.contiguous())
