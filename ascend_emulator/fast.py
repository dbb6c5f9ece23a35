"""The fast operator layer: compiled on first use, where there is a C++ compiler."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch

from ascend_emulator import rules
from ascend_emulator.build import build_operators
from ascend_emulator.errors import EmulatorError


def fast_layer() -> Callable[[str, dict[str, int]], None] | None:
    """Load the fast layer.

    Returns:
        A function that registers it for operators of a namespace, given as ``{name: flags}``; or None if Python is to
        do all the work: ``ASCEND_EMULATOR_OPS=python``, no C++ compiler, or a SoC without bfloat16, whose rules only
        the Python layer knows.

    Raises:
        EmulatorError: ``ASCEND_EMULATOR_OPS`` is neither ``cpp`` nor ``python``, or is ``cpp`` and cannot be had.
    """
    asked = os.environ.get("ASCEND_EMULATOR_OPS", "")
    if asked not in ("", "cpp", "python"):
        raise EmulatorError(f"ASCEND_EMULATOR_OPS={asked} is unknown.", "There are two operator layers.", "Use cpp or python.")
    if asked == "python" or rules.lacks_bfloat16():
        return None
    library = build_operators(*_places())
    if library is None:
        if asked == "cpp":
            raise EmulatorError("No C++ compiler was found.", "ASCEND_EMULATOR_OPS=cpp needs one.", "Install g++ or set CXX.")
        return None
    register = ctypes.CDLL(str(library)).emu_register

    def install(namespace: str, operators: dict[str, int]) -> None:
        names = (ctypes.c_char_p * len(operators))(*(n.encode() for n in operators))
        flags = (ctypes.c_int64 * len(operators))(*operators.values())
        done = register(namespace.encode(), names, flags, len(operators))
        if done != len(operators):
            raise EmulatorError(f"{len(operators) - done} operators were not found.", "torch changed.", "Report this.")

    return install


def _places() -> tuple[str, Path, Path]:
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None and spec.origin is not None  # this runs while it is being imported
    return torch.__version__, Path(torch.__file__).parent, Path(spec.origin).parent
