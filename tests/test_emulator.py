"""The emulated Ascend machine: real torch_npu, real ProcessGroupHCCL; results equal the CPU's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import emulated
import pytest
from npu_pool import NpuPool
from rank_pool import RankError

ROOT = Path(__file__).parent.parent


def test_the_command_line() -> None:
    code = "import torch, torch_npu; print(torch.npu.device_count(), (torch.ones(2, device='npu')+1).cpu())"
    command = [sys.executable, "-m", "ascend_emulator", "--devices", "2", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert "2 tensor([2., 2.])" in done.stdout, done.stderr


def test_devices(npu_pool: NpuPool) -> None:
    assert npu_pool.run(2, emulated.devices) == [(8, "Ascend910B1", True)] * 2


def test_operators_equal_the_cpu(npu_pool: NpuPool) -> None:
    assert npu_pool.run(1, emulated.operators) == [[]]


def test_rules_of_the_device(npu_pool: NpuPool) -> None:
    (seen,) = npu_pool.run(1, emulated.rules)
    assert seen["in place through a view"] == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    assert seen["out grows"] == (True, [[0.0, 4.0, 8.0], [12.0, 16.0, 20.0]])
    assert seen["stays where it was asked for"] == ["cpu", "meta"]
    assert seen["mixed"].startswith("RuntimeError: Expected all tensors to be on the same device. Expected NPU")
    assert seen["channels last"].startswith("RuntimeError: Only contiguous_format or preserve_format")
    assert seen["device"].startswith("RuntimeError")
    assert seen["memory"].startswith("OutOfMemoryError")
    for rule, holds in seen.items():
        assert holds is True or isinstance(holds, (str, list, tuple)), rule


def test_types_that_hccl_refuses(npu_pool: NpuPool) -> None:
    """torch_npu's own checks: 64-bit floats and unsigned types; it widens uint8 by itself for all_reduce only."""
    for seen in npu_pool.run(2, emulated.refused_types):
        assert seen.pop("all_reduce torch.uint8") == "[2, 4]"
        assert len(seen) == 5
        assert all("Unsupported data type" in text for text in seen.values()), seen


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
def test_collectives_are_asynchronous(npu_pool: NpuPool, elsewhere: bool) -> None:
    for enqueued_s, right in npu_pool.run(2, emulated.asynchronous, elsewhere):
        assert right
        assert enqueued_s < 0.4


def test_a_dead_rank_ends_the_others(npu_pool: NpuPool) -> None:
    """The survivors end with an error within the timeout, by exception or by torch_npu's own watchdog."""
    with pytest.raises(RankError) as caught:
        npu_pool.run(2, emulated.one_dies)
    assert set(caught.value.errors) == {0, 1}
    assert all(kind in ("RuntimeError", "DistBackendError", "died") for kind, _ in caught.value.errors.values()), (
        caught.value.errors
    )
    assert npu_pool.run(2, emulated.devices)[0][0] == 8


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_torchs_own_data_parallel(npu_pool: NpuPool, kind: str) -> None:
    assert max(npu_pool.run(2, emulated.data_parallel, kind, deadline_s=60)) < 1e-6


def test_the_example_on_npus_with_lightnings_launcher(tmp_path: Path) -> None:
    """An unmodified script, its ranks started by Lightning, on emulated NPUs."""
    (tmp_path / "layout.yaml").write_text("pipeline_parallel_size: 2\nnum_microbatches: 2\n")
    script = [str(ROOT / "examples/train_gpt_lightning.py"), "--devices", "2", "--steps", "2", "--samples", "0", "--dim", "32"]
    command = [sys.executable, "-m", "ascend_emulator", "--devices", "2", *script, "--out", str(tmp_path / "out")]
    env = {**{k: v for k, v in os.environ.items() if k != "ASCEND_DEVICE"}, "ASCEND_CONFIG": str(tmp_path / "layout.yaml")}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "pp=2 x dp=1 (1 replicas x 1 shards) x tp=1 over HCCL" in done.stderr
    assert "after 2 steps" in done.stdout
