"""Compare an operator on the emulated NPU, forward and gradient, with plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

try:
    import torch_npu
except ImportError:
    torch_npu = None  # in the tests' own process, which only names these functions

__all__ = ["BF16", "differences", "error_of", "here", "randn", "torch_npu", "wrong_cases"]

BF16 = {"atol": 2e-2, "rtol": 2e-2}
"""For bfloat16: 8 bits of mantissa, so one rounding is up to 2^-8 of the value; gradients are rounded twice."""


def here() -> torch.device:
    return torch.device("npu", torch.npu.current_device())


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]


def differences(
    on_npu: Callable[..., Any],
    on_cpu: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    *,
    gradient: bool = True,
    atol: float = 1e-5,
    rtol: float = 1e-5,
) -> list[str]:
    """What differs between the two functions of the same inputs: results, and gradients of a weighted sum of them.

    The CPU function gets float32 inputs, and its results are compared as float32.
    """
    theirs = [t.detach().float().requires_grad_(gradient) for t in inputs]
    ours = [t.detach().to(here()).requires_grad_(gradient) for t in inputs]
    wanted, got = _tensors(on_cpu(*theirs)), _tensors(on_npu(*ours))
    wrong = []
    if len(wanted) != len(got):
        return [f"{len(got)} results instead of {len(wanted)}"]
    for i, (g, w) in enumerate(zip(got, wanted, strict=True)):
        if g.device != here():
            wrong.append(f"result {i} is on {g.device}")
        if g.shape != w.shape or not torch.allclose(g.detach().cpu().float(), w.detach(), atol=atol, rtol=rtol):
            wrong.append(f"result {i}: {tuple(g.shape)} {_gap(g, w)}")
    if gradient:
        pairs = [(g, w) for g, w in zip(got, wanted, strict=True) if w.requires_grad and g.requires_grad]
        weights = [randn(*w.shape, seed=7 + i) if w.dim() else torch.tensor(0.7) for i, (_, w) in enumerate(pairs)]
        sum((w * x).sum() for x, (_, w) in zip(weights, pairs, strict=True)).backward()
        sum((g * x.to(here(), g.dtype)).sum() for x, (g, _) in zip(weights, pairs, strict=True)).backward()
        for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if our.grad is None or their.grad is None:
                wrong.append(f"gradient {i}: ours {our.grad is not None}, theirs {their.grad is not None}")
            elif our.grad.dtype != our.dtype or not torch.allclose(our.grad.cpu().float(), their.grad, atol=atol, rtol=rtol):
                wrong.append(f"gradient {i}: {_gap(our.grad, their.grad)}")
    return wrong


def _gap(got: torch.Tensor, wanted: torch.Tensor) -> str:
    if got.shape != wanted.shape:
        return f"instead of {tuple(wanted.shape)}"
    return f"off by {float((got.detach().cpu().float() - wanted.detach()).abs().max()):.2e}"


def error_of(call: Callable[[], Any]) -> str:
    """Type and first words of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def wrong_cases(cases: dict[str, list[str]]) -> list[str]:
    return [f"{name}: {text}" for name, texts in cases.items() for text in texts]
