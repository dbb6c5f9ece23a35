"""Operators that move elements without computing."""

from __future__ import annotations

import torch

from ascend_emulator.fused.registry import DOCS, SOURCE, formula


@formula(
    "npu_confusion_transpose",
    source=DOCS,
    checked="permute and reshape",
    backward="npu_confusion_transpose_backward",
    any_type=True,
)
def confusion_transpose(input: torch.Tensor, perm: list[int], shape: list[int], transpose_first: bool) -> torch.Tensor:
    """Permute, then reshape; or the other way round."""
    return input.permute(perm).reshape(shape) if transpose_first else input.reshape(shape).permute(perm)


@formula("npu_confusion_transpose_backward", source=SOURCE, checked="autograd of permute and reshape", any_type=True)
def confusion_transpose_backward(grad: torch.Tensor, perm: list[int], shape: list[int], transpose_first: bool) -> torch.Tensor:
    """The gradient in the input's shape; torch_npu passes the opposite of the forward's ``transpose_first``."""
    inverse = [perm.index(i) for i in range(len(perm))]
    if transpose_first:
        return grad.permute(inverse).reshape(shape)
    return grad.reshape([shape[p] for p in perm]).permute(inverse)


@formula("npu_transpose", source=DOCS, checked="permute", ignored="require_contiguous", any_type=True)
def transpose(input: torch.Tensor, perm: list[int]) -> torch.Tensor:
    """A permuted copy."""
    return input.permute(perm)


@formula("npu_transpose.out", source=DOCS, checked="permute", ignored="require_contiguous", any_type=True)
def transpose_out(input: torch.Tensor, perm: list[int], out: torch.Tensor) -> torch.Tensor:
    """A permuted copy, into a tensor of that shape."""
    permuted = input.permute(perm)
    if out.shape != permuted.shape:
        raise RuntimeError(f"npu_transpose: out has shape {tuple(out.shape)}, not {tuple(permuted.shape)}")
    return out.copy_(permuted)


@formula("one_", source=DOCS, checked="fill_(1)", any_type=True)
def one_(input: torch.Tensor) -> torch.Tensor:
    """Fills a tensor with ones."""
    return input.fill_(1)
