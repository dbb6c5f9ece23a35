"""Put the emulated CANN under ``torch_npu``, and the operator layer over it.

The libraries are loaded by path before ``torch_npu`` is; the loader then takes them for the ones that ``torch_npu``
names, so ``LD_LIBRARY_PATH`` is not needed. The operator layer is installed right after ``torch_npu`` was imported,
by whomever: torch imports it by itself.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.util
import os
import secrets
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ascend_emulator.build import LIBRARIES, build
from ascend_emulator.errors import EmulatorError

SITE = Path(sys.prefix) / "npu-site"
"""Where ``make`` puts torch_npu: beside the environment, because with it inside, ``import torch`` fails without CANN."""

_loaded: list[ctypes.CDLL] = []


def activate(devices: int | None = None, soc: str | None = None) -> None:
    """Make this process, and the processes it starts, see emulated NPUs.

    Args:
        devices: Number of NPUs; default 8, or what ``ASCEND_EMULATOR_DEVICES`` says.
        soc: SoC name, such as ``Ascend910B1``.

    Raises:
        EmulatorError: torch was imported before with a torch_npu that is not emulated, or torch_npu is missing.
    """
    prepare(devices, soc)
    importlib.import_module("torch")
    importlib.import_module("torch_npu")


def prepare(devices: int | None = None, soc: str | None = None) -> None:
    """Do what must happen before torch is imported; see :func:`activate`."""
    if "torch_npu" in sys.modules and not _loaded:
        raise EmulatorError(
            "torch_npu is loaded already.",
            "The emulated CANN must be there before it.",
            "Call ascend_emulator.activate() before importing torch.",
        )
    settings = {"ASCEND_EMULATOR": "1", "TASK_QUEUE_ENABLE": "0"}
    if os.environ.get("TASK_QUEUE_ENABLE", "0") != "0":
        warnings.warn(
            f"TASK_QUEUE_ENABLE={os.environ['TASK_QUEUE_ENABLE']} is set to 0: operators of the emulated NPU run in the "
            "calling thread, and there is no queue to put them into.",
            stacklevel=3,
        )
    if not os.environ.get("ASCEND_EMULATOR_MACHINE"):
        settings["ASCEND_EMULATOR_MACHINE"] = secrets.token_hex(8)
        links = Path("/dev/shm/ascend-emulator-links-" + settings["ASCEND_EMULATOR_MACHINE"])
        atexit.register(links.unlink, missing_ok=True)
    if devices is not None:
        settings["ASCEND_EMULATOR_DEVICES"] = str(devices)
    if soc is not None:
        settings["ASCEND_EMULATOR_SOC"] = soc
    os.environ.update(settings)
    _add_paths()
    if not _loaded:
        folder = build()
        mode = ctypes.RTLD_GLOBAL  # so that a preloaded library finds the functions that it wraps
        _loaded.extend(ctypes.CDLL(str(folder / f"lib{name}.so"), mode) for name in LIBRARIES)
        importlib.import_module("ascend_emulator.faults").from_environment()
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)  # type: ignore[arg-type]


def runtime() -> ctypes.CDLL:
    """The loaded ``libascendcl.so``.

    Raises:
        EmulatorError: The emulator is not active in this process.
    """
    return _library(0)


def hccl() -> ctypes.CDLL:
    """The loaded ``libhccl.so``; see :func:`runtime`."""
    return _library(1)


def _library(index: int) -> ctypes.CDLL:
    if not _loaded:
        raise EmulatorError(
            "The emulator is not active in this process.",
            "Its libraries are loaded before torch is imported.",
            "Call ascend_emulator.activate(), or run under python -m ascend_emulator.",
        )
    return _loaded[index]


def _add_paths() -> None:
    """Let this process and its children find torch_npu, this package, and the hook for children."""
    wanted = [str(Path(__file__).parent / "site"), str(Path(__file__).parent.parent)]
    if importlib.util.find_spec("torch_npu") is None:
        if not (SITE / "torch_npu").is_dir():
            raise EmulatorError(
                "torch_npu is not installed.",
                f"It is neither importable nor in {SITE}.",
                f"pip install --no-deps --target {SITE} torch_npu==2.13.0",
            )
        sys.path.append(str(SITE))
    if str(SITE) in sys.path:
        wanted.append(str(SITE))
    present = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    os.environ["PYTHONPATH"] = os.pathsep.join([p for p in wanted if p not in present] + present)


class _AfterTorchNpu:
    """Installs the operator layer right after ``torch_npu`` was imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch_npu":
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                return _wrap(spec)
        return None


def _wrap(spec: ModuleSpec) -> ModuleSpec:
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        importlib.import_module("ascend_emulator.ops").install()
        importlib.import_module("ascend_emulator.fused").install()

    loader.exec_module = exec_module
    return spec


_FINDER = _AfterTorchNpu()
