"""Casts of type and of memory format.

The emulated memory has no internal formats: every tensor is plain (ND). torch_npu itself gives plain tensors instead of
internal formats unless ``torch.npu.config.allow_internal_format`` is set; then a cast to one is refused here.
"""

from __future__ import annotations

import torch

from ascend_emulator.fused.registry import DOCS, SOURCE, formula
from ascend_emulator.fused.scalar_types import type_of

_PLAIN = {-1: "UNDEFINED", 0: "NCHW", 2: "ND", 30: "NCDHW", 35: "NC", 47: "NCL"}


@formula(
    "npu_dtype_cast",
    source=DOCS,
    checked="Tensor.to",
    backward="npu_dtype_cast_backward",
    refused="input_dtype",
    any_type=True,
)
def dtype_cast(input: torch.Tensor, dtype: int) -> torch.Tensor:
    """A copy in another type."""
    return input.to(type_of(dtype))


@formula("_npu_dtype_cast", source=SOURCE, checked="Tensor.to", backward="_npu_dtype_cast_backward", any_type=True)
def plain_dtype_cast(input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in another type."""
    return input.to(dtype)


@formula(
    "npu_dtype_cast_backward", source=SOURCE, checked="Tensor.to", ignored="grad_dtype", refused="input_dtype", any_type=True
)
def dtype_cast_backward(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient in the input's type."""
    return grad.to(dtype)


@formula("_npu_dtype_cast_backward", source=SOURCE, checked="Tensor.to", any_type=True)
def plain_dtype_cast_backward(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient in the input's type."""
    return grad.to(dtype)


def _check_format(acl_format: int, device: torch.device) -> None:
    if acl_format in _PLAIN:
        return
    probe = torch.ops.npu.empty_with_format([16, 16], dtype=torch.float16, device=device, acl_format=acl_format)
    if int(torch.ops.npu.get_npu_format(probe)) == acl_format:
        raise NotImplementedError(
            f"the emulator has no memory format {acl_format}: its memory is plain (ND)\n"
            "Do: leave torch.npu.config.allow_internal_format off; torch_npu then keeps tensors plain by itself."
        )


@formula("_npu_format_cast", source=DOCS, checked="the same values, format ND", any_type=True, wants_device=True)
def format_cast(input: torch.Tensor, acl_format: int, device: torch.device) -> torch.Tensor:
    """A copy; a format that is not plain is refused if torch_npu would use it. Its derivative is the identity."""
    _check_format(acl_format, device)
    return input


@formula(
    "npu_format_cast_.acl_format",
    source=DOCS,
    checked="the same values",
    refused="customize_dtype input_dtype",
    any_type=True,
    wants_device=True,
)
def format_cast_(input: torch.Tensor, acl_format: int, device: torch.device) -> torch.Tensor:
    """The tensor itself; a format that is not plain is refused if torch_npu would use it."""
    _check_format(acl_format, device)
    return input


@formula(
    "npu_format_cast_",
    source=DOCS,
    checked="the same values",
    ignored="src",
    refused="customize_dtype input_dtype",
    any_type=True,
)
def format_cast_like(input: torch.Tensor) -> torch.Tensor:
    """The tensor itself: it and the model tensor are both plain."""
    return input
