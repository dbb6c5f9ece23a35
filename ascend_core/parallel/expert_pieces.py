"""The parts of an experts module: what one rank keeps of it, and the proof that the parts together are the whole."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.func import functional_call

from ascend_core.errors import ModelError
from ascend_core.mesh import HybridMesh
from ascend_core.parallel.blocks import hollow
from ascend_core.parallel.moe import ExpertList, mix_experts


class Pieces(Protocol):
    """An experts module in equal parts, one per expert-parallel rank."""

    def run(self, rank: int, rows: torch.Tensor, expert_of: torch.Tensor) -> torch.Tensor:
        """Run the part of a rank, before :meth:`keep_local`: each row ``(R, dim)`` through one expert of the part."""
        ...

    def keep_local(self, model: nn.Module) -> None:
        """Drop the other ranks' parts."""
        ...

    def run_local(self, rows: torch.Tensor, expert_of: torch.Tensor) -> torch.Tensor:
        """Run this rank's part; there may be no rows."""
        ...


class StackedPieces:
    """Parts of a module whose parameters hold one expert after the other on dim 0.

    Args:
        module: The experts module.
        mesh: The mesh.
    """

    def __init__(self, module: nn.Module, mesh: HybridMesh) -> None:
        assert mesh.experts is not None
        self.module, self.ranks = module, mesh.size("ep")
        self._mesh = lambda: mesh.experts["ep"]  # type: ignore[index]  # a mesh cannot be copied with its model
        self.piece = _without_values(module, int(module.num_experts) // self.ranks)  # type: ignore[arg-type]

    def run(self, rank: int, rows: torch.Tensor, expert_of: torch.Tensor) -> torch.Tensor:
        """See :class:`Pieces`."""
        values = {n: p.detach().chunk(self.ranks)[rank] for n, p in self.module.named_parameters()}
        return self._call(values, rows, expert_of)

    def keep_local(self, model: nn.Module) -> None:
        """Make DTensors of the parameters. Communication: none, all ranks hold the same values."""
        for owner in self.module.modules():
            for leaf, p in list(owner.named_parameters(recurse=False)):
                sharded = distribute_tensor(p.detach(), self._mesh(), [Shard(0)], src_data_rank=None)
                setattr(owner, leaf, nn.Parameter(sharded, requires_grad=p.requires_grad))

    def run_local(self, rows: torch.Tensor, expert_of: torch.Tensor) -> torch.Tensor:
        """See :class:`Pieces`. Without rows the gradients are zero, not absent, as in one process."""
        values = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in self.module.named_parameters()}
        if rows.shape[0] == 0:
            return rows + sum(v.reshape(-1)[:0].sum() for v in values.values())
        return self._call(values, rows, expert_of)

    def _call(self, values: Mapping[str, torch.Tensor], rows: torch.Tensor, expert_of: torch.Tensor) -> torch.Tensor:
        self.piece.train(self.module.training)
        return functional_call(self.piece, dict(values), (rows, expert_of[:, None], rows.new_ones(rows.shape[0], 1)))


def _without_values(module: nn.Module, num_experts: int) -> nn.Module:
    """A copy of an experts module for fewer experts, whose parameters are given at each call."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.new_empty(0), requires_grad=False) for p in module.parameters()}
    config = getattr(module, "config", None)
    memo[id(config)] = config  # what the model's configuration says later holds here too
    piece = copy.deepcopy(module, memo)
    piece.num_experts = num_experts  # type: ignore[assignment]
    return piece


class ListPieces:
    """Parts of a list of expert modules: runs of the list.

    Args:
        module: The list.
        mesh: The mesh.
    """

    def __init__(self, module: ExpertList, mesh: HybridMesh) -> None:
        each = len(module) // mesh.size("ep")
        self.parts = [list(module)[i : i + each] for i in range(0, len(module), each)]
        self.local = self.parts[mesh.rank("ep")]

    def run(self, rank: int, rows: torch.Tensor, expert_of: torch.Tensor) -> torch.Tensor:
        """See :class:`Pieces`."""
        return mix_experts(self.parts[rank], rows, expert_of[:, None], rows.new_ones(rows.shape[0], 1))

    def keep_local(self, model: nn.Module) -> None:
        """Hollow the other ranks' modules; their names stay."""
        hollow([m for part in self.parts for m in part if part is not self.local], model)

    def run_local(self, rows: torch.Tensor, expert_of: torch.Tensor) -> torch.Tensor:
        """See :class:`Pieces`. An expert without rows is not called, as in one process."""
        if rows.shape[0] == 0:
            return rows
        return mix_experts(self.local, rows, expert_of[:, None], rows.new_ones(rows.shape[0], 1))


def prove(name: str, module: nn.Module, pieces: Pieces, ranks: int) -> None:
    """Run the whole module, and its parts on a few tokens at a time; they must agree.

    Args:
        name: Its name, for errors.
        module: The experts module, whole.
        pieces: Its parts.
        ranks: Number of parts.

    Raises:
        ModelError: They do not agree, or the module cannot be run.
    """
    number, modes = int(module.num_experts), {m: m.training for m in module.modules()}  # type: ignore[arg-type]
    some = next(module.parameters()).detach()
    generator = torch.Generator().manual_seed(0)
    k = min(2, number)
    index = torch.stack([torch.randperm(number, generator=generator)[:k] for _ in range(6)]).to(some.device)
    weights = torch.rand(6, k, generator=generator).to(some)
    module.eval()
    try:
        with torch.no_grad():
            tokens, whole = _run_whole(name, module, index, weights, generator)
            results = torch.zeros_like(tokens)
            for rank in range(ranks):
                first = rank * (number // ranks)
                at = ((index >= first) & (index < first + number // ranks)).nonzero()
                for some_of in at.split([1, at.shape[0] - 1]) if at.shape[0] > 1 else at.split(1):
                    token_of, choice = some_of.unbind(1)
                    out = pieces.run(rank, tokens[token_of], index[token_of, choice] - first)
                    results.index_add_(0, token_of, (out * weights[token_of, choice, None]).to(results.dtype))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _unproved(name, module, f"The dry run failed: {type(error).__name__}: {error}") from error
    finally:
        for m, mode in modes.items():
            m.training = mode
    tolerance = 1e-4 if some.dtype in (torch.float32, torch.float64) else 3e-2
    gap, size = float((results - whole).abs().max()), float(whole.abs().max())
    if not gap <= tolerance * size:
        raise _unproved(name, module, f"Run in {ranks} parts, its output differs by {gap:.2e} of {size:.2e}.")


def _run_whole(
    name: str, module: nn.Module, index: torch.Tensor, weights: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the size of a token by trying those that the parameters suggest."""
    named = (getattr(module, "hidden_dim", None), getattr(module, "hidden_size", None))
    suggested = (s for p in module.parameters() for s in reversed(p.shape))
    sizes = dict.fromkeys(s for s in (*named, *suggested) if isinstance(s, int))
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
