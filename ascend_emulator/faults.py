"""Faults on demand, for tests: late or killed ranks, corrupted elements, HCCL errors, a device that is busy at first.

In a process: :func:`inject` and :func:`clear`. For processes that a launcher starts: the environment variable
``ASCEND_EMULATOR_FAULTS``, entries separated by ``;``::

    ASCEND_EMULATOR_FAULTS="delay rank=1 op=AllReduce call=3 seconds=2; busy attempts=2"

======== ==================================================================================================
kind     what happens
======== ==================================================================================================
delay    the operation starts ``seconds`` late
kill     the process ends by SIGKILL when the operation starts
corrupt  bit ``bit`` (default: the highest of a float's exponent) of element ``element`` (0) of the result flips
error    the call returns the HCCL error ``code`` (9, a timeout)
busy     the first ``attempts`` (1) uses of a device in a process fail (507033)
======== ==================================================================================================

``rank`` is the environment variable RANK of the process, any by default. ``op`` is the name of an operation: AllReduce,
Broadcast, Reduce, AllGather, ReduceScatter, Scatter, AlltoAll, Send, Recv, BatchSendRecv, Barrier, CommInit; any by
default. ``call`` is the first matching call that is hit (1), ``times`` the number of calls from there (1; 0 for all).
"""

from __future__ import annotations

import os

from ascend_emulator.errors import EmulatorError
from ascend_emulator.load import runtime

VARIABLE = "ASCEND_EMULATOR_FAULTS"
_active: list[str] = []


def inject(kind: str, **settings: object) -> None:
    """Add a fault in this process.

    Args:
        kind: ``delay``, ``kill``, ``corrupt``, ``error`` or ``busy``.
        settings: As listed above, such as ``rank=1, op="AllReduce", seconds=2.0``.

    Raises:
        EmulatorError: The kind or a setting is unknown.
    """
    entry = " ".join([kind, *(f"{k}={v}" for k, v in settings.items())])
    _set([*_active, entry])
    _active.append(entry)


def clear() -> None:
    """Take all faults away, those of the environment as well."""
    _active.clear()
    _set([])


def from_environment() -> None:
    """Set the faults that the environment variable names.

    Raises:
        EmulatorError: An entry cannot be read.
    """
    entries = [e.strip() for e in os.environ.get(VARIABLE, "").split(";") if e.strip()]
    _set(entries)
    _active[:] = entries


def _set(entries: list[str]) -> None:
    wrong = runtime().emu_set_faults(";".join(entries).encode())
    if wrong:
        entry = entries[wrong - 1] if wrong <= len(entries) else "the list is too long"
        raise EmulatorError(
            f"The fault cannot be read: {entry!r}.",
            "It is a kind and settings, such as 'delay rank=1 op=AllReduce seconds=2'.",
            "Use the kinds delay, kill, corrupt, error and busy, and the settings in ascend_emulator/faults.py.",
        )
