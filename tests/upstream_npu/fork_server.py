"""Processes of the tests come from a server that has imported torch_npu once, instead of importing it again.

A test that spawns eight ranks would otherwise spend half a minute on imports. A child still gets a fresh process, its
arguments pickled, the parent's environment and search path, and runs its exit handlers; no device was used before the fork.
The runner and all processes of the tests share one server.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing.context as context
import multiprocessing.forkserver as forkserver
import multiprocessing.spawn as spawn
import os
import signal
import sys
from multiprocessing import util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch",
    "torch_npu",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed._tensor.common_dtensor",
    "torch_npu.testing.testcase",
    "pytest",
]
_preparation = spawn.get_preparation_data
_server: Any = forkserver._forkserver


def _restore(environment: dict[str, str], group: int, address: str, data: dict[str, Any]) -> dict[str, Any]:
    """Runs first in a child: become a child of the process that asked, as far as one can."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.clear()
    os.environ.update(environment)
    if "torch" in sys.modules:
        sys.modules["torch"].distributed.set_debug_level_from_env()  # as the import of torch does
    if group:
        os.setpgid(0, group)
        _say_into(environment["UPSTREAM_OUT"])
    _server._forkserver_address = address
    _server.ensure_running = lambda: None  # it runs: it made this process
    util.Finalize(None, atexit._run_exitfuncs, exitpriority=-100)
    return data


def _say_into(out: str) -> None:
    with open(out, "ab") as stream, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)


class _Data(dict):  # type: ignore[type-arg]
    """Preparation data that brings the parent's environment, process group and server along."""

    def __reduce__(self) -> Any:
        group = os.getpgid(0) if "UPSTREAM_LOG" in os.environ else 0
        return _restore, (dict(os.environ), group, _server._forkserver_address, dict(self))


class _Process(context.ForkServerProcess):
    _start_method = "spawn"


class _Context(context.ForkServerContext):
    _name = "spawn"
    Process = _Process  # type: ignore[assignment]


def install() -> None:
    """Let this process's "spawn" start children from the server."""
    spawn.get_preparation_data = lambda name: _Data(_preparation(name))
    default = context._default_context
    if getattr(default._actual_context, "_name", "") == "spawn":  # someone has set the start method already
        default._actual_context = _Context()
    context._concrete_contexts["spawn"] = _Context()  # type: ignore[assignment]
    forkserver.set_forkserver_preload(PRELOAD)


class ForkedFile:
    """A process that runs one test file, with the part of ``subprocess.Popen`` that the runner needs."""

    def __init__(self, arguments: list[str], environment: dict[str, str], folder: Path, out: Path) -> None:
        install()
        _server.ensure_running()  # its address goes into what is pickled
        before = dict(os.environ)
        os.environ.update(environment)
        del os.environ["UPSTREAM_LOG"]  # the file's process leads a group of its own
        try:
            self._process: BaseProcess = _Process(target=_run_file, args=(arguments, environment, str(folder), str(out)))
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """Exit status, minus the signal's number, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._process.exitcode

    def wait(self) -> None:
        """Wait for the end."""
        self._process.join()


def _run_file(arguments: list[str], environment: dict[str, str], folder: str, out: str) -> None:
    os.setpgid(0, 0)
    os.environ.update(environment)
    os.environ["UPSTREAM_OUT"] = out
    _say_into(out)
    os.chdir(folder)
    sys.path[:0] = [p for p in environment["PYTHONPATH"].split(os.pathsep) if p not in sys.path]
    import pytest

    sys.argv = ["pytest", *arguments]
    sys.exit(int(pytest.main(arguments)))
