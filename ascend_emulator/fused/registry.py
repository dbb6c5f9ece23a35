"""The table of formulas: which ``npu::`` operator is computed by which function, and where its meaning comes from.

A formula works on CPU tensors and takes the operator's arguments by the names of its schema. It names every argument:
as a parameter, as one that only concerns speed, or as one that it refuses. So nothing is accepted and ignored by accident.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DOCS = "torch_npu API documentation"
SOURCE = "public op-plugin source"
OP_TEST = "public op-plugin tests"
TRAINING = "public MindSpeed code"
NAME = "name and schema"

NPU_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Formula:
    """How one operator is computed.

    Attributes:
        name: Operator in the ``npu`` namespace, with its overload: ``npu_rms_norm``, ``npu_apply_adam.out``.
        function: The formula.
        source: Where the convention comes from.
        checked: What the tests compare it with.
        backward: Operators that torch_npu's own derivative calls; empty if it has no derivative.
        ignored: Arguments that only concern speed or repeat what the formula knows.
        refused: Arguments that must keep their default.
        aliases: The formula may return the caller's own tensors.
        any_type: Takes tensors of types other than float16, bfloat16, float32 among the floats.
        host_arguments: Tensors that are on the CPU.
        host_results: Places of results that stay on the CPU.
        wants_device: The function takes the device of the call as ``device``.
        no_gradient: Arguments whose gradient an NPU does not compute, so they must not require one.
    """

    name: str
    function: Callable[..., Any]
    source: str
    checked: str
    backward: tuple[str, ...] = ()
    ignored: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    aliases: bool = False
    any_type: bool = False
    host_arguments: frozenset[str] = frozenset()
    host_results: frozenset[int] = frozenset()
    wants_device: bool = False
    no_gradient: frozenset[str] = frozenset()


FORMULAS: dict[str, Formula] = {}
"""All formulas, by the operator's name."""


def formula(
    *names: str,
    source: str,
    checked: str,
    backward: tuple[str, ...] | str = (),
    ignored: str = "",
    refused: str = "",
    aliases: bool = False,
    any_type: bool = False,
    host_arguments: str = "",
    host_results: tuple[int, ...] = (),
    wants_device: bool = False,
    no_gradient: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: this function computes these operators; see :class:`Formula`. Names of arguments are separated by blanks."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if name in FORMULAS:
                raise ValueError(f"{name} has two formulas")
            FORMULAS[name] = Formula(
                name,
                function,
                source,
                checked,
                (backward,) if isinstance(backward, str) else backward,
                frozenset(ignored.split()),
                frozenset(refused.split()),
                aliases,
                any_type,
                frozenset(host_arguments.split()),
                frozenset(host_results),
                wants_device,
                frozenset(no_gradient.split()),
            )
        return function

    return register


def table() -> str:
    """The operators as a Markdown table, for ``docs/emulator_operators.md``."""
    rows = ["| operator | backward | convention from | compared with |", "|---|---|---|---|"]
    for name in sorted(FORMULAS):
        f = FORMULAS[name]
        backward = ", ".join(f"`{b}`" for b in f.backward) or "none"
        rows.append(f"| `{name}` | {backward} | {f.source} | {f.checked} |")
    return "\n".join(rows)
