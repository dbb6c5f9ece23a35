"""One operator on emulated NPUs: torch's CPU kernel over the same memory, under the rules of a device.

The rules, each of which gave silently wrong results while it was missing: tensors on different devices are refused; an
``out=`` tensor may grow; what is asked for on the CPU stays there; in-place results are the caller's own tensors;
random numbers come from the NPU's generator; types without an NPU kernel are refused; values that do not fit saturate
where that is the mode; work waits for communication that its stream still holds. ``cpp/ops.cpp`` is the same for
operators that need neither random numbers nor ``out=``, and faster.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import torch

from ascend_emulator import _torch, rules, saturation
from ascend_emulator._torch import tree_map
from ascend_emulator.alias import CPU, as_cpu, to_npu
from ascend_emulator.load import runtime
from ascend_emulator.random_state import cpu_generator, seeded_default

_pending = ctypes.c_int.in_dll(runtime(), "emu_pending")
_wait_stream = runtime().emu_wait_stream
_wait_stream.argtypes = [ctypes.c_void_p, ctypes.c_int64]


def drain() -> None:
    """Wait for what the current stream still holds; the fast case is that nothing does."""
    if _pending.value and _wait_stream(torch.npu.current_stream().npu_stream, -1) == 2:  # type: ignore[attr-defined]
        raise RuntimeError("A collective on this stream failed (HCCL); the device cannot go on.")


class _Devices:
    """Turns NPU arguments into CPU ones and remembers where they were."""

    def __init__(self, name: str, flags: int) -> None:
        self.name, self.mixed = name, bool(flags & rules.MIXED)
        self.device: torch.device | None = None
        self.elsewhere = self.any_cpu = self.any_npu = False
        self.types: set[torch.dtype] = set()

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
        drain()
        devices = _Devices(self.name, self.flags)
        cpu_args, cpu_kwargs = tree_map(devices.convert, (args, kwargs))
        device = devices.result_device()
        if self.pins and "pin_memory" in cpu_kwargs:
            cpu_kwargs["pin_memory"] = False
        rules.check_types(self.name, self.flags, devices.types)
        if self.outs:
            return self._into_outs(cpu_args, cpu_kwargs, kwargs, device)
        result = self._run(list(cpu_args), cpu_kwargs, device)
        if devices.elsewhere:
            return result
        if self.flags & rules.SATURATES and saturation.on():
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
        if self.flags & rules.SATURATES and saturation.on():
            saturation.clamp(list(fresh.values()), device)
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
