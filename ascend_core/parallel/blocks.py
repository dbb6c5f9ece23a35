"""The blocks of a model: find them, deal them to stages, and drop what a rank does not own.

A *block* is one element of the list a model runs through in order (decoder layers, the children of an
``nn.Sequential``). Parameter names never change: a block that lives elsewhere is hollowed out in place, its
parameters set to None, so that a checkpoint has the same names in every layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ascend_core import _shim
from ascend_core.errors import ConfigError, ModelError, nearest
from ascend_core.parallel.hugging_face import planned_list
from ascend_core.parallel.pipeline_hook import Configured, configured


@dataclass(frozen=True)
class BlockList:
    """Where the blocks of a model are.

    Attributes:
        list_name: Name of the list module, or of the hook that listed the blocks.
        names: Name of each block, in order.
        boundary: Name of the module whose call is pipelined ("" is the root), or None when the blocks are run by
            code that is no module's ``forward`` (for example directly by a training step).
        split_points: Indices of the blocks that begin stages 1, 2, ..., or None to deal them.
    """

    list_name: str
    names: tuple[str, ...]
    boundary: str | None
    split_points: tuple[int, ...] | None = None

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.names)


def find_blocks(root: nn.Module, pipeline_module: str = "auto", *, root_is_boundary: bool = False) -> BlockList:
    """Find the block list of a model.

    A ``configure_pipeline()`` hook says it, or a Hugging Face model's ``base_model_pp_plan``. Otherwise, of all lists
    (ModuleList, Sequential, ModuleDict) that hold at least half of the parameters, the one with the most elements wins;
    without such a list, the one with the most parameters.

    Args:
        root: The model, or a module that holds it.
        pipeline_module: Name of the module whose call is pipelined, or ``"auto"``.
        root_is_boundary: ``"auto"`` means the root itself, not one of its children.

    Returns:
        The blocks.

    Raises:
        ConfigError: ``pipeline_module`` names nothing, or a hook returned something else than blocks.
        ModelError: There is no list of blocks.
    """
    scope, prefix = root, ""
    if pipeline_module != "auto":
        modules = dict(root.named_modules())
        if pipeline_module not in modules:
            raise ConfigError(
                f"pipeline_module={pipeline_module!r} is not a module of {type(root).__name__}.",
                "",
                nearest(pipeline_module, [n for n, _ in root.named_children()]),
            )
        scope, prefix = modules[pipeline_module], pipeline_module
    hooked = configured(root, prefix)
    if hooked is not None:
        boundary = (
            hooked.boundary if hooked.boundary is not None else _hooked_boundary(hooked, pipeline_module, root_is_boundary)
        )
        return BlockList(hooked.label, hooked.names, boundary, hooked.split_points)
    planned = planned_list(scope, prefix)
    candidates = []
    for name, module in scope.named_modules(prefix=prefix):
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) and len(module) > 0:
            size = _numel(module.parameters())
            if size:
                candidates.append((size, len(module), name, module))
    if not candidates:
        raise ModelError(
            f"{type(scope).__name__} has no list of blocks to split into stages.",
            "A pipeline needs an nn.ModuleList, nn.Sequential or nn.ModuleDict whose elements are run in order.",
            "Put the layers into one, define configure_pipeline(), or use pipeline_parallel_size=1.",
        )
    half = _numel(scope.parameters()) / 2
    large = [c for c in candidates if c[0] >= half]
    named = [c for c in candidates if c[2] == planned]
    _, _, list_name, module = max(named or large, key=lambda c: (c[1], c[0]), default=max(candidates, key=lambda c: c[0]))
    names = tuple(f"{list_name}.{child}" if list_name else child for child, _ in module.named_children())
    return BlockList(list_name, names, _boundary(list_name, module, pipeline_module, root_is_boundary))


def _boundary(list_name: str, module: nn.Module, pipeline_module: str, root_is_boundary: bool) -> str | None:
    if pipeline_module != "auto":
        return pipeline_module
    if root_is_boundary:
        return ""
    head, _, rest = list_name.partition(".")
    if rest or isinstance(module, nn.Sequential):
        return head
    return None


def _hooked_boundary(hooked: Configured, pipeline_module: str, root_is_boundary: bool) -> str | None:
    """The module that hook or user name, the root, the one that defines the hook, or the child that holds all blocks."""
    if hooked.boundary is not None:
        return hooked.boundary
    if pipeline_module != "auto":
        return pipeline_module
    if root_is_boundary:
        return ""
    heads = {name.partition(".")[::2] for name in hooked.names}
    first = {head for head, _ in heads}
    if hooked.holder:
        return hooked.holder
    return first.pop() if len(first) == 1 and all(rest for _, rest in heads) else None


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def deal(blocks: BlockList, num_stages: int) -> list[tuple[int, int]]:
    """Give each stage a run of blocks, as equal in number as possible.

    Args:
        blocks: The blocks.
        num_stages: Stages over all ranks.

    Returns:
        ``(first, one past last)`` per stage.

    Raises:
        ConfigError: There are more stages than blocks.
    """
    n = len(blocks)
    if blocks.split_points is not None:
        return _dealt(blocks, blocks.split_points, num_stages)
    if num_stages > n:
        raise ConfigError(
            f"{num_stages} pipeline stages, but {blocks.list_name or 'the model'} has {n} blocks.",
            f"Each stage needs a block; the most stages this model allows is {n}: {', '.join(blocks.names)}.",
            f"Set pipeline_parallel_size to at most {n} (or 'auto'), or lower stages_per_rank.",
        )
    return equal_cut(n, num_stages)


def equal_cut(num_blocks: int, num_stages: int) -> list[tuple[int, int]]:
    """``(first, one past last)`` block of every stage, numbers as equal as possible."""
    return [(num_blocks * s // num_stages, num_blocks * (s + 1) // num_stages) for s in range(num_stages)]


def _dealt(blocks: BlockList, points: tuple[int, ...], num_stages: int) -> list[tuple[int, int]]:
    if len(points) + 1 != num_stages:
        raise ConfigError(
            f"{blocks.list_name} gives {len(points)} split points, for {len(points) + 1} stages, but there are {num_stages}.",
            "Stages are pipeline_parallel_size x stages_per_rank; each but the first begins at a split point.",
            f"Give {num_stages - 1} split points, or leave them out to have the blocks dealt.",
        )
    starts = (0, *points)
    return list(zip(starts, (*points, len(blocks)), strict=True))


def hollow(drop: list[nn.Module], root: nn.Module) -> None:
    """Drop modules' parameters and buffers in place, keeping the modules and their names.

    What the rest of the model still uses stays: tied weights, and modules or buffers that several blocks share.

    Args:
        drop: The modules to empty.
        root: The model they belong to.
    """
    kept = _reachable(root, {id(m) for m in drop})
    used = {id(t) for m in kept.values() for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
    for module in drop:
        for child in module.modules():
            if id(child) in kept:
                continue
            own = (
                *child.named_parameters(recurse=False, remove_duplicate=False),
                *child.named_buffers(recurse=False, remove_duplicate=False),
            )
            for name, tensor in own:
                if id(tensor) not in used:
                    setattr(child, name, None)


def move(root: nn.Module, device: torch.device) -> None:
    """Move a pruned model to a device, metrics and everything else that moves with its modules included.

    torch_npu's ``to()`` also sets the formats of weights, and fails on a batch norm or convolution whose weight is None,
    as it is in a hollow one; this leaves formats alone.

    Args:
        root: The model.
        device: Where to.
    """
    _shim.apply_to_tensors(root, lambda t: t.to(device))


def _reachable(module: nn.Module, without: set[int], found: dict[int, nn.Module] | None = None) -> dict[int, nn.Module]:
    """All modules that can be reached without passing through the excluded ones, by ``id()``."""
    found = {} if found is None else found
    if id(module) not in without and id(module) not in found:
        found[id(module)] = module
        for child in module.children():
            _reachable(child, without, found)
    return found


def prune(root: nn.Module, blocks: BlockList, local: set[int], is_first: bool, is_last: bool) -> None:
    """Drop everything that this pipeline rank does not need.

    Blocks of other ranks are hollowed. Inside the boundary, modules registered after the blocks stay on the last
    stage only, and embeddings registered before them on the first only (a stub that returns NaN stands in, so that a
    hidden use of their output cannot go unnoticed). Everything else stays on every rank; its gradients are summed.

    Args:
        root: The whole model, materialised.
        blocks: Its blocks.
        local: Indices of the blocks this rank owns.
        is_first: This rank owns the first stage.
        is_last: This rank owns the last stage.
    """
    modules = dict(root.named_modules())
    drop = [modules[name] for i, name in enumerate(blocks.names) if i not in local]
    stubs: list[tuple[nn.Module, _EmbeddingStub]] = []
    if blocks.boundary is not None:
        before, after = around(modules[blocks.boundary], blocks, modules)
        if not is_last:
            dropped = [m for m in after if any(True for _ in m.parameters())]
            for module in dropped:
                module.forward = _Dropped(module)  # type: ignore[method-assign]
            drop += dropped
        if not is_first:
            embeddings = [m for top in before for m in top.modules() if isinstance(m, nn.Embedding)]
            stubs = [(m, _EmbeddingStub(m)) for m in embeddings]
            drop += embeddings
    hollow(drop, root)
    for embedding, stub in stubs:
        embedding.forward = stub  # type: ignore[method-assign]


def around(boundary: nn.Module, blocks: BlockList, modules: dict[str, nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Modules registered before the first block, and after the last; those between blocks are in neither."""
    inside = {id(modules[name]) for name in blocks.names}
    holders: set[int] = set()
    for name in blocks.names:
        while name:
            name = name.rpartition(".")[0]
            holders.add(id(modules[name]))
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    seen: set[int] = set()

    def walk(here: nn.Module) -> None:
        for child in here.children():
            if id(child) in inside:
                seen.add(id(child))
            elif id(child) in holders:
                walk(child)
            elif not seen:
                before.append(child)
            elif len(seen) == len(inside):
                after.append(child)

    walk(boundary)
    return before, after


class _EmbeddingStub:
    """Stands in for an embedding of another stage: right shape, all NaN."""

    def __init__(self, embedding: nn.Embedding) -> None:
        self.embedding_dim = embedding.embedding_dim
        self.dtype = embedding.weight.dtype

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        shape = (*indices.shape, self.embedding_dim)
        return torch.full(shape, float("nan"), dtype=self.dtype, device=indices.device)


class _Dropped:
    """Stands in for a module that lives on the last stage; calling it is an error, never a wrong value."""

    def __init__(self, module: nn.Module) -> None:
        self.kind = type(module).__name__

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        raise ModelError(
            f"A {self.kind} that is registered after the blocks was called before them.",
            "Modules registered after the blocks live on the last pipeline stage only.",
            "Create it in __init__ before the blocks, so that every stage keeps it.",
        )


def stand_in(module: nn.Module) -> object | None:
    """What :func:`prune` put in the place of a module's forward, or None."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, (_EmbeddingStub, _Dropped)) else None
