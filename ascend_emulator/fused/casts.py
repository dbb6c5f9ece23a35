"""Casts of type and of memory format.

The emulated memory has no internal formats: every tensor is plain. A cast to another format keeps the values, and the
result says that it is plain (NCHW for four dimensions, else ND), with a warning.
"""

from __future__ import annotations

import warnings

import torch

from ascend_emulator.fused.registry import DOCS, SOURCE, formula
from ascend_emulator.fused.scalar_types import type_of

_FORMATS = {
    -1: "UNDEFINED", 0: "NCHW", 1: "NHWC", 2: "ND", 3: "NC1HWC0", 4: "FRACTAL_Z", 12: "NC1HWC0_C04", 16: "HWCN", 27: "NDHWC",
    29: "FRACTAL_NZ", 30: "NCDHW", 32: "NDC1HWC0", 33: "FRACTAL_Z_3D", 35: "NC", 47: "NCL",
}  # fmt: skip
_PLAIN = ("UNDEFINED", "NCHW", "ND", "NCDHW", "NC", "NCL")


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


def _check_format(acl_format: int) -> None:
    if acl_format not in _FORMATS:
        raise RuntimeError(f"{acl_format} is not a memory format of torch_npu; it knows {sorted(_FORMATS)}")
    if _FORMATS[acl_format] not in _PLAIN:
        warnings.warn(
            f"the emulator's memory is plain: a cast to {_FORMATS[acl_format]} keeps the values and stays plain",
            stacklevel=2,
        )


@formula("_npu_format_cast", source=DOCS, checked="the same values, format as before", any_type=True)
def format_cast(input: torch.Tensor, acl_format: int) -> torch.Tensor:
    """A copy in plain memory, whatever format was asked for. Its derivative is the identity."""
    _check_format(acl_format)
    return input


@formula(
    "npu_format_cast_.acl_format",
    source=DOCS,
    checked="the same values",
    refused="customize_dtype input_dtype",
    any_type=True,
)
def format_cast_(input: torch.Tensor, acl_format: int) -> torch.Tensor:
    """The tensor itself, plain as before."""
    _check_format(acl_format)
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
