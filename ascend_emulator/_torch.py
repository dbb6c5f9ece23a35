"""The one file that names private things of torch. Each row: what, why, upstream, and when it can go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map  # noqa: F401 - for the kernels


@dataclass(frozen=True)
class Row:
    """One private name we depend on.

    Attributes:
        name: Dotted path.
        why: What it is needed for.
        upstream: Where it is defined.
        remove_when: The event that makes the row unnecessary.
    """

    name: str
    why: str
    upstream: str
    remove_when: str


ROWS: tuple[Row, ...] = (
    Row(
        "torch._C._construct_storage_from_data_pointer",
        "A CPU tensor over device memory.",
        "torch/csrc/Module.cpp",
        "torch has a public zero-copy view over a pointer for any device",
    ),
    Row("torch._neg_view", "Keeps the negative bit of a view.", "ATen native_functions.yaml", "never needed if views carry it"),
    Row(
        "torch._C._dispatch_get_all_op_names",
        "The list of operators to cover.",
        "torch/csrc/utils/python_dispatch.cpp",
        "torch lists operators publicly",
    ),
    Row(
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "Which operators have a CPU kernel, and which torch_npu overrides.",
        "torch/csrc/utils/python_dispatch.cpp",
        "torch.library answers that publicly",
    ),
    Row(
        "torch.ops.aten.add.Tensor._schema",
        "Which arguments an operator writes to or returns.",
        "torch/_ops.py",
        "OpOverload exposes its schema publicly",
    ),
    Row(
        "torch._C._should_allow_numbers_as_tensors",
        "Numbers that torch had turned into tensors reach Python as numbers; not every overload takes them back.",
        "torch/csrc/autograd/init.cpp",
        "Python kernels receive such tensors as tensors",
    ),
    Row(
        "torch.ops.aten.add.Tensor._op_dk",
        "torch's derivative or composition of an operator for which torch_npu registers its own. OpOverload.decompose() "
        "prefers compositions in Python, which are made for tracing and choose other products.",
        "torch/_ops.py",
        "an operator can be called with the kernel of another dispatch key publicly",
    ),
    Row(
        "torch.utils._pytree.tree_map",
        "Arguments nest tensors in lists.",
        "torch/utils/_pytree.py",
        "torch has a public pytree",
    ),
    Row(
        "torch._C._ForceDispatchKeyGuard",
        "Autograd on the CPU inside a kernel, which runs below autograd.",
        "torch/csrc/utils/python_dispatch.cpp",
        "torch has a public way to differentiate inside a kernel",
    ),
    Row(
        "torch._C._dispatch_tls_local_exclude_set",
        "The dispatch keys that a kernel runs without.",
        "torch/csrc/utils/python_dispatch.cpp",
        "torch has a public way to differentiate inside a kernel",
    ),
    Row(
        "torch._C._dispatch_tls_local_include_set",
        "The dispatch keys that a kernel runs with in addition.",
        "torch/csrc/utils/python_dispatch.cpp",
        "torch has a public way to differentiate inside a kernel",
    ),
    Row(
        "torch._C._dispatch_keyset_full_after",
        "To go on to torch_npu's own kernel from a kernel that explains its errors.",
        "torch/csrc/utils/python_dispatch.cpp",
        "torch has a public way to call the next kernel",
    ),
)

operator_names = torch._C._dispatch_get_all_op_names
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
neg_view = torch._neg_view
takes_numbers = torch._C._should_allow_numbers_as_tensors


def schema(op: Any) -> Any:
    """The schema of an operator overload."""
    return op._schema


def torchs_autograd(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator overload through torch's own autograd kernel; what it calls goes where its tensors are."""
    return op._op_dk(torch._C.DispatchKey.Autograd, *args, **kwargs)


def composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator overload as the operators that torch composes it of."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def storage_at(address: int, device: torch.device, nbytes: int) -> Any:
    """A storage over memory that something else owns."""
    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


@contextmanager
def autograd_inside_kernel() -> Iterator[None]:
    """Let operators on CPU tensors record gradients, though the caller runs below autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradOther, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def next_kernel(op: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Go on from a kernel for the key ``BackendSelect`` to the one of the device."""
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    return op.redispatch(keys & after, *args, **kwargs)
