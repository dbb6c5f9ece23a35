"""What outlives a step on emulated NPUs: checkpoints, pinned batches, memory and random states."""

from __future__ import annotations

from pathlib import Path

import emulated_state
import pytest
from npu_pool import NpuPool


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "in_background"),
    [(2, 2, False), (2, 1, False), (4, 2, False), (1, 2, False), (2, 2, True)],
    ids=["2-to-2", "2-to-1", "4-to-2", "1-to-2", "async"],
)
def test_distributed_checkpoint(npu_pool: NpuPool, tmp_path: Path, saved_by: int, loaded_by: int, in_background: bool) -> None:
    """FSDP2 training that goes on from a checkpoint, on another number of ranks, equals one process that never stopped."""
    npu_pool.run(saved_by, emulated_state.save_sharded, str(tmp_path), in_background)
    assert max(npu_pool.run(loaded_by, emulated_state.resume_sharded, str(tmp_path))) < 1e-6


def test_saved_tensors_go_where_they_are_asked_to(npu_pool: NpuPool, tmp_path: Path) -> None:
    assert npu_pool.run(1, emulated_state.saved_tensors, str(tmp_path / "tensors.pt")) == [
        {
            "as saved": ("npu:0", True), "cpu": ("cpu", True), "npu:1": ("npu:1", True), "device": ("npu:1", True),
            "moved": ("npu:1", True),
        }
    ]  # fmt: skip


@pytest.mark.parametrize("device", ["", "npu"], ids=["accelerator", "named"])
@pytest.mark.parametrize("workers", [0, 2])
def test_d55_pinned_batches(npu_pool: NpuPool, workers: int, device: str) -> None:
    """No CUDA device is asked for; torch 2.13 pins for the accelerator and says so to whoever names a device.

    In a new process: torch's DTensor caches keep groups of past tests alive, whose threads a forked worker cannot join.
    """
    (seen,) = npu_pool.run(1, emulated_state.pinned, workers, device, environment={})
    assert all(seen["pinned"]) and len(seen["pinned"]) == 10
    assert all(seen["same"]) and len(seen["same"]) == 31
    assert len(seen["warnings"]) == (device != "")
    assert all("pin_memory_device is deprecated" in w for w in seen["warnings"])


def test_memory_statistics(npu_pool: NpuPool) -> None:
    """torch_npu asks for 32 bytes more than a tensor needs and rounds up to 512, or to 2 MiB for the device."""
    mega = 1 << 20
    (seen,) = npu_pool.run(1, emulated_state.memory)
    assert seen.pop("out of memory").startswith(
        "NPU out of memory. Tried to allocate 64.00 GiB (NPU 0; 64.00 GiB total capacity;"
    )
    assert seen.pop("empty_cache gives back") == 42 * mega
    assert seen.pop("ooms") == 1
    one, two = mega + 512, 41 * mega + 1024
    sizes = {"one tensor": one, "two tensors": two, "one tensor again": one, "peak": two, "peak after reset": one}
    assert {k: seen.pop(k) for k in sizes} == sizes
    assert len(seen) == 7 and all(v is True for v in seen.values()), seen


def test_random_numbers(npu_pool: NpuPool) -> None:
    (seen,) = npu_pool.run(1, emulated_state.random_numbers)
    assert len(seen) == 13
    assert all(seen.values()), [k for k, v in seen.items() if not v]
