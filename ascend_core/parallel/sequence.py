"""Sequence parallel: between split regions each tensor-parallel rank holds its own tokens only.

Norms, dropout and residuals work token by token, so the activations between regions can be spread over the sequence.
A region gathers the tokens where it is entered and scatters the sum where it is left: the same bytes as the two
all-reduces of tensor parallel alone, and a part of the memory in between. Activations are cut when they enter the first
block of a stage and whole again behind its last one.

What is whole inside a block works on this rank's tokens and gets part of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ascend_core.errors import ModelError
from ascend_core.parallel import tensor_collectives as collectives
from ascend_core.parallel.activations import activation, replace
from ascend_core.parallel.regions import Region, RowForward, share_gradient
from ascend_core.parallel.rng import RegionRng
from ascend_core.parallel.tp_styles import TensorPlan, parse_style


def spread_sequence(root: nn.Module, names: list[str], plan: TensorPlan, regions: Mapping[str, Region]) -> None:
    """Make the regions of blocks gather and scatter tokens; the blocks then take and give this rank's tokens.

    Args:
        root: The split model.
        names: Names of this rank's blocks.
        plan: Its plan; modules that get part of their gradient are added.
        regions: Module name to region, from :func:`apply_tensor_parallel`.

    Raises:
        ModelError: A block has no region, so that there is nothing to gather for.
    """
    for name in names:
        block = root.get_submodule(name)
        if not any(True for _ in block.parameters()):
            continue
        own = {n: r for n, r in regions.items() if n.startswith(f"{name}.") and n in plan.styles}
        if not own:
            raise ModelError(
                f"sequence_parallel=True: block {name!r} ({type(block).__name__}) has no split region.",
                "Tokens are gathered where a split region begins; without one, code that mixes tokens cannot be found.",
                "Set sequence_parallel=False, or give a tensor_parallel_plan that splits the block.",
            )
        whole_scopes = _spread_block(root, name, sequence_dim(block), own, plan)
        size = next(iter(own.values())).size
        for child, module in block.named_modules(prefix=name):
            in_whole_scope = any(child == s or child.startswith(f"{s}.") for s in whole_scopes)
            if in_whole_scope and child not in own:
                continue
            _share_rest(child, module, size, plan)


def _spread_block(root: nn.Module, name: str, dim: int, own: Mapping[str, Region], plan: TensorPlan) -> list[str]:
    """Tell each region where it gathers; returns the modules inside which every rank does the same with all tokens."""
    scopes: dict[str, tuple[Region, bool]] = {}
    for module, region in own.items():
        kind = parse_style(plan.styles[module])[0]
        region.sequence_dim, region.rng = (1 if kind == "attention" else dim), None
        scope = module.rpartition(".")[0]
        if kind in ("rowwise", "rowwise_split"):
            continue
        if kind == "attention" or scope == name:
            region.gather_at_columns = True
        else:
            divided = kind != "colwise_gather"
            region.gathered_for_parts = divided
            scopes[scope] = (region, divided)
    for scope, (region, divided) in scopes.items():
        holder: Any = root.get_submodule(scope)
        holder.forward = _GatherTokens(holder.forward, region, dim, divided)
    return [s for s, (_, divided) in scopes.items() if not divided]


def _share_rest(name: str, module: nn.Module, size: int, plan: TensorPlan) -> None:
    """Give a whole module, or the whole bias of a row projection, its place among what is summed over ranks."""
    rest = [p for p in module.parameters(recurse=False) if not isinstance(p, DTensor)]
    if not rest or name in plan.summed:
        return
    plan.summed.append(name)
    if not isinstance(module.forward, RowForward):  # which scales the gradient of its bias itself
        share_gradient(module, size)


def sequence_dim(block: nn.Module) -> int:
    """The dim of a block's activation that counts tokens: 1, or 0 if its attention is not ``batch_first``."""
    return 0 if any(getattr(m, "batch_first", True) is False for m in block.modules()) else 1


class _GatherTokens:
    """Forward of a module that holds the columns of a region: its activation is gathered first."""

    def __init__(self, call: Callable[..., Any], region: Region, dim: int, divided: bool) -> None:
        self.call, self.region, self.dim, self.divided = call, region, dim, divided

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = activation(args, kwargs, "")
        total = x.shape[self.dim] * self.region.size
        whole = collectives.gather_parts(x, self.dim, total, self.region.group, used_in_parts=self.divided)
        args, kwargs = replace(args, kwargs, whole)
        return self.call(*args, **kwargs)


class SequenceBlock:
    """Forward of a block of a stage: cuts the activation at the first one, gathers it behind the last one.

    Inside, random numbers are those of this rank's tokens.

    Args:
        block: The block.
        mesh: The one-axis ``tp`` mesh.
        cuts: It is the first block of its stage.
        gathers: It is the last block of its stage.
    """

    def __init__(self, block: nn.Module, mesh: DeviceMesh, *, cuts: bool, gathers: bool) -> None:
        self.block, self.call, self.dim = block, block.forward, sequence_dim(block)
        self.group, self.size, self.cuts, self.gathers = mesh.get_group(), mesh.size(), cuts, gathers
        self.rng = RegionRng(mesh.get_local_rank())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block. Communication: that of its regions, and an all-gather at either end of a stage."""
        if self.cuts:
            x = cut_tokens(activation(args, kwargs, ""), self.dim, self.size, self.group)
            args, kwargs = replace(args, kwargs, x)
        self.rng.enter(self.block.training)
        output = self.call(*args, **kwargs)
        self.rng.leave()
        return gather_tokens(output, self.dim, self.size, self.group) if self.gathers else output


def cut_tokens(x: torch.Tensor, dim: int, size: int, group: Any) -> torch.Tensor:
    """Keep this rank's tokens of a whole activation ``(batch, tokens, ...)``.

    Raises:
        ModelError: The tokens do not divide.
    """
    if x.dim() < 3 or x.shape[dim] % size:
        raise ModelError(
            f"sequence_parallel=True: dim {dim} of an activation of shape {tuple(x.shape)} cannot be spread over {size} ranks.",
            "Each rank gets the same number of tokens.",
            f"Pad sequences to a multiple of {size}, or set sequence_parallel=False.",
        )
    return collectives.cut_whole(x, dim, group)


def gather_tokens(output: Any, dim: int, size: int, group: Any) -> Any:
    """Make the activation in a block's output whole again: the output itself, or its first tensor."""
    if isinstance(output, torch.Tensor):
        return collectives.gather_parts(output, dim, output.shape[dim] * size, group, used_in_parts=False)
    if type(output) in (tuple, list) and output and isinstance(output[0], torch.Tensor):
        return type(output)((gather_tokens(output[0], dim, size, group), *output[1:]))
    raise ModelError(
        f"sequence_parallel=True: a block returned a {type(output).__name__}.",
        "Its activation must be the output, or the first entry of a tuple.",
        "Set sequence_parallel=False.",
    )
