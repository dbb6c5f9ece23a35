"""One operator on emulated NPUs: torch's CPU kernel over the same memory, under the rules of a device.

The rules, each of which gave silently wrong results while it was missing: tensors on different devices are refused; an
``out=`` tensor may grow; what is asked for on the CPU stays there; in-place results are the caller's own tensors;
random numbers come from the NPU's generator; work waits for communication that its stream still holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch

from ascend_emulator import _torch
from ascend_emulator._torch import tree_map
from ascend_emulator.alias import CPU, as_cpu, to_npu
from ascend_emulator.load import runtime
from ascend_emulator.random_state import cpu_generator, seeded_default

_MIXED = frozenset(
    "copy_ _to_copy _copy_from _copy_from_and_resize index index_put index_put_ _index_put_impl_ _unsafe_index set_ "
    "_foreach_copy_ resize_as_ empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_zeros "
    "_has_compatible_shallow_copy_type".split()
)
"""Operators whose tensors may live on different devices, as on a real NPU."""

_pending = ctypes.c_int.in_dll(runtime(), "emu_pending")
_wait_stream = runtime().emu_wait_stream
_wait_stream.argtypes = [ctypes.c_void_p, ctypes.c_int64]


def drain(devices: Iterable[torch.device]) -> None:
    """Wait for what the current streams of devices still hold; the fast case is that nothing is held anywhere.

    Args:
        devices: Those of the operands and the result; none of them need be the current device.
    """
    if not _pending.value:
        return
    for device in devices:
        if _wait_stream(torch.npu.current_stream(device).npu_stream, -1) == 2:  # type: ignore[attr-defined]
            raise RuntimeError("A collective on this stream failed (HCCL); the device cannot go on.")


class _Devices:
    """Turns NPU arguments into CPU ones and remembers where they were."""

    def __init__(self, name: str, mixed: bool) -> None:
        self.name, self.mixed = name, mixed
        self.device: torch.device | None = None
        self.seen: set[torch.device] = set()
        self.elsewhere = self.any_cpu = self.any_npu = False

    def convert(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.device):
            if value.type == "npu":
                self.device = value
                return CPU
            self.elsewhere = True  # the CPU or meta was asked for by name
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "npu":
            if self.any_npu and self.device != tensor.device and not self.mixed:
                raise _different(self.name, self.device, tensor.device)
            self.any_npu, self.device = True, tensor.device
            self.seen.add(tensor.device)
            return as_cpu(tensor)
        self.any_cpu |= tensor.dim() > 0
        return tensor

    def result_device(self) -> torch.device:
        if self.any_npu and self.any_cpu and not self.mixed:
            raise _different(self.name, self.device, CPU)
        if self.device is None or self.device.index is None:
            return torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined]
        return self.device


def _different(name: str, one: object, other: object) -> RuntimeError:
    if CPU in (one, other):  # the words of torch_npu
        return RuntimeError(
            "Expected all tensors to be on the same device. Expected NPU tensor, please check whether the input tensor "
            f"device is correct. ({name}: {one} and {other})"
        )
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {one} and {other}! ({name})"
    )


class Kernel:
    """The implementation of one operator for the dispatch key ``PrivateUse1``.

    Args:
        op: The operator overload.
    """

    def __init__(self, op: Any) -> None:
        schema = _torch.schema(op)
        self.op, self.name = op, schema.name
        self.mixed = schema.name.partition("::")[2] in _MIXED
        self.generator = next((i for i, a in enumerate(schema.arguments) if a.name == "generator"), None)
        self.seeded = torch.Tag.nondeterministic_seeded in op.tags
        self.pins = any(a.name == "pin_memory" for a in schema.arguments)
        written = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
        self.outs = [a.name for _, a in written if a.kwarg_only]
        places = {frozenset(a.alias_info.before_set): (i, a.name) for i, a in written}
        self.returns = [
            places.get(frozenset(r.alias_info.before_set)) if r.alias_info and r.alias_info.is_write else None
            for r in schema.returns
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator."""
        devices = _Devices(self.name, self.mixed)
        cpu_args, cpu_kwargs = tree_map(devices.convert, (args, kwargs))
        device = devices.result_device()
        drain({*devices.seen, device})
        if self.pins and "pin_memory" in cpu_kwargs:
            cpu_kwargs["pin_memory"] = False
        if self.outs:
            return self._into_outs(cpu_args, cpu_kwargs, kwargs, device)
        result = self._run(list(cpu_args), cpu_kwargs, device)
        if devices.elsewhere:
            return result
        if len(self.returns) == 1:
            return self._back(self.returns[0], result, args, kwargs, device)
        if not self.returns:
            return None
        return tuple(self._back(r, value, args, kwargs, device) for r, value in zip(self.returns, result, strict=True))

    def _run(self, args: list[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
        if self.generator is not None:
            if self.generator < len(args):
                args[self.generator] = cpu_generator(args[self.generator], device)
            else:
                kwargs = {**kwargs, "generator": cpu_generator(kwargs.get("generator"), device)}
        own_stream = seeded_default(device) if self.seeded and self.generator is None else nullcontext()
        with own_stream:
            return self.op(*args, **kwargs)

    def _back(self, place: tuple[int, str] | None, value: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        if place is not None:
            index, name = place
            return args[index] if index < len(args) else kwargs[name]
        if isinstance(value, torch.Tensor):
            return to_npu(value, device)
        if isinstance(value, (list, tuple)):
            return [self._back(None, v, args, kwargs, device) for v in value]
        return value

    def _into_outs(self, args: Any, cpu_kwargs: dict[str, Any], kwargs: dict[str, Any], device: torch.device) -> Any:
        """Compute into fresh tensors, then grow and fill the caller's."""
        fresh = {
            n: tree_map(lambda t: torch.empty(0, dtype=t.dtype) if isinstance(t, torch.Tensor) else t, kwargs.get(n))
            for n in self.outs
        }
        self._run(list(args), {**cpu_kwargs, **fresh}, device)
        for name in self.outs:
            targets, values = kwargs.get(name), fresh[name]
            if isinstance(targets, torch.Tensor):
                targets, values = [targets], [values]
            for target, value in zip(targets or (), values or (), strict=True):
                if target.size() != value.size():
                    target.resize_(value.size())
                if value.numel():
                    as_cpu(target).copy_(value)
        results = [kwargs.get(n) for n in self.outs]
        if not self.returns:
            return None
        return results[0] if len(self.returns) == 1 else tuple(results)
