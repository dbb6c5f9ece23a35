"""Faults on demand, slow links between nodes, host ports and time limits of the emulated HCCL."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import faulty
import pytest
from npu_pool import NpuPool
from rank_pool import RankError

ROOT = Path(__file__).parent.parent


def emulated(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m ascend_emulator`` with arguments."""
    command = [sys.executable, "-m", "ascend_emulator", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_late_rank(npu_pool: NpuPool) -> None:
    for times in npu_pool.run(2, faulty.late, 1.0):
        assert times[1] > 0.9
        assert max(times[0], times[2]) < 0.9


def test_a_killed_rank_ends_the_others_within_the_limit(npu_pool: NpuPool) -> None:
    with pytest.raises(RankError) as caught:
        npu_pool.run(4, faulty.killed)
    assert caught.value.errors[1][0] == "died"
    assert len(caught.value.errors) == 4
    assert "hang" not in {kind for kind, _ in caught.value.errors.values()}


def test_one_corrupted_element(npu_pool: NpuPool) -> None:
    zero, one = npu_pool.run(2, faulty.corrupted)
    twos = [2.0] * 5
    assert zero["all_reduce"] == [twos, twos]
    assert one["all_reduce"][1] == twos
    assert [x == 2.0 for x in one["all_reduce"][0]] == [True, True, True, False, True]
    assert zero["all_gather"] == [[1.0] * 4, [1.0, 1.0, -1.0, 1.0]]
    assert one["all_gather"] == [[1.0] * 4] * 2


@pytest.mark.parametrize("code", [1, 4, 9, 21])
def test_error_codes(npu_pool: NpuPool, code: int) -> None:
    for text in npu_pool.run(2, faulty.error_code, code):
        assert f"error code is {code}" in text or f"error code {code}" in text, text
        assert f"error {code} of AllReduce was asked for" in text, text


@pytest.mark.parametrize(
    ("kind", "settings"), [("explode", {}), ("delay", {"second": 1}), ("kill", {"rank": "x"}), ("delay", {"seconds": "soon"})]
)
def test_a_fault_that_cannot_be_read(npu_pool: NpuPool, kind: str, settings: dict[str, Any]) -> None:
    (text,) = npu_pool.run(1, faulty.wrong_fault, kind, settings)
    assert text.startswith(f"The fault cannot be read: '{kind}"), text
    assert "Do: Use the kinds" in text


def test_faults_of_the_environment_and_a_busy_device() -> None:
    """Also through child processes; the second attempt but one is the first that succeeds."""
    code = """
import torch
for attempt in range(3):
    try:
        torch.npu.set_device(0); print("ok"); break
    except RuntimeError as error:
        print("busy" if "507033" in str(error) and "is busy" in str(error) else error)
"""
    done = emulated("-c", code, ASCEND_EMULATOR_FAULTS="busy attempts=2")
    assert done.stdout.split()[-3:] == ["busy", "busy", "ok"], done.stdout + done.stderr
    done = emulated("-c", "print(1)", ASCEND_EMULATOR_FAULTS="delay rank=1; explode")
    assert done.returncode and "The fault cannot be read: 'explode'" in done.stderr


def test_links_between_nodes(npu_pool: NpuPool) -> None:
    """A ring of four over two nodes crosses twice: ranks 1 and 3 send 1.5 MB each to the other node."""
    seen = npu_pool.run(4, faulty.nodes, 10)
    for rank, s in enumerate(seen):
        assert s["within"][:2] == (1_000_000, 0)
        assert s["across"][:2] == ((0, 1_500_000) if rank % 2 else (1_500_000, 0))
        assert s["across"][2] > 0.14, "1.5 MB at 10 MB/s"
        assert s["within"][2] < s["across"][2]
        assert s["sum"] == 8.0
    assert [s["send"] for s in seen] == [(0, 1_000_000), (0, 0), (0, 0), (0, 0)]


def test_host_ports(npu_pool: NpuPool) -> None:
    assert [s["port"] for s in npu_pool.run(2, faulty.ports)] == [60000, 60001]


def test_two_processes_cannot_share_a_device(npu_pool: NpuPool) -> None:
    """As on a machine: it shows as a port clash."""
    texts = npu_pool.run(2, faulty.same_device)
    assert any("the port 60000 of device 0 is bound already" in t for t in texts), texts


@pytest.mark.parametrize(("prepared", "variable"), [(False, "HCCL_CONNECT_TIMEOUT"), (True, "HCCL_EXEC_TIMEOUT")])
def test_a_rank_that_does_not_come(npu_pool: NpuPool, prepared: bool, variable: str) -> None:
    with pytest.raises(RankError) as caught:
        npu_pool.run(2, faulty.never_comes, variable, "2", prepared)
    kind, text = caught.value.errors[0]
    assert kind in ("RuntimeError", "DistBackendError", "died"), caught.value.errors
    if kind != "died":
        assert variable in text and "rank 1" in text, text
        assert float(re.findall(r"after ([\d.]+) s", text)[0]) < 6


def test_ports_that_the_host_holds_count_when_asked_for() -> None:
    code = "import torch, torch.distributed as d; d.init_process_group('hccl', init_method='tcp://127.0.0.1:{}', rank=0, world_size=1); d.barrier()"
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        port, other = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        done = emulated("-c", code.format(other), ASCEND_EMULATOR_TCP_PORTS="1", HCCL_IF_BASE_PORT=str(port))
    assert done.returncode and f"the port {port} of device 0 is bound already" in done.stderr, done.stderr


def test_a_command_on_two_nodes(tmp_path: Path) -> None:
    """torchrun on each finds the other without options; each node has its own two devices."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "torch.npu.set_device(int(os.environ['LOCAL_RANK']))\n"
        "dist.init_process_group('hccl')\n"
        "dist.all_reduce(t := torch.ones(4, device='npu'))\n"
        "from ascend_emulator import traffic\n"
        "seen = 'rank', os.environ['RANK'], 'node', os.environ['ASCEND_EMULATOR_NODE'], torch.npu.device_count(), t[0].item()\n"
        "os.write(1, (' '.join(map(str, (*seen, *traffic()))) + '\\n').encode())\n"
        "dist.destroy_process_group()\n"
    )
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = emulated("--nodes", "2", "--devices", "2", *run, OMP_NUM_THREADS="1")
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [
        "rank 0 node 0 2 4.0 24 0", "rank 1 node 0 2 4.0 0 24", "rank 2 node 1 2 4.0 24 0", "rank 3 node 1 2 4.0 0 24"
    ], done.stderr  # fmt: skip
    done = emulated("--nodes", "2", "-c", "import sys; sys.exit({node} * 3)")
    assert done.returncode == 3


def test_info_lists_what_is_emulated() -> None:
    done = emulated("--devices", "3", "info")
    assert done.returncode == 0, done.stderr
    for text in ("SoC Ascend910B1, 3 NPUs", "HcclAllGatherV", "aclrtMalloc ", "Not emulated", "aten operators:", "C++ layer"):
        assert text in done.stdout, text


def test_accelerate_launch_in_an_environment(tmp_path: Path) -> None:
    """What ``env`` prints makes plain launchers see the NPUs; Accelerate finds them by itself."""
    (tmp_path / "train.py").write_text(
        "import os, torch\n"
        "from accelerate import Accelerator\n"
        "a = Accelerator()\n"
        "x = a.reduce(torch.full((2,), float(a.process_index + 1), device=a.device))\n"
        "seen = 'rank', a.process_index, a.num_processes, a.device, a.distributed_type.value, x[0].item()\n"
        "os.write(1, (' '.join(map(str, seen)) + '\\n').encode())\n"
        "a.end_training()\n"
    )
    bin = Path(sys.executable).parent
    launch = f"{bin}/accelerate launch --num_processes 2 --multi_gpu --mixed_precision no train.py"
    shell = f'eval "$({sys.executable} -m ascend_emulator --devices 2 env)" && cd {tmp_path} && {launch}'
    env = {k: v for k, v in os.environ.items() if k != "ASCEND_DEVICE"}
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == ["rank 0 2 npu:0 MULTI_NPU 3.0", "rank 1 2 npu:1 MULTI_NPU 3.0"], done.stdout + done.stderr[-3000:]
