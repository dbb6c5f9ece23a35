"""The operator layer of the emulated NPU does what the CPU does: cases that were wrong once."""

from __future__ import annotations

import operator_cases
from npu_pool import NpuPool


def test_out_tensors(npu_pool: NpuPool) -> None:
    """They keep their memory and strides where they fit, and torch's warning comes where they grow."""
    (seen,) = npu_pool.run(1, operator_cases.out_tensors)
    assert [name for name, (cpu, npu) in seen.items() if name != "grows" and cpu != npu] == []
    cpu, npu = seen["grows"]
    assert cpu[0] is npu[0] is True and cpu[2:] == npu[2:]
    assert [seen[n][1][4] for n in ("fits", "empty", "shrinks", "grows")] == [0, 0, 1, 1]


def test_layout_that_the_kernel_chooses(npu_pool: NpuPool) -> None:
    (seen,) = npu_pool.run(1, operator_cases.out_layout)
    assert [name for name, (cpu, npu) in seen.items() if cpu != npu] == []


def test_overlapping_operands(either: tuple[str, NpuPool]) -> None:
    """What the CPU's kernels refuse to write while they read it."""
    (seen,) = either[1].run(1, operator_cases.overlaps)
    assert [name for name, (cpu, npu) in seen.items() if cpu != npu] == []
    assert [name for name, (cpu, _) in seen.items() if cpu.startswith("accepted")] == ["itself", "same tensor"]


def test_numbers_in_place_of_tensors(either: tuple[str, NpuPool]) -> None:
    assert either[1].run(1, operator_cases.numbers) == [[[-1.0, -1.0], [-1.0, -1.0], [2.0, 2.0], [-1.0, -1.0]]]


def test_derivatives_are_torchs(either: tuple[str, NpuPool]) -> None:
    assert either[1].run(1, operator_cases.derivatives) == [[]]


def test_compositions_are_torchs(npu_pool: NpuPool) -> None:
    """torch's C++ compositions, not the ones in Python that it keeps for tracing."""
    assert npu_pool.run(1, operator_cases.compositions) == [[]]


def test_conjugating_in_place(either: tuple[str, NpuPool]) -> None:
    assert either[1].run(1, operator_cases.conjugates) == [[True] * 4]
