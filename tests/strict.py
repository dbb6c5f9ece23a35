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
        "zero-dim cpu": _text(lambda: (a + torch.tensor(2.0)).sum().item()),
        "copy": _text(lambda: a.clone().copy_(b * 3).sum().item()),
        "index": _text(lambda: a[torch.tensor([0, 1])].sum().item()),
        "result stays on": _text(lambda: str((b * 2).device)),
    }


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
    from ascend_emulator import saturation

    device = torch.npu.current_device()
    saturation.clear(device)
    big = torch.full((3,), 60000.0, dtype=torch.float16, device="npu")
    seen: dict[str, Any] = {"flag before": (saturation.flag(device), (big / 2).tolist(), saturation.flag(device))}
    seen["doubled"] = ((big * 2).tolist(), (-big * 2).tolist(), saturation.flag(device))
    saturation.clear(device)
    seen["in place"] = (big.clone().mul_(2).tolist(), saturation.flag(device))
    saturation.clear(device)
    lists = [big.clone(), big.clone()]
    torch._foreach_mul_(lists, 2)
    seen["foreach"] = ([t.tolist() for t in lists], saturation.flag(device))
    saturation.clear(device)
    out = torch.empty(3, dtype=torch.float16, device="npu")
    torch.mul(big, 2, out=out)
    seen["out"] = (out.tolist(), saturation.flag(device))
    saturation.clear(device)
    seen["cast"] = (torch.full((1,), 1e6, device="npu").half().tolist(), saturation.flag(device))
    seen["nan"] = (torch.zeros(1, device="npu") / 0).tolist()
    saturation.clear(device)
    masked = torch.zeros(2, device="npu").masked_fill(torch.tensor([True, False], device="npu"), float("-inf"))
    seen["written infinity stays"] = (masked.tolist(), saturation.flag(device))
    return seen
