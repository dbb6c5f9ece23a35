"""PyTorch's operator database and its sample inputs, and fresh copies of them on a device.

The samples are drawn on the CPU, always with the same seed. A copy has the sample's strides, offsets and shared
storages, so that both devices run the same kernel over the same layout and results can be compared bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations as database
from torch.testing._internal.common_methods_invocations import op_db

DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool, torch.float16, torch.bfloat16)
"""The type of the samples is the first of these that the operator supports on the CPU."""

# The database seeds some random operators by itself, which would hide whether they draw from the NPU's generator.
database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)


@dataclass
class Call:
    """The arguments of one call, on one device."""

    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in order."""
        return flatten((self.input, self.args, self.kwargs))

    def run(self, function: Any, **more: Any) -> Any:
        """Call ``function`` with these arguments."""
        return function(self.input, *self.args, **self.kwargs, **more)


def flatten(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [t for v in value for t in flatten(v)]


def full_name(op: Any) -> str:
    """The operator's name with its variant, unique in the database: ``linalg.lu.grad_oriented``."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def operators() -> dict[str, Any]:
    """The database by name, in a fixed order."""
    return {full_name(op): op for op in sorted(op_db, key=full_name)}


def main_dtype(op: Any) -> torch.dtype | None:
    """float32, or what the operator supports instead; None if it has no CPU implementation."""
    supported = op.supported_dtypes("cpu")
    return next((d for d in DTYPES if d in supported), None)


def draw(op: Any, dtype: torch.dtype, limit: int | None = None) -> list[Any]:
    """The operator's samples on the CPU; floating-point inputs ask for gradients where the operator has any."""
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    samples = []
    for sample in op.sample_inputs("cpu", dtype, requires_grad=grad):
        samples.append(sample)
        if limit is not None and len(samples) >= limit:
            break
    return samples


@dataclass
class _Mover:
    device: str
    grad: bool
    storages: dict[int, Any] = field(default_factory=dict)
    seen: dict[int, torch.Tensor] = field(default_factory=dict)

    def move(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.seen:
                self.seen[id(value)] = self._tensor(value)
            return self.seen[id(value)]
        if isinstance(value, (list, tuple)):
            moved = [self.move(v) for v in value]
            return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
        if isinstance(value, dict):
            return {k: self.move(v) for k, v in value.items()}
        if isinstance(value, torch.Generator):
            return torch.Generator(self.device).manual_seed(value.initial_seed())
        if self.device != "cpu":
            if isinstance(value, torch.device) and value.type == "cpu":
                return torch.device(self.device)
            if isinstance(value, str) and value in ("cpu", "cpu:0"):
                return self.device
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        grad = self.grad and tensor.requires_grad
        tensor = tensor.detach()
        if tensor.device.type != "cpu":
            return tensor.clone().requires_grad_(grad)
        if tensor.layout != torch.strided:
            return tensor.clone().to(self.device).requires_grad_(grad)
        conj, neg = tensor.is_conj(), tensor.is_neg()
        if conj:
            tensor = tensor.conj()
        if neg:
            tensor = torch._neg_view(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            memory = torch.empty(0, dtype=torch.uint8).set_(storage).clone().to(self.device)
            self.storages[key] = (memory.untyped_storage(), tensor)  # the tensor keeps the key valid
        copy = torch.empty(0, dtype=tensor.dtype, device=self.device)
        copy.set_(self.storages[key][0], tensor.storage_offset(), tensor.size(), tensor.stride())
        if conj:
            copy = copy.conj()
        if neg:
            copy = torch._neg_view(copy)
        return copy.requires_grad_(grad)


def place(sample: Any, device: str, *, grad: bool = False, factory: bool = False) -> Call:
    """A fresh copy of a sample's arguments.

    Args:
        sample: From :func:`draw`, on the CPU.
        device: ``"cpu"`` or ``"npu"``; arguments that name the CPU name this device instead.
        grad: Whether inputs that ask for gradients do so in the copy.
        factory: Whether the operator makes tensors on the device that its ``device`` argument names.
    """
    mover = _Mover(device, grad)
    with torch.no_grad():
        call = Call(mover.move(sample.input), mover.move(sample.args), mover.move(sample.kwargs))
    if factory and not call.tensors():
        call.kwargs.setdefault("device", device)
    return call


def move(value: Any, device: str) -> Any:
    """A fresh copy of any nest of CPU tensors."""
    with torch.no_grad():
        return _Mover(device, grad=False).move(value)
