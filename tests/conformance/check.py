"""The comparisons of one operator with one sample; each runs the same call on the CPU and on the NPU.

A check returns ``"equal"``, ``"refused"`` (both devices raised the same error) or None (it does not apply here), and
raises :class:`~conformance.compare.MismatchError` otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from conformance.compare import MismatchError, Outcome, alike, attempt, relations, same
from conformance.samples import Call, flatten, move, place

Verdict = str | None


class Case:
    """One operator with one sample.

    Args:
        op: The operator's entry in the database.
        sample: Its sample, on the CPU.
    """

    def __init__(self, op: Any, sample: Any) -> None:
        self.op, self.sample = op, sample
        self.factory = op.is_factory_function or op.name == "normal"

    def place(self, device: str, *, grad: bool = False, sample: Any = None) -> Call:
        """A fresh copy of the sample, or of one made from it."""
        return place(self.sample if sample is None else sample, device, grad=grad, factory=self.factory)

    @cached_property
    def reference(self) -> Outcome:
        """The plain call on the CPU; says also whether it drew random numbers."""
        outcome = attempt(self.place("cpu").run, self.op.op)
        self.random = not torch.equal(torch.get_rng_state(), _fresh_state())
        return outcome

    @property
    def values(self) -> bool:
        """Whether values can be compared."""
        return not (self.reference and self.random) and not self.op.has_nondeterministic_output

    def both(self, action: Callable[[Call], Any], *, grad: bool = False, sample: Any = None) -> tuple[Outcome, Outcome]:
        """Do something with a fresh copy of the sample on each device."""
        cpu, npu = (attempt(action, self.place(d, grad=grad, sample=sample)) for d in ("cpu", "npu"))
        return cpu, npu


_state: list[torch.Tensor] = []


def _fresh_state() -> torch.Tensor:
    if not _state:
        _state.append(torch.Generator().manual_seed(0).get_state())
    return _state[0]


def _compare(case: Case, action: Callable[[Call], Any], what: str, *, grad: bool = False, sample: Any = None) -> Verdict:
    cpu, npu = case.both(action, grad=grad, sample=sample)
    if not alike(cpu, npu):
        return "refused"
    same(cpu.value, npu.value, what, values=case.values)
    return "equal"


def _observed(function: Any, call: Call) -> tuple[Any, Any, Any]:
    """The result, the inputs after the call, and what shares memory."""
    result = call.run(function)
    return result, [t.detach() for t in call.tensors()], relations(call.tensors(), result)


def forward(case: Case) -> Verdict:
    """The result, its memory layout, what it shares, and what became of the inputs."""
    return _compare(case, lambda call: _observed(case.op.op, call), "result")


def method(case: Case) -> Verdict:
    """The same through the tensor's method."""
    variant = case.op.method_variant
    if variant is None or variant is case.op.op:
        return None
    return _compare(case, lambda call: _observed(variant, call), "result")


def cotangents(outputs: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    """The same random gradients of the outputs on every device."""
    generator = torch.Generator().manual_seed(1)
    return [move(torch.randn(o.shape, dtype=o.dtype, generator=generator), device) for o in outputs]


def gradients(result: Any, inputs: list[torch.Tensor], device: str) -> Any:
    """The gradients of all differentiable inputs."""
    outputs = [o for o in flatten(result) if o.requires_grad]
    inputs = [t for t in inputs if t.requires_grad]
    if not outputs or not inputs:
        return None
    return torch.autograd.grad(outputs, inputs, cotangents(outputs, device), allow_unused=True)


def _differentiates(case: Case) -> bool:
    return case.op.supports_autograd and any(t.requires_grad for t in flatten_sample(case.sample))


def flatten_sample(sample: Any) -> list[torch.Tensor]:
    """The tensors of a sample."""
    return flatten((sample.input, sample.args, sample.kwargs))


def _forward_and_backward(case: Case, call: Call) -> Any:
    inputs = call.tensors()
    result = case.sample.output_process_fn_grad(call.run(case.op.op))
    return result, gradients(result, inputs, inputs[0].device.type)


def backward(case: Case) -> Verdict:
    """The result with gradients recorded, and the gradients."""
    if not _differentiates(case):
        return None
    return _compare(case, lambda call: _forward_and_backward(case, call), "(result, gradients)", grad=True)


def noncontiguous(case: Case) -> Verdict:
    """Every input is a strided view; with gradients where the operator has any."""
    if case.reference.error is not None:
        return None
    sample = case.sample.noncontiguous()
    if _differentiates(case):
        return _compare(case, lambda call: _forward_and_backward(case, call), "(result, gradients)", grad=True, sample=sample)
    return _compare(case, lambda call: call.run(case.op.op), "result", sample=sample)


def empty(case: Case) -> Verdict:
    """The inputs' first dimension, where it is as long as the first input's, has size zero; so have the gradients."""
    tensors = flatten_sample(case.sample)
    if not tensors or any(t.layout != torch.strided for t in tensors) or tensors[0].dim() == 0 or tensors[0].numel() == 0:
        return None
    length = tensors[0].shape[0]
    cut = lambda t: t[:0] if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == length else t  # noqa: E731
    sample = case.sample.transform(cut)
    for new, old in zip(flatten_sample(sample), tensors, strict=True):
        new.requires_grad_(old.requires_grad)
    if _differentiates(case):
        return _compare(case, lambda call: _forward_and_backward(case, call), "(result, gradients)", grad=True, sample=sample)
    return _compare(case, lambda call: call.run(case.op.op), "result", sample=sample)


def seeded(case: Case) -> Verdict:
    """Random numbers: the same seed gives the same ones, and the next call gives others if it does so on the CPU."""
    if case.reference.error is not None or not case.random:
        return None

    def draw(device: str, count: int) -> list[Any]:
        """Two results with the same seed, and some more that follow."""
        first, *rest = [attempt(case.place(device).run, case.op.op) for _ in range(2)]
        error = next((o.error for o in (first, *rest) if o.error is not None), None)
        if error is not None:
            raise MismatchError(f"cpu succeeds, npu raises {error!r}")
        return [first.value, rest[0].value, *(case.place(device).run(case.op.op) for _ in range(count))]

    first, again, *later = draw("npu", 8)
    if not _equal(first, again):
        raise MismatchError("the same seed gives different numbers")
    if all(_equal(first, value) for value in later):
        first, _, *later = draw("cpu", 8)
        if not all(_equal(first, value) for value in later):
            raise MismatchError("the generator does not move on")
    return "equal"


def _equal(a: Any, b: Any) -> bool:
    left, right = flatten(a), flatten(b)
    if not left:
        return a == b
    return all(torch.equal(x.cpu().nan_to_num(), y.cpu().nan_to_num()) for x, y in zip(left, right, strict=True))
