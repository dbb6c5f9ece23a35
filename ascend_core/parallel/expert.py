"""Expert parallel: the experts of each MoE layer spread over neighbouring ranks of the data-parallel axis.

What is spread is an *experts module*, recognised by its form: an integer ``num_experts``, parameters that all have it as
dim 0, and a forward ``(tokens (T, dim), index (T, K), weights (T, K)) -> (T, dim)``. Those of Hugging Face's MoE models
and :class:`ascend_core.parallel.moe.GroupedExperts` are such modules. Whether each expert really works on its tokens
alone is proved by a dry run before anything is split. Parameters become DTensors, ``Shard(0)`` on the axis ``ep``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.func import functional_call

from ascend_core.errors import ConfigError, ModelError
from ascend_core.mesh import HybridMesh
from ascend_core.parallel.dispatch import dispatch_and_combine
from ascend_core.parallel.moe import MoELayer

PROTOCOL = (
    "An experts module has an integer attribute num_experts, no buffers, parameters whose dim 0 is num_experts, and a "
    "forward (tokens, index, weights)."
)


def is_experts_module(module: nn.Module) -> bool:
    """Tell whether a module has the form of an experts module."""
    number = getattr(module, "num_experts", None)
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
            "Use ascend_core.parallel.moe.MoELayer, give your experts that form, or set expert_parallel_size=1.",
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
    return names


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
        ranks = mesh.size("ep")
        piece = _piece(module, ranks)
        _prove(name, module, piece, ranks)
        for owner in module.modules():
            for leaf, p in list(owner.named_parameters(recurse=False)):
                sharded = distribute_tensor(p.detach(), mesh.experts["ep"], [Shard(0)], src_data_rank=None)
                setattr(owner, leaf, nn.Parameter(sharded, requires_grad=p.requires_grad))
        module.forward = SpreadForward(module, piece, mesh.group("ep"))  # type: ignore[method-assign]
        kept.update(module.parameters())
    return kept


class SpreadForward:
    """Replaces the forward of an experts module: dispatch, the module's own forward on the local experts, combine.

    Args:
        module: The experts module, with sharded parameters.
        piece: The same module for the experts of one rank, without values.
        group: The expert-parallel group.
    """

    def __init__(self, module: nn.Module, piece: nn.Module, group: dist.ProcessGroup) -> None:
        self.module, self.piece = module, piece
        self._signature = inspect.signature(type(module).forward)
        self._group: Callable[[], dist.ProcessGroup] = lambda: group  # a group cannot be copied with its model

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take the arguments of the module's forward; see :func:`dispatch_and_combine`."""
        bound = self._signature.bind(self.module, *args, **kwargs)
        _, tokens, index, weights = bound.arguments.values()
        number = int(self.module.num_experts)  # type: ignore[arg-type]
        return dispatch_and_combine(tokens, index, weights, number, self._group(), self._run)

    def _run(self, rows: torch.Tensor, expert_of: torch.Tensor) -> torch.Tensor:
        values = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in self.module.named_parameters()}
        if rows.shape[0] == 0:  # the gradients of this rank's experts are zero, not absent, as in one process
            return rows + sum(v.reshape(-1)[:0].sum() for v in values.values())
        self.piece.train(self.module.training)
        return _call_piece(self.piece, values, rows, expert_of)


def _piece(module: nn.Module, ranks: int) -> nn.Module:
    """A copy of an experts module for one rank's experts, whose parameters are given at each call."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.new_empty(0), requires_grad=False) for p in module.parameters()}
    config = getattr(module, "config", None)
    memo[id(config)] = config
    piece = copy.deepcopy(module, memo)
    piece.num_experts = int(module.num_experts) // ranks  # type: ignore[arg-type,assignment]
    return piece


def _call_piece(
    piece: nn.Module, values: Mapping[str, torch.Tensor], rows: torch.Tensor, expert_of: torch.Tensor
) -> torch.Tensor:
    """Each row through its one expert, with weight 1: ``(R, dim)``."""
    return functional_call(piece, dict(values), (rows, expert_of[:, None], rows.new_ones(rows.shape[0], 1)))


def _prove(name: str, module: nn.Module, piece: nn.Module, ranks: int) -> None:
    """Run the whole module, and the pieces one by one, on the same few tokens; they must agree."""
    number, training = int(module.num_experts), module.training  # type: ignore[arg-type]
    values = {n: p.detach() for n, p in module.named_parameters()}
    some = next(iter(values.values()))
    generator = torch.Generator().manual_seed(0)
    k = min(2, number)
    index = torch.stack([torch.randperm(number, generator=generator)[:k] for _ in range(6)]).to(some.device)
    weights = torch.rand(6, k, generator=generator).to(some)
    module.eval()
    piece.eval()
    try:
        with torch.no_grad():
            tokens, whole = _run_whole(name, module, index, weights, generator)
            results = torch.zeros_like(tokens)
            for rank in range(ranks):
                first = rank * (number // ranks)
                at = ((index >= first) & (index < first + number // ranks)).nonzero()
                if at.shape[0]:
                    token_of, choice = at.unbind(1)
                    part = {n: v.chunk(ranks)[rank] for n, v in values.items()}
                    out = _call_piece(piece, part, tokens[token_of], index[token_of, choice] - first)
                    results.index_add_(0, token_of, (out * weights[token_of, choice, None]).to(results.dtype))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _unproved(name, module, f"The dry run failed: {type(error).__name__}: {error}") from error
    finally:
        module.train(training)
    tolerance = 1e-4 if some.dtype in (torch.float32, torch.float64) else 3e-2
    gap, size = float((results - whole).abs().max()), float(whole.abs().max())
    if not gap <= tolerance * size:
        raise _unproved(name, module, f"Run in {ranks} pieces, its output differs by {gap:.2e} of {size:.2e}.")


def _run_whole(
    name: str, module: nn.Module, index: torch.Tensor, weights: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the size of a token by trying those that the parameters suggest."""
    sizes = dict.fromkeys(
        s
        for s in (
            getattr(module, "hidden_dim", None),
            getattr(module, "hidden_size", None),
            *(s for p in module.parameters() for s in reversed(p.shape[1:])),
        )
        if isinstance(s, int)
    )
    for size in sizes:
        tokens = torch.randn(index.shape[0], size, generator=generator).to(weights)
        try:
            whole = module(tokens, index, weights)
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue
        if isinstance(whole, torch.Tensor) and whole.shape == tokens.shape:
            return tokens, whole
    raise _unproved(name, module, f"It could not be run on tokens of size {', '.join(map(str, sizes))}.")


def _unproved(name: str, module: nn.Module, why: str) -> ModelError:
    return ModelError(
        f"The experts of {name!r} ({type(module).__name__}) cannot be spread.",
        f"{why} Each expert must work on its tokens one by one, and its output be multiplied by the token's weight.",
        "Set expert_parallel_size=1.",
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
