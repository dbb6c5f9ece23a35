"""Several nodes on one host: the same command once for each node, each seeing its own devices.

Each copy finds its place in the variables that launchers read (torchrun's ``PET_*``, and ``NODE_RANK``, ``GROUP_RANK``,
``MASTER_ADDR``, ``MASTER_PORT``); ``{node}`` and ``{port}`` in its arguments are replaced as well.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time


def run_nodes(nodes: int, options: list[str], command: list[str]) -> int:
    """Run a command on every node and wait.

    Args:
        nodes: Number of nodes.
        options: Options of ``python -m ascend_emulator`` for each.
        command: What to run.

    Returns:
        The exit code: that of the first node that failed, whose peers are then terminated.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    processes = []
    for node in range(nodes):
        own = [a.replace("{node}", str(node)).replace("{port}", port) for a in command]
        start = [sys.executable, "-m", "ascend_emulator", *options, *own]
        processes.append(subprocess.Popen(start, env={**os.environ, **_environment(nodes, node, port)}))
    try:
        return _wait(processes)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        _end(processes)


def _environment(nodes: int, node: int, port: str) -> dict[str, str]:
    place = {"NNODES": str(nodes), "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torchrun = {f"PET_{name}": value for name, value in place.items()}
    return {
        **place,
        **torchrun,
        "GROUP_RANK": str(node),
        "ASCEND_EMULATOR_NODE": str(node),
        "ASCEND_EMULATOR_NODES": str(nodes),
    }


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [p.poll() for p in processes]
        failed = [c for c in codes if c]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if all(c == 0 for c in codes):
            return 0
        time.sleep(0.1)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for p in processes:
        if p.poll() is None:
            p.terminate()
    for p in processes:
        try:
            p.wait(10)
        except subprocess.TimeoutExpired:
            p.kill()
            p.wait()
