"""Matrix products: linear and batched."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ascend_emulator.fused.precision import maybe_wide, wide
from ascend_emulator.fused.registry import DOCS, SOURCE, formula
from ascend_emulator.fused.vjp import vjp


@formula("npu_linear", source=DOCS, checked="F.linear", backward="npu_linear_backward")
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``input @ weight.T + bias``."""
    return F.linear(wide(input), wide(weight), maybe_wide(bias)).to(input.dtype)


@formula("npu_linear_backward", source=SOURCE, checked="autograd of F.linear")
def linear_backward(grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by the input and the weight; torch_npu gives the bias the gradient itself."""
    dinput, dweight = vjp(F.linear, [input, weight], grad)
    return dinput, dweight


@formula("npu_bmmV2", source=DOCS, checked="torch.matmul", backward=("npu_bmm_v2_mat1_backward", "npu_bmm_v2_mat2_backward"))
def bmm_v2(input: torch.Tensor, mat2: torch.Tensor, output_sizes: list[int]) -> torch.Tensor:
    """Batched product with broadcasting; sizes given for the output sum the batches that are 1 there."""
    product = torch.matmul(wide(input), wide(mat2))
    return (product.sum_to_size(output_sizes) if output_sizes else product).to(input.dtype)


def _bmm_gradients(grad: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> list[torch.Tensor]:
    return vjp(lambda a, b: torch.matmul(a, b), [mat1, mat2], grad.expand(torch.matmul(mat1, mat2).shape))


@formula("npu_bmm_v2_mat1_backward", source=SOURCE, checked="autograd of torch.matmul", ignored="size")
def bmm_v2_mat1_backward(grad: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """Gradient by the left factor."""
    return _bmm_gradients(grad, mat1, mat2)[0]


@formula("npu_bmm_v2_mat2_backward", source=SOURCE, checked="autograd of torch.matmul", ignored="size")
def bmm_v2_mat2_backward(grad: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """Gradient by the right factor."""
    return _bmm_gradients(grad, mat1, mat2)[1]
