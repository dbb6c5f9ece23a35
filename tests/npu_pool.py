"""The pool of emulated NPU ranks, as the tests see it: the same ``run`` as :class:`RankPool`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from rank_pool import RankError

HERE = Path(__file__).parent


class NpuPool:
    """Ranks on emulated NPUs, forked by a process of their own that is started when first needed.

    Args:
        environment: Environment variables of the machine, besides this process's own.
    """

    def __init__(self, **environment: str) -> None:
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Run a module-level function on every rank; see :meth:`RankPool.run`."""
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        self._pipe.send((world_size, f"{function.__module__}:{function.__qualname__}", args, options))
        outcome = self._pipe.recv()
        if outcome[0] == "error":
            raise RankError(outcome[1], outcome[2])
        return outcome[1]

    def _start(self) -> None:
        address = str(Path(tempfile.mkdtemp(prefix="npu_pool_")) / "socket")
        command = [sys.executable, "-m", "ascend_emulator", "--devices", "8", str(HERE / "npu_zygote.py"), address]
        self._process = subprocess.Popen(command, cwd=HERE.parent, env={**os.environ, **self._environment})
        end = time.monotonic() + 120
        while self._pipe is None:
            try:
                self._pipe = Client(address, "AF_UNIX")
            except (FileNotFoundError, ConnectionRefusedError):
                if self._process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the emulated machine did not start") from None
                time.sleep(0.1)

    def close(self) -> None:
        """End the machine and its ranks."""
        if self._pipe is not None:
            self._pipe.send(None)  # closing is not enough: ranks forked since then hold the socket open
            self._pipe.close()
        if self._process is not None:
            self._process.wait(30)
