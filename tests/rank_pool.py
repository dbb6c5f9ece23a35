"""Long-lived worker processes that play the ranks of a distributed run.

Workers are forked once from a process that has imported torch, and then run many functions by name, each in a fresh
gloo process group with a short timeout. A rank that raises, dies or hangs becomes one exception in the test, with
every rank's traceback or stack.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GROUP_TIMEOUT_S = 20
DEADLINE_S = 25
RUNS_PER_WORKER = 15  # torch's caches keep the meshes of past tests alive, with their threads and sockets


class RankError(AssertionError):
    """Some rank failed. ``errors`` maps rank to (type name, message)."""

    def __init__(self, text: str, errors: dict[int, tuple[str, str]]) -> None:
        super().__init__(text)
        self.errors = errors


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    stacks: Path
    runs: int = 0


class RankPool:
    """Up to ``size`` workers, started when first needed.

    Args:
        size: Largest world size.
        device_type: ``"cpu"`` for gloo, ``"npu"`` for HCCL on NPUs (with gloo for objects), one for each rank.
    """

    def __init__(self, size: int = 8, device_type: str = "cpu") -> None:
        self._device_type = device_type
        self._context = mp.get_context("fork")
        self._folder = Path(tempfile.mkdtemp(prefix="rank_pool_"))
        self._workers: list[_Worker | None] = [None] * size

    def run(
        self,
        world_size: int,
        function: Callable[..., Any] | str,
        *args: Any,
        deadline_s: float = DEADLINE_S,
        environment: dict[str, str | None] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on every rank.

        Args:
            world_size: Number of ranks.
            function: A module-level function, or its name ``module:function``; it is sent by name.
            args: Positional arguments, picklable.
            deadline_s: After this many seconds the ranks' stacks are printed and the workers killed.
            environment: Variables to set, or to remove, for workers that only this run uses: they are new, bound to no
                device, and have no process group.
            kwargs: Keyword arguments, picklable.

        Returns:
            What each rank returned.

        Raises:
            RankError: A rank raised, died or hung.
        """
        if environment is not None:
            self._renew(world_size)
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        outcomes = self._attempt((name, args, kwargs), world_size, environment, deadline_s)
        if any(o[0] == "no group" for o in outcomes):  # nothing of the function has run: with new workers, once more
            self._renew(world_size)
            outcomes = self._attempt((name, args, kwargs), world_size, environment, deadline_s)
        if environment is not None:
            self._renew(world_size)
        failed = {r: o for r, o in enumerate(outcomes) if o[0] != "ok"}
        if failed:
            text = "\n".join(f"--- rank {r}: {o[0]}\n{o[-1]}" for r, o in failed.items())
            raise RankError(text, {r: (o[1], o[2]) for r, o in failed.items()})
        return [o[1] for o in outcomes]

    def _attempt(
        self, call: tuple[Any, ...], world_size: int, environment: dict[str, str | None] | None, deadline_s: float
    ) -> list[Any]:
        workers = [self._worker(rank) for rank in range(world_size)]
        store = tempfile.mktemp(prefix="store_", dir=self._folder)
        task = (*call, world_size, store, _free_port(), self._device_type, environment)
        for rank, worker in enumerate(workers):
            worker.pipe.send((*task, rank))
        return self._collect(workers, deadline_s)

    def _collect(self, workers: list[_Worker], deadline_s: float) -> list[Any]:
        outcomes: list[Any] = [None] * len(workers)
        end = time.monotonic() + deadline_s
        while any(o is None for o in outcomes) and time.monotonic() < end:
            waiting = {w.pipe: r for r, w in enumerate(workers) if outcomes[r] is None}
            for pipe in wait(list(waiting), timeout=max(0.0, min(1.0, end - time.monotonic()))):
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    outcomes[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    workers[rank].process.join()
                    outcomes[rank] = ("died", "died", "", f"exit code {workers[rank].process.exitcode}")
                    self._workers[rank] = None
                    end = min(end, time.monotonic() + 5)
        hung = [r for r, o in enumerate(outcomes) if o is None]
        for rank in hung:
            os.kill(workers[rank].process.pid, signal.SIGUSR1)
        if hung:
            time.sleep(0.5)
        for rank in hung:
            outcomes[rank] = ("hang", "hang", "", workers[rank].stacks.read_text()[-6000:])
            self._kill(rank)
        return outcomes

    def _worker(self, rank: int) -> _Worker:
        worker = self._workers[rank]
        if worker is not None and worker.runs >= RUNS_PER_WORKER:
            self._kill(rank)
            worker = None
        if worker is None or not worker.process.is_alive():
            stacks = self._folder / f"stacks_{rank}_{time.monotonic_ns()}"
            ours, theirs = self._context.Pipe()
            inherited = [w.pipe for w in self._workers if w is not None] + [ours]
            process = self._context.Process(target=_serve, args=(theirs, stacks, inherited), daemon=True)
            process.start()
            theirs.close()
            worker = self._workers[rank] = _Worker(process, ours, stacks)
        worker.runs += 1
        return worker

    def _renew(self, world_size: int) -> None:
        for rank in range(world_size):
            self._kill(rank)

    def _kill(self, rank: int) -> None:
        worker = self._workers[rank]
        if worker is not None:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
            self._workers[rank] = None

    def close(self) -> None:
        """End all workers."""
        for rank in range(len(self._workers)):
            self._kill(rank)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _serve(pipe: Connection, stacks: Path, inherited: list[Connection]) -> None:
    for other in inherited:
        other.close()
    mp.current_process()._config["daemon"] = False  # a daemon may not start the workers of a DataLoader
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        torch.set_num_threads(1)
        if not os.environ.get("RANK_POOL_VERBOSE"):
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        while True:
            try:
                task = pipe.recv()
            except (EOFError, KeyboardInterrupt):
                os._exit(0)
            pipe.send(_outcome(task))


def _start_group(device_type: str, store: str, rank: int, world_size: int) -> None:
    if device_type == "npu":
        torch.npu.set_device(rank)
    backend = "cpu:gloo,npu:hccl" if device_type == "npu" else "gloo"
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)


def _outcome(task: tuple[Any, ...]) -> tuple[Any, ...]:
    name, args, kwargs, world_size, store, port, device_type, environment, rank = task
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "rank_pool",
    }  # fmt: skip
    before = dict(os.environ)
    os.environ.update({k: str(v) for k, v in variables.items()})
    for key, value in (environment or {}).items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value
    kind = "no group"
    try:
        module, _, function = name.partition(":")
        if environment is None:
            _start_group(device_type, store, rank, world_size)
        kind = "error"
        torch.manual_seed(0)
        result = getattr(importlib.import_module(module), function)(*args, **kwargs)
        return ("ok", result)
    except BaseException as error:  # every failure of a rank is reported
        text = "".join(traceback.format_exception(error))
        return (kind, type(error).__name__, str(error), text[-6000:])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # groups that only reference cycles keep alive would leak threads and sockets into later tests
        os.environ.clear()
        os.environ.update(before)
