"""Reductions that hold on HCCL: what it cannot reduce takes another way and gives the same value.

HCCL reduces int8 to int64, fp16, bf16 and fp32. It refuses 64-bit floats and unsigned integers (unless the SoC is of
the newest kind), has no bitwise operations, and knows no mean of integers.
Source: torch_npu, ``ProcessGroupHCCL.cpp``, ``checkSupportedDataType``.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

REDUCIBLE = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32})
"""Types that HCCL reduces on every SoC."""

_ON_HOST = {"SUM": np.add, "AVG": np.add, "MAX": np.maximum, "MIN": np.minimum, "PRODUCT": np.multiply}


def all_reduce(tensor: torch.Tensor, op: str = "SUM", group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Reduce a tensor over a group, in place, whatever its type and backend.

    Args:
        tensor: Any shape, on the CPU or an NPU. Of ``bool``, ``SUM`` and ``MAX`` mean "any" and ``MIN`` and ``PRODUCT``
            mean "all".
        op: ``"SUM"``, ``"AVG"`` (floating types only), ``"MAX"``, ``"MIN"`` or ``"PRODUCT"``.
        group: The process group; default: the world.

    Returns:
        ``tensor``.

    Raises:
        TypeError: ``AVG`` of integers.

    Communication:
        One all-reduce of the tensor's bytes (four times that for ``bool``). On NPUs, a type outside :data:`REDUCIBLE`
        takes one all-gather instead, and is reduced on the host, in its own type: exact, and meant for small tensors.
    """
    if op == "AVG" and not tensor.is_floating_point():
        raise TypeError(f"the mean of {tensor.dtype} is not of that type; convert the tensor to float first")
    if tensor.dtype == torch.bool:
        counts = tensor.int()
        dist.all_reduce(counts, dist.ReduceOp.MAX if op in ("SUM", "MAX") else dist.ReduceOp.MIN, group=group)
        return tensor.copy_(counts != 0)
    if tensor.device.type == "npu" and tensor.dtype not in REDUCIBLE:
        everyone = _gathered(tensor, group).cpu().numpy()  # NumPy computes with every type, torch's CPU kernels do not
        value = _ON_HOST[op].reduce(everyone, axis=0, dtype=everyone.dtype)
        return tensor.copy_(torch.from_numpy(np.asarray(value / len(everyone) if op == "AVG" else value)))
    if op == "AVG":  # gloo has no mean
        dist.all_reduce(tensor, dist.ReduceOp.SUM, group=group)
        return tensor.div_(dist.get_world_size(group))
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
    return tensor


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All ranks' values, along a new first dim."""
    out = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    dist.all_gather_into_tensor(out.view(-1), tensor.contiguous().view(-1), group=group)
    return out
