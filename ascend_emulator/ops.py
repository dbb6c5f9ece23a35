"""Install the operator layer: every aten operator that a CPU kernel can do, for the NPU's dispatch key."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ascend_emulator import _torch, sync_batch_norm
from ascend_emulator.fast import fast_layer
from ascend_emulator.kernels import SPECIAL, Kernel

_TORCH_NPU_OWN = frozenset(
    "empty.memory_format empty_strided as_strided view _reshape_alias set_.source_Storage set_.source_Storage_storage_offset "
    "set_ set_.source_Tensor resize_ detach alias unfold record_stream is_pinned _pin_memory pin_memory is_set_to "
    "view_as_real view_as_complex unsafe_split split expand _local_scalar_dense transpose t slice select unsqueeze squeeze "
    "permute lift lift_fresh empty_with_format _to_copy".split()
)
"""Memory and views: torch_npu's own code does these right, without launching a kernel."""

_DIRECT = frozenset(["conj_physical_"])
"""Composed operators that start a kernel of the CPU by themselves, so that what they are composed of does not help."""

_library: list[torch.library.Library] = []
_layers: dict[str, str] = {}


def layers() -> dict[str, str]:
    """Which layer serves each operator: ``cpp``, ``python``, or ``decomposed`` into the operators it is made of."""
    return dict(_layers)


def install() -> None:
    """Register kernels for all operators; does nothing the second time.

    Raises:
        EmulatorError: ``ASCEND_EMULATOR_OPS`` is neither ``cpp`` nor ``python``, or is ``cpp`` without a C++ compiler.
    """
    if _library:
        return
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    fast = fast_layer()
    simple: dict[str, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # replacing torch_npu's kernels is the point
        for name in sorted(_torch.operator_names()):
            namespace, _, qualified = name.partition("::")
            if namespace == "aten" and qualified not in _TORCH_NPU_OWN:
                _install_one(library, name, qualified, simple if fast else None)
        sync_batch_norm.install(library)
        if fast:
            fast("aten", simple)


def _install_one(library: torch.library.Library, name: str, qualified: str, simple: dict[str, int] | None) -> None:
    base, _, overload = qualified.partition(".")
    try:
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
    except AttributeError:
        return  # known to the dispatcher, but not callable from Python
    if torch.Tag.inplace_view in op.tags or any(r.alias_info and not r.alias_info.is_write for r in _torch.schema(op).returns):
        return  # changes or shares metadata only: torch_npu's own
    has = _torch.has_kernel
    own_autograd = has(name, "Autograd")
    if has(name, "CompositeImplicitAutograd") and not (own_autograd and has(name, "CPU")):
        overridden = [k for k in ("AutogradPrivateUse1", "PrivateUse1") if has(name, k)]
        for key in ("AutogradPrivateUse1", "PrivateUse1") if overridden else ():
            library.impl(qualified, _decompose(op), key, allow_override=True)
            _layers[qualified] = "decomposed"
        return
    explicit = has(name, "CompositeExplicitAutograd") or has(name, "CompositeExplicitAutogradNonFunctional")
    if not has(name, "CPU") and not (explicit and (has(name, "PrivateUse1") or qualified in _DIRECT)):
        return
    kernel = SPECIAL.get(qualified, Kernel)(op)
    if simple is not None and kernel.simple:
        simple[qualified] = kernel.flags
        _layers[qualified] = "cpp"
    else:
        library.impl(qualified, kernel, "PrivateUse1", allow_override=True)
        _layers[qualified] = "python"
    if own_autograd and has(name, "AutogradPrivateUse1"):
        library.impl(qualified, _torchs_autograd(op), "AutogradPrivateUse1", allow_override=True)


def _torchs_autograd(op: Any) -> Any:
    """torch_npu's own derivative starts NPU kernels by itself; torch's is made of operators."""

    def differentiable(*args: Any, **kwargs: Any) -> Any:
        return _torch.torchs_autograd(op, *args, **kwargs)

    return differentiable


def _decompose(op: Any) -> Any:
    """torch_npu has a fused kernel here; without NPU kernels the operator is what it is made of."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        return _torch.composite(op, *args, **kwargs)

    return decomposed
