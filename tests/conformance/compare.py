"""Are two results the same? One is the CPU's, the other the NPU's; equal means equal to the last bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from conformance.samples import flatten

GROWTH = "An output with one or more elements was resized"
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MismatchError(Exception):
    """The two devices do not agree; the text says in what."""


@dataclass
class Outcome:
    """What a call did: its value or its error, and whether torch warned that an ``out=`` tensor grew."""

    value: Any = None
    error: Exception | None = None
    grew: bool = field(default=False)


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    """Call a function with the default generators of both devices at a fixed seed."""
    torch.default_generator.manual_seed(0)
    torch.npu.manual_seed(0)  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome = Outcome(function(*args, **kwargs))
        except Exception as error:
            outcome = Outcome(error=error)
    outcome.grew = any(GROWTH in str(w.message) for w in caught)
    return outcome


def alike(cpu: Outcome, npu: Outcome) -> bool:
    """Whether both calls succeeded (True) or both failed in the same way (False).

    Raises:
        MismatchError: One failed, or both did with different types, or only one warned.
    """
    if type(cpu.error) is not type(npu.error):
        raise MismatchError(f"cpu {_describe(cpu)}, npu {_describe(npu)}")
    if cpu.grew != npu.grew:
        raise MismatchError(f"the warning that out= grew: cpu {cpu.grew}, npu {npu.grew}")
    return cpu.error is None


def _describe(outcome: Outcome) -> str:
    if outcome.error is None:
        return "succeeds"
    text = " ".join(str(outcome.error).split("[ERROR]")[0].split())  # torch_npu adds the time and the process
    return f"raises {type(outcome.error).__name__}: {text[:200]}"


def same(cpu: Any, npu: Any, what: str, *, values: bool = True) -> None:
    """Compare two results, which may be nests of tensors and plain values.

    Args:
        cpu: The CPU's.
        npu: The NPU's.
        what: For the error's text, such as ``output``.
        values: False for random numbers and uninitialized memory: then only types, shapes and layouts count.

    Raises:
        MismatchError: They differ.
    """
    small = _Small(values)
    _compare(cpu, npu, what, small)
    texts = small.strides[:1]
    if small.distances:
        where = max(small.distances, key=lambda w: small.distances[w])
        texts.append(f"{where}: values differ by up to {small.distances[where]:.0e} of the largest")
    if texts:
        raise MismatchError("; ".join(texts))


@dataclass
class _Small:
    """Differences that do not keep the rest from being compared: strides, and values by place."""

    values: bool
    strides: list[str] = field(default_factory=list)
    distances: dict[str, float] = field(default_factory=dict)


def _compare(cpu: Any, npu: Any, what: str, small: _Small) -> None:
    if isinstance(cpu, torch.Tensor) and isinstance(npu, torch.Tensor):
        _compare_tensors(cpu, npu, what, small)
    elif type(cpu) is not type(npu):
        raise MismatchError(f"{what}: type {type(cpu).__name__} on the cpu, {type(npu).__name__} on the npu")
    elif isinstance(cpu, (list, tuple)):
        if len(cpu) != len(npu):
            raise MismatchError(f"{what}: length {len(cpu)} on the cpu, {len(npu)} on the npu")
        for i, (a, b) in enumerate(zip(cpu, npu, strict=True)):
            _compare(a, b, f"{what}[{i}]", small)
    elif isinstance(cpu, dict):
        if list(cpu) != list(npu):
            raise MismatchError(f"{what}: keys differ")
        for key in cpu:
            _compare(cpu[key], npu[key], f"{what}[{key!r}]", small)
    elif small.values and not isinstance(cpu, torch.Generator) and not (cpu == npu or (cpu != cpu and npu != npu)):
        raise MismatchError(f"{what}: {cpu!r} on the cpu, {npu!r} on the npu")


def _compare_tensors(cpu: torch.Tensor, npu: torch.Tensor, what: str, small: _Small) -> None:
    expected = "npu" if cpu.device.type == "cpu" else cpu.device.type
    facts: dict[str, Callable[[torch.Tensor], Any]] = {
        "type": lambda t: type(t).__name__, "dtype": lambda t: t.dtype, "shape": lambda t: tuple(t.shape), "layout": lambda t: t.layout,
        "requires_grad": lambda t: t.requires_grad, "is_leaf": lambda t: t.is_leaf, "is_conj": lambda t: t.is_conj(), "is_neg": lambda t: t.is_neg(),
    }  # fmt: skip
    for name, fact in facts.items():
        a, b = fact(cpu), fact(npu)
        if a != b:
            raise MismatchError(f"{what}: {name} {a} on the cpu, {b} on the npu")
    if npu.device.type != expected:
        raise MismatchError(f"{what}: on {npu.device}, not on an {expected}")
    if _strides(cpu) != _strides(npu):
        small.strides.append(f"{what}: strides {_strides(cpu)} on the cpu, {_strides(npu)} on the npu")
    if small.values and expected == "npu":
        distance = _distance(cpu.detach(), npu.detach().to("cpu"))
        if distance is not None:
            small.distances[what] = distance


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides where they matter: not those of dimensions of size one, nor of empty or sparse tensors."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return None
    return tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """None if all elements have the same bits or are NaN in both; else the gap relative to the largest element."""
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    a, b = a.resolve_conj().resolve_neg().contiguous(), b.resolve_conj().resolve_neg().contiguous()
    if a.numel() == 0:
        return None
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    words = _WORDS[a.element_size()]
    equal = a.view(words) == b.view(words)
    if a.is_floating_point():
        equal |= a.isnan() & b.isnan()
    if bool(equal.all()):
        return None
    x, y = a.double(), b.double()
    if not torch.equal(x.isfinite(), y.isfinite()):
        return float("inf")
    finite = x.isfinite()
    scale = x[finite].abs().max().item() if bool(finite.any()) else 0.0
    gap = (x - y)[finite].abs().max().item() if bool(finite.any()) else float("inf")
    return gap / scale if scale else gap


def relations(call_inputs: list[torch.Tensor], result: Any) -> list[tuple[int, int, str]]:
    """Which tensors of a result are inputs, or share memory with one or with each other."""
    outputs = flatten(result)
    everything = [*call_inputs, *outputs]
    found = []
    for i in range(len(call_inputs), len(everything)):
        for j in range(i):
            if everything[i] is everything[j]:
                found.append((j, i, "is"))
            elif _shares(everything[i], everything[j]):
                found.append((j, i, "shares"))
    return found


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided or b.layout != torch.strided or a.device.type == "meta" or a.device != b.device:
        return False
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.untyped_storage().nbytes() > 0
