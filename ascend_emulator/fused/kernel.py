"""One ``npu::`` operator on emulated NPUs: its formula over the same memory, under the rules of a device.

The rules are those of :mod:`ascend_emulator.kernels`: work waits for communication that its stream still holds, all
tensors are on one device, results are in that device's memory, and what an operator writes to is the caller's tensor.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ascend_emulator import _torch, saturation
from ascend_emulator._torch import tree_map
from ascend_emulator.alias import CPU, as_cpu, to_npu
from ascend_emulator.fused.registry import NPU_FLOATS, Formula
from ascend_emulator.kernels import drain


class FusedKernel:
    """The implementation of one operator for the dispatch key ``PrivateUse1``.

    Args:
        op: The operator overload.
        formula: How it is computed.
    """

    def __init__(self, op: Any, formula: Formula) -> None:
        schema = _torch.schema(op)
        self.name, self.formula = f"npu::{formula.name}", formula
        self.arguments = list(schema.arguments)
        self.aliases = formula.aliases or any(r.alias_info for r in schema.returns)
        self.many = len(schema.returns) > 1
        self._check_signature()

    def _check_signature(self) -> None:
        known = set(inspect.signature(self.formula.function).parameters) - {"device"}
        wanted = {a.name for a in self.arguments} - self.formula.ignored - self.formula.refused
        if known != wanted:
            raise TypeError(f"the formula of {self.name} has other arguments than the operator: {sorted(known ^ wanted)}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator."""
        places = _Places(self.name, self.formula)
        values = {}
        for position, argument in enumerate(self.arguments):
            name = argument.name
            value = args[position] if position < len(args) else kwargs.get(name, argument.default_value)
            if name in self.formula.refused and not _is_default(value, argument.default_value):
                raise NotImplementedError(f"{self.name}: the emulator has no formula for the argument {name!r}")
            if name in self.formula.host_arguments and _is_on_npu(value):
                raise RuntimeError(f"{self.name}: {name!r} must be on the CPU")
            if name in self.formula.no_gradient and torch.is_grad_enabled() and _requires_grad(value):
                raise RuntimeError(
                    f"{self.name}: {name!r} requires a gradient, which the NPU does not compute (CANN documents it as unused)"
                )
            if name in self.formula.refused:
                continue
            host = value if name in self.formula.host_arguments else tree_map(places.to_host, value)
            if name not in self.formula.ignored:
                values[name] = host
        drain([places.of_results()])
        if self.formula.wants_device:
            values["device"] = places.of_results()
        with torch.no_grad():
            result = self.formula.function(**values)
        if not self.many:
            return places.back(result, self.aliases)
        return tuple(
            value if place in self.formula.host_results else places.back(value, self.aliases)
            for place, value in enumerate(result)
        )


def _is_default(value: Any, default: Any) -> bool:
    if value is None or isinstance(value, torch.Tensor):
        return value is None
    return bool(value == default) or (default is None and not value)


def _is_on_npu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class _Places:
    """Turns NPU tensors into CPU ones, and results back."""

    def __init__(self, name: str, formula: Formula) -> None:
        self.name, self.formula = name, formula
        self.device: torch.device | None = None
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_host(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return CPU if isinstance(value, torch.device) else value
        if value.is_floating_point() and value.dtype not in NPU_FLOATS and not self.formula.any_type:
            raise RuntimeError(f"{self.name} has no kernel for {value.dtype}; it takes float16, bfloat16 and float32.")
        if value.device.type != "npu":
            if value.dim() == 0 and value.device.type == "cpu":
                return value
            raise self._different(value.device)
        if self.device is not None and self.device != value.device:
            raise self._different(value.device)
        self.device = value.device
        alias = as_cpu(value)
        self.seen.append((alias, value))
        return alias

    def _different(self, other: torch.device) -> RuntimeError:
        return RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{self.device or 'npu'} and {other}! ({self.name})"
        )

    def of_results(self) -> torch.device:
        return self.device or torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined]

    def back(self, value: Any, aliases: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return [self.back(v, aliases) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        for alias, original in self.seen if aliases else ():
            if alias is value:
                if saturation.on():
                    saturation.clamp(alias, original.device)
                return original
        device = self.of_results()
        if saturation.on():
            saturation.clamp(value, device)
        return to_npu(value.contiguous(), device)
