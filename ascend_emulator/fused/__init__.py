"""Reference formulas, forward and backward, for torch_npu's own operators (the namespace ``npu``).

They follow the public documentation of torch_npu; what could not be checked on an NPU is said in each docstring. They
say nothing about the numerics of NPU kernels. torch_npu's own derivative formulas stay in place and call the backward
operators that are registered here.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

MODULES = (
    "activations attention attention_v2 attention_v3 casts dropout grouped_matmul losses matmul moe_map moe_routing "
    "moe_tokens norms optimizers overflow rotary shapes sign_bits softmax"
).split()
"""Modules that define formulas."""

_library: list[Any] = []


def load() -> None:
    """Fill the table of formulas; needs no NPU."""
    for module in MODULES:
        importlib.import_module(f"{__name__}.{module}")


def install() -> None:
    """Register kernels for all ``npu::`` operators; does nothing the second time."""
    if _library:
        return
    import torch

    from ascend_emulator import _torch
    from ascend_emulator.fused.fallback import Fallback
    from ascend_emulator.fused.kernel import FusedKernel
    from ascend_emulator.fused.registry import FORMULAS

    load()
    library = torch.library.Library("npu", "IMPL")
    _library.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # replacing torch_npu's kernels is the point
        for name in sorted(_torch.operator_names()):
            namespace, _, qualified = name.partition("::")
            if namespace != "npu" or not _torch.has_kernel(name, "PrivateUse1"):
                continue
            base, _, overload = qualified.partition(".")
            op = getattr(getattr(torch.ops.npu, base), overload or "default")
            if qualified in FORMULAS:
                library.impl(qualified, FusedKernel(op, FORMULAS[qualified]), "PrivateUse1", allow_override=True)
            elif not _torch.has_kernel(name, "BackendSelect"):  # that of an operator in Python, without tensor arguments
                library.impl(qualified, Fallback(op, name), "BackendSelect", with_keyset=True)


importlib.import_module("torch")  # at the end: torch may import torch_npu, which calls install()
