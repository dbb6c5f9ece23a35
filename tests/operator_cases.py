"""Rank functions about the operator layer: cases that were wrong once."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F


def _out(make: Any) -> tuple[Any, ...]:
    """What ``torch.mul(x, 2, out=...)`` does to a tensor, on the CPU and on the NPU."""
    seen = []
    for device in ("cpu", "npu"):
        given = make(device)
        before = given.data_ptr()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = torch.mul(torch.arange(6.0, device=device).view(2, 3), 2, out=given)
        moved = given.data_ptr() != before
        seen.append(
            (result is given, moved, given.stride(), given.tolist(), sum("was resized" in str(w.message) for w in caught))
        )
    return tuple(seen)


def out_tensors() -> dict[str, tuple[Any, ...]]:
    """``out=`` tensors that fit, grow, shrink or are strided: the same on both devices."""
    return {
        "fits": _out(lambda d: torch.empty(2, 3, device=d)),
        "strided": _out(lambda d: torch.zeros(4, 2, device=d)[1:].t()),
        "empty": _out(lambda d: torch.empty(0, device=d)),
        "shrinks": _out(lambda d: torch.empty(3, 3, device=d)),
        "part of a buffer": _out(lambda d: torch.empty(12, device=d)[3:9].view(2, 3)),
        "grows": _out(lambda d: torch.empty(1, 3, device=d)),
    }


def out_layout() -> dict[str, tuple[Any, Any]]:
    """Results whose layout the CPU kernel chooses: strides on the CPU and on the NPU."""
    strides = []
    for device in ("cpu", "npu"):
        a, b = torch.eye(4, device=device)[:, :3], torch.ones(4, 3, device=device)
        images = torch.ones(1, 3, 3, 2, device=device).permute(0, 3, 1, 2)  # channels last
        strides.append({
            "lstsq": torch.linalg.lstsq(a, b).solution.stride(),
            "qr": torch.linalg.qr(a).Q.stride(),
            "cat": torch.cat([images, images], out=torch.empty(0, device=device)).stride(),
        })  # fmt: skip
    return {name: (strides[0][name], strides[1][name]) for name in strides[0]}


def overlaps() -> dict[str, tuple[str, str]]:
    """Operands that overlap what is written: what the CPU and the NPU say."""

    def error(call: Any) -> str:
        try:
            return f"accepted: {call().tolist()}"
        except RuntimeError as refusal:
            return str(refusal).partition(".")[0]

    def cases(device: str) -> dict[str, Any]:
        x, none = torch.arange(6.0, device=device), torch.empty(0, device=device)
        return {
            "shifted in place": lambda: x[1:].add_(x[:-1]),
            "shifted out": lambda: torch.neg(x[1:], out=x[:-1]),
            "itself": lambda: torch.zeros(2, device=device).add_(1).mul_(2),
            "expanded": lambda: torch.zeros(1, device=device).expand(3).add_(1),
            "input that grows": lambda: torch.cat([x, none], out=none),
            "same tensor": lambda: torch.mul(x, x, out=x),
        }

    cpu, npu = cases("cpu"), cases("npu")
    return {name: (error(cpu[name]), error(npu[name])) for name in cpu}


def numbers() -> list[list[float]]:
    """A number where an operator's schema has a tensor."""
    x = torch.ones(2, device="npu")
    return [
        torch.copysign(x, -3.0).tolist(),
        torch.copysign(x, -3.0, out=torch.empty(2, device="npu")).tolist(),
        torch.mul(x, 2.0, out=torch.empty(2, device="npu")).tolist(),
        x.clone().copysign_(-1.0).tolist(),
    ]


def derivatives() -> list[str]:
    """Operators whose derivative torch_npu brings itself, or that torch makes of others: names of gradients that differ."""
    index = torch.tensor([[0, 1, 1], [2, 0, 1]])
    cases: dict[str, Any] = {
        "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
        "renorm": lambda x: x.renorm(2, 0, 0.5),
        "gather": lambda x: x.gather(1, index.to(x.device)),
        "silu": F.silu,
        "mish": F.mish,
        "rfft": lambda x: torch.view_as_real(torch.fft.rfft(x)),
        "sgn": torch.sgn,  # its gradient is a zero tensor without memory
    }
    wrong = []
    for name, function in cases.items():
        gradients = []
        for device in ("cpu", "npu"):
            x = torch.linspace(-1, 2, 6).view(2, 3).to(device).requires_grad_()
            function(x).square().sum().backward()
            assert x.grad is not None
            gradients.append(x.grad.cpu())
        if not torch.equal(*gradients):
            wrong.append(name)
    return wrong


def compositions() -> list[str]:
    """Operators that torch makes of others, and torch_npu of its own: names of results that differ in a bit."""
    cases: dict[str, Any] = {
        "vector times matrices": lambda x: x[0, 0] @ x,
        "matrices times vector": lambda x: x @ x[0, 0],
        "linear out": lambda x: torch._C._nn.linear(x, x[0], out=torch.empty_like(x)),
        "softmax": lambda x: x.softmax(-1),
        "kl_div": lambda x: F.kl_div(x, x.exp()),
    }
    x = torch.randn(5, 10, 10, generator=torch.Generator().manual_seed(0))
    return [name for name, function in cases.items() if not torch.equal(function(x), function(x.to("npu")).cpu())]


def conjugates() -> list[bool]:
    """Conjugating complex memory in place."""
    x = torch.tensor([1 + 2j, 3 - 4j])
    a = torch.randn(3, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    empty = [torch.empty(0, dtype=t, device="npu") for t in (torch.complex64, torch.float32, torch.complex64)]
    cpu, npu = torch.svd(a), torch.svd(a.to("npu"), out=tuple(empty))
    same = [torch.equal(c, n.cpu()) for c, n in zip(cpu, npu, strict=True)]
    return [torch.equal(x.to("npu").conj_physical_().cpu(), x.clone().conj_physical_()), *same]
