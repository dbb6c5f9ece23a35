"""Errors of the emulator: what, why, do."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """The emulator cannot be built, loaded or used as asked."""

    def __init__(self, what: str, why: str, do: str) -> None:
        super().__init__(f"{what}\nWhy: {why}\nDo: {do}")
