"""Device memory is host memory: look at an NPU tensor as a CPU tensor, and the other way round."""

from __future__ import annotations

from typing import Any

import torch

from ascend_emulator._torch import neg_view, storage_at

CPU = torch.device("cpu")


def as_cpu(tensor: torch.Tensor, storages: dict[int, tuple[Any, Any]] | None = None) -> torch.Tensor:
    """A CPU tensor over the memory of an NPU tensor: same shape, strides, offset, conjugate and negative bits.

    Args:
        tensor: The NPU tensor.
        storages: The storages of this call so far, by id: the NPU's and the CPU's over it. Tensors that share one share
            the other, so that kernels see which operands overlap.
    """
    _check_dense(tensor)
    storage = tensor.untyped_storage()
    storages = {} if storages is None else storages
    known = storages.get(id(storage))
    if known is None:
        view = storage_at(storage.data_ptr(), CPU, storage.nbytes()) if storage.nbytes() else torch.UntypedStorage(0)
        known = storages[id(storage)] = (storage, view)
    alias = torch.empty(0, dtype=tensor.dtype).set_(known[1], tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        alias = alias.conj()
    return neg_view(alias) if tensor.is_neg() else alias


def to_npu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a CPU tensor in device memory, with the same strides."""
    _check_dense(tensor)
    out = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        as_cpu(out).copy_(tensor)
    return out


def follow(tensor: torch.Tensor, alias: torch.Tensor) -> None:
    """Give an NPU tensor the shape, strides and values that a CPU kernel gave to the tensor that stood for it."""
    if tensor.device.type != "npu":
        return
    if alias.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        if alias.size() != tensor.size() or alias.stride() != tensor.stride():
            tensor.set_(tensor.untyped_storage(), alias.storage_offset(), alias.size(), alias.stride())
        return
    if alias.size() != tensor.size() or alias.stride() != tensor.stride():
        tensor.set_(tensor.untyped_storage(), 0, (0,), (1,)).resize_(-(-alias.untyped_storage().nbytes() // alias.itemsize))
        tensor.set_(tensor.untyped_storage(), alias.storage_offset(), alias.size(), alias.stride())
    if alias.numel():
        as_cpu(tensor).copy_(alias)


def _check_dense(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise RuntimeError(f"The emulated NPU holds dense tensors only, not layout {tensor.layout}")
