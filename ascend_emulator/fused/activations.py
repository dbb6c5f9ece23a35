"""Activations: GELU variants, SiLU, Mish, and gated units."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ascend_emulator.fused.precision import wide
from ascend_emulator.fused.registry import DOCS, OP_TEST, SOURCE, TRAINING, formula
from ascend_emulator.fused.vjp import vjp


def _fast_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


@formula("npu_fast_gelu", "fast_gelu", source=OP_TEST, checked="x * sigmoid(1.702 x)", backward="npu_fast_gelu_backward")
def fast_gelu(input: torch.Tensor) -> torch.Tensor:
    """The sigmoid approximation of GELU, as torch_npu's own test computes it."""
    return _fast_gelu(wide(input)).to(input.dtype)


@formula("npu_fast_gelu_backward", source=SOURCE, checked="autograd of npu_fast_gelu")
def fast_gelu_backward(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Gradient of :func:`fast_gelu`."""
    return vjp(_fast_gelu, [input], grad)[0]


@formula("npu_gelu", source=DOCS, checked="F.gelu", backward="npu_gelu_backward")
def gelu(input: torch.Tensor, approximate: str) -> torch.Tensor:
    """GELU, ``approximate`` as in torch."""
    return F.gelu(wide(input), approximate=approximate).to(input.dtype)


@formula("npu_gelu_backward", source=SOURCE, checked="autograd of F.gelu")
def gelu_backward(grad_output: torch.Tensor, input: torch.Tensor, approximate: str) -> torch.Tensor:
    """Gradient of :func:`gelu`."""
    return vjp(lambda x: F.gelu(x, approximate=approximate), [input], grad_output)[0]


@formula("npu_silu", source=DOCS, checked="F.silu", backward="npu_silu_backward")
def silu(input: torch.Tensor) -> torch.Tensor:
    """SiLU."""
    return F.silu(wide(input)).to(input.dtype)


@formula("npu_silu_", source=SOURCE, checked="F.silu")
def silu_(input: torch.Tensor) -> torch.Tensor:
    """SiLU in place."""
    return input.copy_(silu(input))


@formula("npu_silu_backward", source=SOURCE, checked="autograd of F.silu", ignored="x1")
def silu_backward(grad_output: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
    """Gradient of :func:`silu` by its input ``x0``; the result ``x1`` is not needed."""
    return vjp(F.silu, [x0], grad_output)[0]


@formula("npu_mish", source=DOCS, checked="F.mish", backward="npu_mish_backward")
def mish(input: torch.Tensor) -> torch.Tensor:
    """Mish."""
    return F.mish(wide(input)).to(input.dtype)


@formula("npu_mish_backward", source=SOURCE, checked="autograd of F.mish")
def mish_backward(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Gradient of :func:`mish`."""
    return vjp(F.mish, [input], grad)[0]


def _halves(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    if x.size(dim) % 2:
        raise RuntimeError(f"dimension {dim} has odd size {x.size(dim)}; a gated unit needs two halves")
    first, second = x.chunk(2, dim)
    return first, second


def _swiglu(x: torch.Tensor, dim: int) -> torch.Tensor:
    gate, value = _halves(x, dim)
    return F.silu(gate) * value


@formula("npu_swiglu", source=TRAINING, checked="F.silu(first half) * second half", backward="npu_swiglu_backward")
def swiglu(input: torch.Tensor, dim: int) -> torch.Tensor:
    """SwiGLU: SiLU of the first half times the second half, as Llama's gate and up projection are packed.

    Which half is the gate is taken from public training code for NPUs; the API documentation does not describe the operator.
    """
    return _swiglu(wide(input), dim).to(input.dtype)


@formula("npu_swiglu_backward", source=SOURCE, checked="autograd of npu_swiglu")
def swiglu_backward(grad_output: torch.Tensor, input: torch.Tensor, dim: int) -> torch.Tensor:
    """Gradient of :func:`swiglu`."""
    return vjp(lambda x: _swiglu(x, dim), [input], grad_output)[0]


def _geglu(x: torch.Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = _halves(x, dim)
    gated, value = (left, right) if activate_left else (right, left)
    activated = F.gelu(gated, approximate="tanh" if approximate else "none")
    return value * activated, activated


@formula("npu_geglu", source=OP_TEST, checked="F.gelu(right half) * left half", backward="npu_geglu_grad")
def geglu(input: torch.Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """GeGLU and the activated half; ``approximate`` 1 is the tanh form, 0 the exact one."""
    y, activated = _geglu(wide(input), dim, approximate, activate_left)
    return y.to(input.dtype), activated.to(input.dtype)


@formula("npu_geglu_grad", source=SOURCE, checked="autograd of npu_geglu", ignored="gelu")
def geglu_grad(grad_output: torch.Tensor, input: torch.Tensor, dim: int, approximate: int, activate_left: bool) -> torch.Tensor:
    """Gradient of :func:`geglu`; the activated half is computed again."""
    return vjp(lambda x: _geglu(x, dim, approximate, activate_left)[0], [input], grad_output)[0]
