"""The one file that names private things of torch. Each row: what, why, upstream, and when it can go.

Other modules import the accessors below; a test checks that every row still exists and is still needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils import _pytree as pytree  # noqa: F401 - for the other modules


@dataclass(frozen=True)
class Row:
    """One private name we depend on.

    Attributes:
        name: Dotted path.
        why: What it is needed for.
        upstream: Where the need is discussed or the name is defined.
        remove_when: The event that makes the row unnecessary.
    """

    name: str
    why: str
    upstream: str
    remove_when: str


ROWS: tuple[Row, ...] = (
    Row(
        "torch.nn.Module._call_impl",
        "A pipeline stage must step over a block without running its hooks; an instance attribute of this name does.",
        "torch/nn/modules/module.py, Module._wrapped_call_impl",
        "torch offers a hook that may skip a module's call",
    ),
    Row(
        "torch.nn.Module._apply",
        "A pruned model is moved without torch_npu's own to(), which fails on modules that hold nothing.",
        "torch_npu/utils/_module.py, cast_weight",
        "torch_npu's cast_weight passes over weights that are None",
    ),
    Row(
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback",
        "Gradients of a stage are reduced once, after its last microbatch, not by a backward pass.",
        "torch/distributed/pipelining/stage.py, perform_reduce_grad",
        "FSDP2 offers a public 'reduce the accumulated gradients now'",
    ),
    Row(
        "torch.distributed.tensor.placement_types._StridedShard",
        "A shard of a shard (FSDP2 over tensor parallel) is summed over its axis in a norm like any other shard.",
        "torch/distributed/tensor/placement_types.py",
        "_StridedShard becomes public or a subclass of Shard",
    ),
    Row(
        "torch.distributed.tensor.debug._clear_sharding_prop_cache",
        "What DTensor has cached for an equal mesh of before refers to process groups that are gone.",
        "torch/distributed/tensor/_sharding_prop.py; the cache is keyed by ranks and names of a mesh, not by its groups",
        "DTensor's caches follow the process groups",
    ),
    Row(
        "torch.Tensor._is_view",
        "A stage's output is detached in place by torch's split backward, which views do not allow.",
        "torch/distributed/pipelining/_backward.py, stage_backward_input",
        "torch copies it itself, or does not detach it",
    ),
    Row(
        "torch._C._current_graph_task_id",
        "A forward that a backward runs again (activation checkpointing) must not put its load-balance loss up a second time.",
        "torch/utils/checkpoint.py, which asks the same",
        "torch has a public way to ask whether a backward is running",
    ),
    Row(
        "torch.utils._pytree.tree_flatten",
        "Outputs of a stage may be any nesting of tensors, and must be sent to other ranks.",
        "torch/utils/_pytree.py",
        "torch has a public pytree module (2.13 has none)",
    ),
)


_REPLACED = "_ascend_replaced_class"


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply a function to all parameters, buffers and whatever else a module moves with them."""
    module._apply(function)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of another in autograd's sense."""
    return bool(tensor._is_view())


def inside_backward() -> bool:
    """Whether the calling code is run by a backward pass."""
    return int(torch._C._current_graph_task_id()) != -1


def override_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make ``module(...)`` run ``call(...)`` instead, before any hook of the module.

    A class with a ``__call__`` of its own (which may checkpoint activations around the call) gets a subclass, so that
    ``call`` is outside of it.
    """
    kind = type(module)
    if kind.__call__ is nn.Module.__call__:
        module.__dict__["_call_impl"] = call
    else:
        own = {"__call__": lambda self, *args, **kwargs: call(*args, **kwargs), _REPLACED: kind, "__module__": kind.__module__}
        module.__class__ = type(kind.__name__, (kind,), own)


def original_call(module: nn.Module) -> Callable[..., Any]:
    """Return the call that :func:`override_call` replaced, hooks included."""
    kind = type(module)
    own = kind._call_impl if kind.__call__ is nn.Module.__call__ else kind.__call__
    return own.__get__(module)


def restore_call(module: nn.Module) -> None:
    """Undo :func:`override_call`; a no-op when there is nothing to undo."""
    module.__dict__.pop("_call_impl", None)
    module.__class__ = type(module).__dict__.get(_REPLACED, type(module))


@contextmanager
def replaced_call(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Within the context ``module(...)`` runs ``call(...)``, also where the call was overridden already."""
    kind, before = type(module), module.__dict__.get("_call_impl")
    override_call(module, call)
    try:
        yield
    finally:
        module.__dict__.pop("_call_impl", None)
        module.__class__ = kind
        if before is not None:
            module.__dict__["_call_impl"] = before


def reduce_accumulated_gradients(modules: Iterable[nn.Module]) -> None:
    """Reduce what FSDP2 has accumulated without synchronisation.

    Args:
        modules: Modules on which ``fully_shard`` was called and whose backward passes ran with
            ``set_requires_gradient_sync(False)``.

    Communication:
        One reduce-scatter per module over its shard axis, and an all-reduce over its replicate axis if there is one.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            continue
        module.set_is_last_backward(True)
        module.set_reshard_after_backward(True)
        module.set_requires_gradient_sync(True)
        state = fully_shard.state(module)  # type: ignore[attr-defined]
        for group in state._fsdp_param_groups:
            group.post_backward()
        state._root_post_backward_final_callback()
        defer_gradient_reduction(module)


def defer_gradient_reduction(module: FSDPModule) -> None:
    """Make backward passes of an FSDP2 module accumulate whole gradients until they are reduced by hand."""
    module.set_is_last_backward(False)
    module.set_reshard_after_backward(False)
    module.set_requires_gradient_sync(False)


def forget_meshes() -> None:
    """Empty DTensor's caches, which may hold meshes of process groups that were destroyed."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def is_sharded(placement: torch.distributed.tensor.placement_types.Placement) -> bool:
    """Tell whether a placement gives each rank of its axis a different piece of the tensor."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return placement.is_shard() or isinstance(placement, _StridedShard)
