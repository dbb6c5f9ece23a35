"""Activation checkpointing in groups of N blocks: keep the input of a group, compute the rest again in backward.

It works below the calls of the blocks, so the model's own loop stays: the first block of a group opens it, and each
following block that is called with what the one before it returned joins. What autograd would keep for backward is
dropped when it is made, and made again, once, when backward asks for the first piece. That one recomputation serves
every later pass over the same graph, so schedules that split the backward do not repeat it.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, section 4.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ascend_core import _shim
from ascend_core._shim import pytree
from ascend_core.errors import ModelError
from ascend_core.parallel.rng import generator_states, set_generator_states


class BlockRecompute:
    """Recomputes blocks in groups.

    Args:
        blocks: The blocks, in the order in which the model calls them.
        size: Blocks of a group.
        device: This rank's device, whose random state is kept besides the CPU's.
    """

    def __init__(self, blocks: list[nn.Module], size: int, device: torch.device) -> None:
        self.blocks, self.size, self.device = blocks, size, device
        self.open_group: _Group | None = None
        self._warned = False
        self._changing: dict[tuple[int, bool], list[str]] = {}
        self.recomputations = 0

    def install(self) -> None:
        """Put it under the blocks' own calls; for models without a pipeline, whose gates call it themselves."""
        for index, block in enumerate(self.blocks):
            call = _shim.original_call(block)
            _shim.override_call(block, _Installed(self, index, call))

    def remove(self) -> None:
        """Take it off again."""
        for block in self.blocks:
            _shim.restore_call(block)

    def end_group(self) -> None:
        """Let the next block begin a group; a pipeline says so at the start of each stage."""
        self.open_group = None

    def __call__(self, index: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block.

        Args:
            index: Its place in the list of blocks.
            call: The block's call, its hooks included.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Returns:
            What the block returned.
        """
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        group = self._group_of(index, args, kwargs)
        return group.run(index, call, args, kwargs)

    @contextmanager
    def watch_buffers(self, index: int) -> Iterator[list[torch.Tensor]]:
        """Fill the list with the buffers that a block's call changes, like batch norm's statistics.

        They are found by value, once per block and mode: batch norm's kernels change them without raising their version.
        """
        block = self.blocks[index]
        key = (index, block.training)
        changed: list[torch.Tensor] = []
        before = {n: b.detach().clone() for n, b in block.named_buffers()} if key not in self._changing else {}
        yield changed
        buffers = dict(block.named_buffers())
        if key not in self._changing:
            self._changing[key] = [n for n, b in before.items() if n in buffers and not torch.equal(buffers[n], b)]
        changed += [buffers[n] for n in self._changing[key]]

    def _group_of(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Group:
        """The open group if this block continues it, or else a new one."""
        group = self.open_group
        if group is not None and len(group.calls) < self.size and group.calls[-1].index == index - 1:
            if group.links(args, kwargs):
                return group
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"Block {index} is not called with what block {index - 1} returned, so groups of {self.size} blocks "
                    "end there and more inputs are kept. Move the code between the blocks into them.",
                    stacklevel=2,
                )
        self.open_group = _Group(self)
        return self.open_group


@dataclass(frozen=True)
class _Installed:
    """A block's call with recomputation under it."""

    recompute: BlockRecompute
    index: int
    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.recompute(self.index, self.call, args, kwargs)


@dataclass(frozen=True)
class _Link:
    """In place of an argument: output number ``leaf`` of the block before."""

    leaf: int


@dataclass
class _Call:
    """One block's call, kept so that it can be run again."""

    index: int
    call: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    states: tuple[Any, ...]
    autocast: list[tuple[str, bool, torch.dtype]]
    changed_buffers: list[torch.Tensor] = field(default_factory=list)


class _Piece:
    """What autograd keeps in place of a tensor."""

    __slots__ = ("__weakref__", "group", "meta", "tensor")

    def __init__(self, group: _Group, meta: tuple[Any, ...]) -> None:
        self.group, self.meta = group, meta
        self.tensor: torch.Tensor | None = None


class _Stop(BaseException):
    """Ends a recomputation when the last piece is there."""


class _Group:
    """Consecutive calls of blocks that are recomputed together. It lives as long as the graph that needs it."""

    def __init__(self, owner: BlockRecompute) -> None:
        self.owner = owner
        self.calls: list[_Call] = []
        self.outputs: list[weakref.ref[torch.Tensor] | None] = []
        self.pieces: list[weakref.ref[_Piece]] = []

    def links(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the activation, the first tensor among the arguments, is what the last block returned."""
        first = next((v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)), None)
        return isinstance(self._linked([first])[0], _Link)

    def _linked(self, leaves: list[Any]) -> list[Any]:
        outputs = {id(o): i for i, ref in enumerate(self.outputs) if ref is not None and (o := ref()) is not None}
        return [_Link(outputs[id(v)]) if isinstance(v, torch.Tensor) and id(v) in outputs else v for v in leaves]

    def run(self, index: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block and keep pieces in place of what autograd saves."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        entry = _Call(index, call, self._linked(leaves), spec, generator_states(self.owner.device), self._autocast())
        self.calls.append(entry)
        with self.owner.watch_buffers(index) as entry.changed_buffers, saved_tensors_hooks(self._pack, self._unpack):
            output = call(*args, **kwargs)
        self.outputs = [weakref.ref(o) if isinstance(o, torch.Tensor) else None for o in pytree.tree_leaves(output)]
        return output

    def _autocast(self) -> list[tuple[str, bool, torch.dtype]]:
        kinds = dict.fromkeys(("cpu", self.owner.device.type))
        return [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]

    # ---- saved tensors

    def _pack(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            return tensor  # there anyway
        piece = _Piece(self, _meta(tensor))
        self.pieces.append(weakref.ref(piece))
        return piece

    @staticmethod
    def _unpack(packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Piece):
            return packed  # type: ignore[no-any-return]
        if packed.tensor is None:
            packed.group.recompute()
        assert packed.tensor is not None
        return packed.tensor

    def recompute(self) -> None:
        """Run the calls again and fill all pieces that are still wanted."""
        owner = self.owner
        owner.recomputations += 1
        if owner.open_group is self:
            owner.open_group = None  # a backward ends the group, or calls could join that the recomputation has not seen
        made = 0

        def take(tensor: torch.Tensor) -> None:
            nonlocal made
            if isinstance(tensor, nn.Parameter):
                return
            piece = self.pieces[made]() if made < len(self.pieces) else None
            if made >= len(self.pieces) or (piece is not None and piece.meta != _meta(tensor)):
                raise self._differs(made, tensor)
            if piece is not None:
                piece.tensor = tensor.detach()
            made += 1
            if made == len(self.pieces):
                raise _Stop

        outside = generator_states(owner.device)
        buffers = [(b, b.detach().clone()) for c in self.calls for b in c.changed_buffers]
        try:
            with torch.enable_grad(), saved_tensors_hooks(take, lambda packed: packed):
                self._run_again()
        except _Stop:
            pass
        finally:
            set_generator_states(outside, owner.device)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
        if made < len(self.pieces):
            raise self._differs(made, None)

    def _run_again(self) -> None:
        outputs: list[Any] = []
        for c in self.calls:
            leaves = [outputs[v.leaf] if isinstance(v, _Link) else v for v in c.leaves]
            args, kwargs = pytree.tree_unflatten(leaves, c.spec)
            set_generator_states(c.states, self.owner.device)
            casts = [torch.autocast(k, dtype=dtype, enabled=on) for k, on, dtype in c.autocast]
            for cast in casts:
                cast.__enter__()
            try:
                outputs = pytree.tree_leaves(c.call(*args, **kwargs))
            finally:
                for cast in reversed(casts):
                    cast.__exit__(None, None, None)

    def _differs(self, number: int, tensor: torch.Tensor | None) -> ModelError:
        blocks = f"blocks {self.calls[0].index} to {self.calls[-1].index}"
        what = "it ended early" if tensor is None else f"saved tensor {number} has shape {tuple(tensor.shape)}, {tensor.dtype}"
        return ModelError(
            f"Recomputing {blocks} in backward did not do what forward did: {what}; forward saved {len(self.pieces)} tensors.",
            "A block must do the same when it is called again with the same arguments and random numbers.",
            "Keep state that changes between calls out of the blocks, or set activation_checkpoint_blocks=0.",
        )


def _meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device
