"""Random operators draw from torch_npu's own generators: their seed and offset choose the numbers.

So ``torch.npu.get_rng_state``, ``fork_rng`` and recomputation in activation checkpointing work as on a real NPU.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def _mix(seed: int, offset: int) -> int:
    x = (seed * 0x9E3779B97F4A7C15 + offset * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
    x ^= x >> 31
    x = (x * 0x7FB5D329728EA185) & _MASK
    return (x ^ (x >> 27)) >> 1


def cpu_generator(generator: torch.Generator | None, device: torch.device | None) -> torch.Generator:
    """A CPU generator for one call, chosen by an NPU generator's state, which then moves on.

    Args:
        generator: The caller's generator, or None for the device's default one.
        device: The device of the call, or None for the current one.
    """
    if generator is not None and generator.device.type == "cpu":
        return generator
    return generator_at(*draw(generator, device))


def draw(generator: torch.Generator | None, device: torch.device | None, steps: int = 4) -> tuple[int, int]:
    """Seed and offset of an NPU generator, which then moves on.

    Args:
        generator: An NPU generator, or None for the device's default one.
        device: The device of the call, or None for the current one.
        steps: How far it moves, a multiple of 4 as on a real NPU.
    """
    if generator is None:
        index = torch.npu.current_device() if device is None or device.index is None else device.index  # type: ignore[attr-defined]
        generator = torch.npu.default_generators[index]  # type: ignore[attr-defined]
    seed, offset = struct.unpack("<Qq", bytes(generator.get_state().tolist()[-16:]))
    generator.set_offset(offset + steps)
    return seed, offset


def generator_at(seed: int, offset: int) -> torch.Generator:
    """The CPU generator that stands for a seed and an offset: the same ones give the same numbers."""
    own = torch.Generator("cpu")
    own.manual_seed(_mix(seed, offset))
    return own


@contextmanager
def seeded_default(device: torch.device | None) -> Iterator[None]:
    """For operators without a generator argument (dropout): seed the CPU's default one, and put it back after."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(cpu_generator(None, device).initial_seed())
    try:
        yield
    finally:
        torch.set_rng_state(before)
