"""Rank functions about what the emulated NPU refuses, and how it treats values that do not fit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

HALF_MAX = 65504.0


def layer() -> tuple[str, str, str]:
    """Which operator layer serves a simple, a random and an out= operator."""
    from ascend_emulator.ops import layers

    return layers()["mul.Tensor"], layers()["bernoulli"], layers()["add.out"]


def _text(call: Callable[[], Any]) -> str:
    try:
        return f"accepted: {call()}"
    except RuntimeError as error:
        return str(error)


def float64() -> dict[str, str]:
    """What float64 operators say or give."""
    x = torch.ones(2, 2, dtype=torch.float64).to("npu")
    return {
        "mm": _text(lambda: x @ x),
        "out": _text(lambda: torch.mm(x, x, out=torch.empty_like(x))),
        "linear": _text(lambda: F.linear(x, x)),
        "layer_norm": _text(lambda: F.layer_norm(x, (2,))),
        "gelu": _text(lambda: F.gelu(x)),
        "add": _text(lambda: (x + x).sum().item()),
        "cast": _text(lambda: (x.float() @ x.float()).sum().item()),
    }


def mixed_devices() -> dict[str, str]:
    """Operands on several devices."""
    a, b = torch.ones(2, device="npu:0"), torch.ones(2, device="npu:1")
    return {
        "two npus": _text(lambda: a + b),
        "npu and cpu": _text(lambda: a + torch.ones(2)),
        "in a list": _text(lambda: torch.cat([a, b])),
        "out": _text(lambda: torch.add(a, torch.ones(2), out=torch.empty(2, device="npu:0"))),
        "zero-dim out": _text(lambda: torch.add(a[0], a[1], out=torch.tensor(1.0))),
        "zero-dim in place": _text(lambda: torch.tensor(1.0).add_(a[0])),
        "zero-dim cpu": _text(lambda: (a + torch.tensor(2.0)).sum().item()),
        "copy": _text(lambda: a.clone().copy_(b * 3).sum().item()),
        "index": _text(lambda: a[torch.tensor([0, 1])].sum().item()),
        "result stays on": _text(lambda: str((b * 2).device)),
    }


def sparse() -> list[str]:
    """Sparse tensors, an empty one among them."""
    return [_text(lambda t=t: t.to("npu").to_sparse()) for t in (torch.eye(2), torch.zeros(0, 2, dtype=torch.int64))]


def old_soc() -> dict[str, Any]:
    """On an SoC from before bfloat16, whose overflow saturates by default."""
    import torch_npu

    ones = torch.ones(2, dtype=torch.bfloat16)
    seen: dict[str, Any] = {
        "name": torch.npu.get_device_name(0),
        "supported": torch.npu.is_bf16_supported(),
        "inf nan mode": torch_npu.npu.utils.is_support_inf_nan(),
        "moving": _text(lambda: ones.to("npu").cpu().sum().item()),
        "computing": _text(lambda: ones.to("npu") + 1),
        "casting": _text(lambda: torch.ones(2, device="npu").to(torch.bfloat16)),
    }
    return seen | saturating()


def saturating_by_switch() -> dict[str, Any]:
    """Saturating mode on the default SoC, as torch_npu's call sets it; then the other mode again."""
    from ascend_emulator.load import runtime

    runtime().aclrtSetDeviceSatMode(0)
    try:
        seen = saturating()
    finally:
        runtime().aclrtSetDeviceSatMode(1)
    big = torch.full((2,), 60000.0, dtype=torch.float16, device="npu")
    mode = ctypes.c_int()
    runtime().aclrtGetDeviceSatMode(ctypes.byref(mode))
    return seen | {"afterwards": ((big * 2).tolist(), mode.value, runtime().aclrtSetDeviceSatMode(7))}


def saturating() -> dict[str, Any]:
    """Values that do not fit, and the status flag."""
    from ascend_emulator import float_status

    device = torch.npu.current_device()
    float_status.clear(device)
    big = torch.full((3,), 60000.0, dtype=torch.float16, device="npu")
    float_status.raise_flag(device + 1)  # of another device
    seen: dict[str, Any] = {"flag before": (float_status.flag(device), (big / 2).tolist(), float_status.flag(device))}
    seen["doubled"] = ((big * 2).tolist(), (-big * 2).tolist(), float_status.flag(device))
    float_status.clear(device)
    seen["in place"] = (big.clone().mul_(2).tolist(), float_status.flag(device))
    float_status.clear(device)
    lists = [big.clone(), big.clone()]
    torch._foreach_mul_(lists, 2)
    seen["foreach"] = ([t.tolist() for t in lists], float_status.flag(device))
    float_status.clear(device)
    out = torch.empty(3, dtype=torch.float16, device="npu")
    torch.mul(big, 2, out=out)
    seen["out"] = (out.tolist(), float_status.flag(device))
    float_status.clear(device)
    seen["cast"] = (torch.full((1,), 1e6, device="npu").half().tolist(), float_status.flag(device))
    seen["nan"] = (torch.zeros(1, device="npu") / 0).tolist()
    float_status.clear(device)
    masked = torch.zeros(2, device="npu").masked_fill(torch.tensor([True, False], device="npu"), float("-inf"))
    seen["written infinity stays"] = (masked.tolist(), float_status.flag(device))
    return seen


def scaler_and_fused() -> dict[str, Any]:
    """In saturating mode: the gradient scalers back off, and torch_npu's own operators saturate too."""
    import torch_npu

    from ascend_emulator import float_status
    from ascend_emulator.load import runtime

    runtime().aclrtSetDeviceSatMode(0)
    try:
        float_status.clear(torch.npu.current_device())
        weight = torch.ones(2, 2, device="npu", requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler = torch.amp.GradScaler("npu", init_scale=1024.0)
        scales = []
        for factor in (60000.0, 1.0):
            half = weight.half() * factor
            loss = (half * 2).float().sum() * 1e-4  # 120000 does not fit in float16
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append((scaler.get_scale(), bool((weight == 1).all())))
        x = torch.full((1, 4), 60000.0, dtype=torch.float16, device="npu")
        fused = torch_npu.npu_swiglu(torch.cat([x, x], -1))
        return {"scales": scales, "fused": fused.tolist(), "flag": float_status.flag(torch.npu.current_device())}
    finally:
        runtime().aclrtSetDeviceSatMode(1)
        float_status.clear(torch.npu.current_device())


def layer_that_overflows() -> dict[str, list[bool]]:
    """60000 * 2 in float16 inside the second of three layers: what hooks see of each, in both overflow modes.

    In saturating mode the device's flag tells, read and cleared by torch_npu's own operators; else the values.
    """
    import torch_npu
    from torch import nn

    from ascend_emulator.load import runtime

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 / 2

    seen: dict[str, list[bool]] = {}
    for mode, name in ((0, "saturating"), (1, "inf")):
        runtime().aclrtSetDeviceSatMode(mode)
        overflowed: list[bool] = []

        def hook(module: nn.Module, args: Any, output: torch.Tensor, mode: int = mode, found: Any = overflowed) -> None:
            status = torch.zeros(8, device="npu")
            found.append(bool(torch_npu.npu_get_float_status(status)[0]) if mode == 0 else not bool(output.isfinite().all()))
            torch_npu.npu_clear_float_status(status)

        layers = nn.Sequential(nn.Identity(), Twice(), nn.Identity())
        torch_npu.npu_clear_float_status(torch.zeros(8, device="npu"))
        for layer in layers:
            layer.register_forward_hook(hook)
        try:
            layers[:2](torch.full((4,), 60000.0, dtype=torch.float16, device="npu"))
            layers[2:](torch.ones(4, dtype=torch.float16, device="npu"))
        finally:
            runtime().aclrtSetDeviceSatMode(1)
        seen[name] = overflowed
    return seen
