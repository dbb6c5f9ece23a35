"""Bytes that this process sent over HCCL, as a ring algorithm sends them.

What each rank sends to the next one: an all-reduce 2 (n-1)/n of its bytes, gathering and scattering n-1 pieces, a
broadcast the whole; point to point and all-to-all what they carry.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from ascend_emulator.load import hccl


class Traffic(NamedTuple):
    """Bytes sent within the node and to other nodes."""

    in_node: int
    cross_node: int


def traffic() -> Traffic:
    """Bytes sent since the start, or since :func:`reset`."""
    count = hccl().emu_traffic
    count.restype = ctypes.c_uint64
    return Traffic(count(0), count(1))


def reset() -> None:
    """Start counting anew."""
    hccl().emu_reset_traffic()
