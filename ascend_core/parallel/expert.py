"""Expert parallel: the experts of each MoE layer spread over neighbouring ranks of the data-parallel axis.

What is spread is an *experts module*, recognised by its form: an integer ``num_experts``, parameters that all have it as
dim 0, and a forward ``(tokens (T, dim), index (T, K), weights (T, K)) -> (T, dim)``. Those of Hugging Face's MoE models
and :class:`ascend_core.parallel.moe.GroupedExperts` are such modules; their parameters become DTensors, ``Shard(0)`` on
the axis ``ep``. Of an :class:`ascend_core.parallel.moe.ExpertList` each rank keeps some modules whole. Whether an expert
really works on each token alone is proved by a dry run before anything is split.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.mesh import HybridMesh
from ascend_core.parallel.data import mark_expert
from ascend_core.parallel.dispatch import dispatch_and_combine
from ascend_core.parallel.expert_pieces import ListPieces, Pieces, StackedPieces, prove
from ascend_core.parallel.moe import ExpertList, MoELayer

PROTOCOL = (
    "An experts module has an integer attribute num_experts, no buffers, parameters whose dim 0 is num_experts, and a "
    "forward (tokens, index, weights)."
)


def is_experts_module(module: nn.Module) -> bool:
    """Tell whether a module has the form of an experts module."""
    number = getattr(module, "num_experts", None)
    if isinstance(module, ExpertList):
        return any(True for _ in module.parameters()) and not any(True for _ in module.buffers())
    if not isinstance(number, int) or isinstance(number, bool) or any(True for _ in module.buffers()):
        return False
    parameters = list(module.parameters())
    if not any(p.dim() == 3 for p in parameters) or any(p.dim() == 0 or p.shape[0] != number for p in parameters):
        return False
    required = [p for p in inspect.signature(type(module).forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(required) == 4


def find_experts(model: nn.Module, expert_parallel_size: int) -> list[str]:
    """Find the experts modules of a whole model, and check that they can be spread.

    Args:
        model: The unsplit model.
        expert_parallel_size: Ranks that share them.

    Returns:
        Their names.

    Raises:
        ConfigError: There is none, their number does not divide, or their parameters are used elsewhere too.
    """
    names = [n for n, m in model.named_modules() if is_experts_module(m)]
    if not names:
        raise ConfigError(
            f"expert_parallel_size={expert_parallel_size}, but {type(model).__name__} has no MoE layer that can be spread.",
            PROTOCOL,
            "Use ascend_core.parallel.MoELayer, give your experts that form, or set expert_parallel_size=1.",
        )
    for name in names:
        number = model.get_submodule(name).num_experts
        if int(number) % expert_parallel_size:  # type: ignore[arg-type]
            raise ConfigError(
                f"{name!r} has {number} experts, which do not divide over expert_parallel_size={expert_parallel_size}.",
                "Every rank holds the same number of experts.",
                "Choose an expert_parallel_size that divides it.",
            )
    _refuse_shared(model, names)
    _warn_of_local_balance(model)
    return names


def _warn_of_local_balance(model: nn.Module) -> None:
    if any(getattr(getattr(m, "config", None), "output_router_logits", False) for m in model.modules()):
        warnings.warn(
            "The model computes its load-balance loss itself (output_router_logits=True), from the tokens of one replica: "
            "the mean over the replicas is not exactly the loss of their batches together, as with any data parallel.",
            stacklevel=4,
        )


def _refuse_shared(model: nn.Module, names: list[str]) -> None:
    places: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(p), []).append(name)
    for name in names:
        for p in model.get_submodule(name).parameters():
            if len(places[id(p)]) > 1:
                raise ConfigError(
                    f"The expert parameter {places[id(p)][0]!r} is also {places[id(p)][1]!r}.",
                    "Tied expert parameters would be split and reduced twice.",
                    "Give each MoE layer its own experts, or set expert_parallel_size=1.",
                )


def spread_experts(model: nn.Module, names: list[str], mesh: HybridMesh) -> set[nn.Parameter]:
    """Keep this rank's experts of each module, and route tokens to the others'.

    Args:
        model: The model on its device.
        names: From :func:`find_experts`; those that a pipeline has put elsewhere are passed over.
        mesh: The mesh.

    Returns:
        The expert parameters of this rank.

    Raises:
        ModelError: The dry run shows that the experts of a module cannot be split.

    Communication:
        None: all ranks hold the same values.
    """
    assert mesh.experts is not None
    kept: set[nn.Parameter] = set()
    for name in names:
        module = model.get_submodule(name)
        if not any(True for _ in module.parameters()):
            continue  # hollowed out: it lives on another stage
        trained = any(p.requires_grad for p in module.parameters())
        pieces: Pieces = ListPieces(module, mesh) if isinstance(module, ExpertList) else StackedPieces(module, mesh)
        prove(name, module, pieces, mesh.size("ep"))
        pieces.keep_local(model)
        module.forward = SpreadForward(module, pieces, mesh.group("ep"), trained)  # type: ignore[method-assign]
        for p in module.parameters():
            mark_expert(p)
        kept.update(module.parameters())
    return kept


class SpreadForward:
    """Replaces the forward of an experts module: dispatch, this rank's experts, combine.

    Args:
        module: The experts module.
        pieces: Its parts.
        group: The expert-parallel group.
        trained: Some of the experts, of whichever rank, are trained.
    """

    def __init__(self, module: nn.Module, pieces: Pieces, group: dist.ProcessGroup, trained: bool) -> None:
        self.pieces, self.trained, self.number = pieces, trained, int(module.num_experts)  # type: ignore[arg-type]
        self._signature = inspect.signature(type(module).forward)
        self._group: Callable[[], dist.ProcessGroup] = lambda: group  # a group cannot be copied with its model

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take the arguments of the module's forward; see :func:`dispatch_and_combine`."""
        _, tokens, index, weights = self._signature.bind(None, *args, **kwargs).arguments.values()
        return dispatch_and_combine(
            tokens, index, weights, self.number, self._group(), self.pieces.run_local, trained=self.trained
        )


def refuse_outside_blocks(model: nn.Module, experts: list[str], block_names: tuple[str, ...]) -> None:
    """Refuse MoE layers that a pipeline would run on every stage.

    Raises:
        ConfigError: A spread experts module, or a layer with a load-balance loss, is in no block.
    """
    layers = [n for n, m in model.named_modules() if isinstance(m, MoELayer) and m.load_balance_coefficient]
    for name in (*experts, *layers):
        if not any(name.startswith(f"{block}.") for block in block_names):
            raise ConfigError(
                f"The MoE layer {name!r} is outside of the blocks {block_names[0]!r} to {block_names[-1]!r}.",
                "What is outside of the blocks runs on every pipeline stage, without its real input on most of them.",
                "Move it into a block, or use pipeline_parallel_size=1.",
            )


def connect_load_balance(model: nn.Module, mesh: HybridMesh) -> None:
    """Let the load-balance losses of :class:`MoELayer` count the tokens of all replicas."""
    layers = [m for m in model.modules() if isinstance(m, MoELayer) and m.load_balance_coefficient]
    if mesh.size("dp") == 1:
        return
    group, size = mesh.group("dp"), mesh.size("dp")

    def sum_over_replicas(totals: torch.Tensor) -> int:
        dist.all_reduce(totals, group=group)
        return size

    for layer in layers:
        layer.sum_over_replicas = sum_over_replicas
