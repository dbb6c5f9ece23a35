"""The comparisons that write: in-place variants, ``out=``, and writing through views."""

from __future__ import annotations

from typing import Any

import torch

from conformance.check import Case, Verdict, _compare, gradients
from conformance.compare import MismatchError, attempt, relations
from conformance.samples import Call, flatten, move


def _variant(case: Case) -> Any:
    variant = case.op.inplace_variant
    return None if variant is None or not isinstance(case.sample.input, torch.Tensor) else variant


def in_place(case: Case) -> Verdict:
    """The in-place variant: the result is the input itself."""
    variant = _variant(case)
    if variant is None:
        return None

    def action(call: Call) -> Any:
        result = call.run(variant)
        return result is call.input, result, [t.detach() for t in call.tensors()]

    return _compare(case, action, "(is the input, result, inputs)")


def in_place_strided(case: Case) -> Verdict:
    """In place on a transposed view with an offset: the memory around it is untouched."""
    variant = _variant(case)
    if variant is None or case.sample.input.layout != torch.strided or case.sample.input.dim() < 2:
        return None

    def action(call: Call) -> Any:
        shape = call.input.shape
        base = torch.zeros((shape[-1] + 1, *shape[1:-1], shape[0] + 1), dtype=call.input.dtype, device=call.input.device)
        view = base[1:, ..., :-1].transpose(0, -1)
        view.copy_(call.input)
        result = Call(view, call.args, call.kwargs).run(variant)
        return result is view, view, base

    return _compare(case, action, "(is the input, view, memory)")


def in_place_gradient(case: Case) -> Verdict:
    """In place with gradients recorded."""
    variant = _variant(case)
    if variant is None or not case.op.supports_inplace_autograd or not case.sample.input.requires_grad:
        return None

    def action(call: Call) -> Any:
        inputs = call.tensors()
        result = Call(call.input.clone(), call.args, call.kwargs).run(variant)
        return result, gradients(result, inputs, call.input.device.type)

    return _compare(case, action, "(result, gradients)", grad=True)


OUT_KINDS = ("right", "empty", "longer", "strided", "dtype", "device")


def out(case: Case, kind: str) -> Verdict:
    """``out=`` tensors of the right shape, ones that must grow, strided ones, and ones of a wrong type or device."""
    expected = case.reference.value
    tensors = flatten(expected)
    plain = isinstance(expected, torch.Tensor) or (isinstance(expected, tuple) and len(tensors) == len(expected))
    if not case.op.supports_out or case.reference.error is not None or not tensors or not plain:
        return None
    if kind == "strided" and all(t.dim() < 2 for t in tensors):
        return None
    if kind == "device":
        return _wrong_device(case, expected)

    def action(call: Call) -> Any:
        device = call.tensors()[0].device.type if call.tensors() else _device(call)
        given = _map(expected, lambda t: _out_like(t, kind, device))
        places = [t.data_ptr() for t in flatten(given)]
        result = call.run(case.op.op, out=given)
        own = [a is b for a, b in zip(flatten(result), flatten(given), strict=True)]
        kept = [t.data_ptr() == p for t, p in zip(flatten(given), places, strict=True)] if kind != "empty" else None
        return own, kept, given

    return _compare(case, action, "(result is out, same memory, out)")


def _device(call: Call) -> str:
    return torch.device(call.kwargs.get("device") or "cpu").type


def _map(expected: Any, function: Any) -> Any:
    return function(expected) if isinstance(expected, torch.Tensor) else tuple(function(t) for t in expected)


def _out_like(tensor: torch.Tensor, kind: str, device: str) -> torch.Tensor:
    shape, dtype = list(tensor.shape), tensor.dtype
    if kind == "empty":
        shape = [0]
    elif kind == "longer":
        shape = [2, *shape]
    elif kind == "dtype":
        dtype = torch.int64 if dtype.is_floating_point or dtype.is_complex else torch.float32
    made = torch.ones(shape, dtype=dtype)
    if kind == "strided" and tensor.dim() > 1:
        made = torch.ones([*shape[:-2], shape[-1] + 1, shape[-2]], dtype=dtype).transpose(-1, -2)[..., 1:]
    return move(made, device)


def _wrong_device(case: Case, expected: Any) -> Verdict:
    """A CPU tensor cannot take an NPU's result."""
    call = case.place("npu")
    if not call.tensors():
        return None
    outcome = attempt(call.run, case.op.op, out=_map(expected, lambda t: _out_like(t, "right", "cpu")))
    if not isinstance(outcome.error, RuntimeError):
        raise MismatchError(f"a CPU tensor as out= of NPU tensors: {outcome.error!r}"[:300])
    return "refused"


def through_views(case: Case) -> Verdict:
    """Outputs that share the input's memory: writing to them is seen in the input."""
    if not _views(case):
        return None

    def action(call: Call) -> Any:
        for view in _shared(call, call.run(case.op.op)):
            view.zero_()
        return [t.detach() for t in call.tensors()]

    return _compare(case, action, "inputs")


def through_views_gradient(case: Case) -> Verdict:
    """The same with gradients recorded: autograd sees the write through the view."""
    if not _views(case) or not isinstance(case.sample.input, torch.Tensor) or not case.sample.input.requires_grad:
        return None

    def action(call: Call) -> Any:
        copy = call.input.clone()
        again = Call(copy, call.args, call.kwargs)
        for view in _shared(again, again.run(case.op.op)):
            view.mul_(3)
        return copy, gradients(copy, call.tensors(), copy.device.type)

    return _compare(case, action, "(input, gradients)", grad=True)


def _views(case: Case) -> bool:
    if case.reference.error is not None:
        return False
    call = case.place("cpu")
    return bool(_shared(call, call.run(case.op.op)))


def _shared(call: Call, result: Any) -> list[torch.Tensor]:
    inputs, outputs = call.tensors(), flatten(result)
    found = {i - len(inputs) for j, i, _ in relations(inputs, result) if j < len(inputs)}
    return [outputs[i] for i in sorted(found)]
