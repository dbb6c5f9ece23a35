"""One operator on emulated NPUs: torch's CPU kernel over the same memory, under the rules of a device.

The rules, each of which gave silently wrong results while it was missing: tensors on different devices are refused; an
``out=`` tensor may grow; what is asked for on the CPU stays there; in-place results are the caller's own tensors;
random numbers come from the NPU's generator; types without an NPU kernel are refused; values that do not fit saturate
where that is the mode; work waits for communication that its stream still holds. ``cpp/ops.cpp`` is the same for
operators that need neither random numbers nor ``out=``, and faster.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch

from ascend_emulator import _torch, float_status, rules, saturation
from ascend_emulator._torch import tree_map
from ascend_emulator.alias import CPU, as_cpu, follow, to_npu
from ascend_emulator.load import runtime
from ascend_emulator.random_state import cpu_generator, seeded_default

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

    def __init__(self, name: str, flags: int) -> None:
        self.name, self.mixed = name, bool(flags & rules.MIXED)
        self.device: torch.device | None = None
        self.elsewhere = self.any_cpu = self.any_npu = self.scalars = False
        self.storages: dict[int, tuple[Any, Any]] = {}
        self.aliases: dict[int, torch.Tensor] = {}
        self.types: set[torch.dtype] = set()
        self.seen: set[torch.device] = set()

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
            self.types.add(tensor.dtype)
            self.any_npu, self.device = True, tensor.device
            self.seen.add(tensor.device)
            if id(tensor) not in self.aliases:
                self.aliases[id(tensor)] = as_cpu(tensor, self.storages)
            return self.aliases[id(tensor)]
        self.any_cpu |= tensor.dim() > 0
        self.scalars = True
        return tensor

    def check_written(self, values: Iterable[Any]) -> None:
        """A zero-dimensional CPU tensor may be read, but not written."""
        if self.any_npu and not self.mixed and any(t.device.type == "cpu" for t in _tensors(values)):
            raise _different(self.name, self.device, CPU)

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
        self.flags = rules.flags(op)
        self.generator = next((i for i, a in enumerate(schema.arguments) if a.name == "generator"), None)
        self.seeded = torch.Tag.nondeterministic_seeded in op.tags
        takes_numbers = _torch.takes_numbers(schema.name.partition("::")[2])
        self.tensors = [] if takes_numbers else [i for i, a in enumerate(schema.arguments) if str(a.type) == "Tensor"]
        self.pins = any(a.name == "pin_memory" for a in schema.arguments)
        written = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
        self.written = [(i, a.name) for i, a in written if not a.kwarg_only]
        self.outs = [a.name for _, a in written if a.kwarg_only]
        self.simple = self.generator is None and not self.seeded and not self.outs
        places = {frozenset(a.alias_info.before_set): (i, a.name) for i, a in written}
        self.returns = [
            places.get(frozenset(r.alias_info.before_set)) if r.alias_info and r.alias_info.is_write else None
            for r in schema.returns
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator."""
        devices = _Devices(self.name, self.flags)
        cpu_args, cpu_kwargs = tree_map(devices.convert, (args, kwargs))
        device = devices.result_device()
        if devices.scalars:
            devices.check_written(
                [*(args[i] if i < len(args) else kwargs.get(n) for i, n in self.written), *map(kwargs.get, self.outs)]
            )
        drain({*devices.seen, device})
        if self.pins and "pin_memory" in cpu_kwargs:
            cpu_kwargs["pin_memory"] = False
        rules.check_types(self.name, self.flags, devices.types)
        if self.outs:
            return self._into_outs(cpu_args, cpu_kwargs, kwargs, device)
        result = self._run(list(cpu_args), cpu_kwargs, device)
        if devices.elsewhere:
            return result
        computes = self.flags & rules.SATURATES or (self.flags & rules.CASTS and len(devices.types) > 1)
        if computes and saturation.on():
            saturation.clamp([cpu_args[i] if i < len(cpu_args) else cpu_kwargs.get(n) for i, n in self.written], device)
            saturation.clamp(result, device)
        if isinstance(result, torch.Tensor) and result.dtype == torch.bfloat16:
            rules.check_types(self.name, self.flags, devices.types | {result.dtype})
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
        op = self.op
        if any(isinstance(args[i], (int, float, complex)) for i in self.tensors if i < len(args)):
            op = op.overloadpacket  # a number that torch had made a tensor of: the overload for numbers
        own_stream = seeded_default(device) if self.seeded and self.generator is None else nullcontext()
        with own_stream:
            return op(*args, **kwargs)

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
        """Compute into the caller's memory; a tensor that grows, shrinks or changes its strides does so on the NPU too."""
        try:
            self._run(list(args), cpu_kwargs, device)
        except RuntimeError as error:
            if "not resizable" not in str(error):
                raise
            cpu_kwargs = self._growing(args, cpu_kwargs)
            self._run(list(args), cpu_kwargs, device)
        values = [cpu_kwargs.get(n) for n in self.outs]
        if self.flags & rules.SATURATES and saturation.on():
            saturation.clamp(values, device)
        results = [kwargs.get(n) for n in self.outs]
        for target, value in zip(_tensors(results), _tensors(values), strict=True):
            follow(target, value)
        if not self.returns:
            return None
        return results[0] if len(self.returns) == 1 else tuple(results)

    def _growing(self, args: Any, cpu_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Foreign memory cannot grow, so the CPU kernel makes its own; it may not read what it replaces."""
        outs = {n: cpu_kwargs.get(n) for n in self.outs}
        inputs = _tensors([*args, *(v for n, v in cpu_kwargs.items() if n not in outs)])
        memory = {id(t.untyped_storage()) for t in inputs}
        if any(id(t.untyped_storage()) in memory for t in _tensors(outs.values())):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory "
                f"location, and the latter must grow. Please clone() the tensor before performing the operation. ({self.name})"
            )
        fresh = tree_map(lambda v: torch.empty(0, dtype=v.dtype) if isinstance(v, torch.Tensor) else v, outs)
        return {**cpu_kwargs, **fresh}


class ScalerKernel(Kernel):
    """The check of a gradient scaler: in saturating mode no gradient is infinite, and the device's flag tells instead.

    The flag is cleared, since ``torch.amp.GradScaler`` does not know of it.
    """

    def __init__(self, op: Any) -> None:
        super().__init__(op)
        self.simple = False

    def __call__(self, grads: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """Unscale gradients in place and set ``found_inf`` if any is not finite or the device has overflowed."""
        super().__call__(grads, found_inf, inv_scale)
        index = found_inf.device.index
        if saturation.on() and float_status.flag(index):
            found_inf.fill_(1.0)
            float_status.clear(index)


SPECIAL = {"_amp_foreach_non_finite_check_and_unscale_": ScalerKernel}
"""Operators with a kernel class of their own."""


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [t for v in values for t in (v if isinstance(v, (list, tuple)) else [v]) if isinstance(t, torch.Tensor)]
