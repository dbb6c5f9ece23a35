"""Errors that answer three questions: what happened, why, and what to do about it.

Every error a user can meet is one of these classes. They carry the three answers as attributes, so that a front end
can print them in its own way. Checks of our own invariants use ``assert`` and are not in this file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AscendError(Exception):
    """Base of all errors raised by this distribution.

    Args:
        what: What happened, with the offending values.
        why: The rule or fact that makes it an error.
        do: What the reader can change to get past it.
    """

    def __init__(self, what: str, why: str = "", do: str = "") -> None:
        self.what, self.why, self.do = what, why, do
        lines = [what]
        if why:
            lines.append(f"Why: {why}")
        if do:
            lines.append(f"Do: {do}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[AscendError], tuple[str, str, str]]:
        """Pickle by the three answers, so that an error can travel between ranks."""
        return (type(self), (self.what, self.why, self.do))


class ConfigError(AscendError, ValueError):
    """A configuration value is unknown, out of range, or does not fit with another one."""


class NotAvailableError(ConfigError):
    """A documented option whose mechanism this version does not have yet."""


class ModelError(AscendError, RuntimeError):
    """The model, or the way it is called, cannot be run in the requested layout."""


class DeviceError(AscendError, RuntimeError):
    """The requested device is missing or not usable."""


class PeerError(AscendError, RuntimeError):
    """Another rank failed; this rank stops with it instead of waiting for a timeout."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the closest of ``known``, or lists them all when none is close.

    Args:
        name: The unknown word.
        known: The words that would have been accepted.

    Returns:
        A sentence fragment such as ``did you mean 'schedule'?``.
    """
    words = sorted(known)
    by_lower = {w.lower(): w for w in words}
    close = [by_lower[w] for w in difflib.get_close_matches(name.lower(), list(by_lower), n=1)]
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(words)}"
