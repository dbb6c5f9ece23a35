"""Processes meet NPUs: ranks, masks, forks. User reports D15, D16, D20 and D43 on the emulated machine."""

from __future__ import annotations

from typing import Any

import emulated_launch
import pytest
from npu_pool import NpuPool

MASK = "ASCEND_RT_VISIBLE_DEVICES"
RANK_ONLY = {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, "TORCHELASTIC_RUN_ID": None}


def test_d15_the_device_of_a_rank(npu_pool: NpuPool) -> None:
    """Eight devices are visible. The global rank chooses only where there is one node."""
    cases: list[tuple[dict[str, str], int | None]] = [
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, None),
        ({"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, None),
        ({"RANK": "3", "WORLD_SIZE": "8"}, 1),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, None),
        ({"RANK": "3", "WORLD_SIZE": "8"}, None),
        ({}, None),
    ]
    refused: list[tuple[dict[str, str], int | None]] = [
        ({"RANK": "5", "WORLD_SIZE": "8"}, 2),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, None),
        ({"RANK": "5", "WORLD_SIZE": "16"}, None),
        ({"RANK": "9", "LOCAL_RANK": "9", "WORLD_SIZE": "16"}, None),
    ]
    (seen,) = npu_pool.run(1, emulated_launch.local_devices, cases + refused)
    assert seen[:6] == ["npu:1", "npu:0", "npu:3", "npu:3", "npu:3", "npu:0"]
    assert all("RANK=5 is set and LOCAL_RANK is not, in a run with" in text for text in seen[6:9]), seen
    assert "Set LOCAL_RANK" in seen[6] and "2 nodes" in seen[7]
    assert "LOCAL_RANK=9 (RANK=9), but this process uses 8 devices" in seen[9]


def check_start(seen: list[dict[str, Any]], slots: list[int]) -> None:
    for rank, result in enumerate(seen):
        assert result["calls"] == ["set_device", "init_process_group"], "D15: once, and first"
        assert result["initialized by Trainer()"] is False, "D20: a process that only builds a Trainer may still fork"
        assert result["launcher"] == "_SubprocessScriptLauncher", "D20: ranks are new processes, never forks"
        assert result["index"] == result["global rank"] == rank
    assert [result["slot"] for result in seen] == slots


def test_d43_four_ranks_on_four_devices(npu_pool: NpuPool) -> None:
    """Two replicas of two tensor-parallel ranks, under a mask and without."""
    seen = npu_pool.run(4, emulated_launch.start, 4, tensor_parallel_size=2, environment={MASK: "4,5,6,7"}, deadline_s=60)
    check_start(seen, [4, 5, 6, 7])
    assert npu_pool.run(4, emulated_launch.slots) == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_d16_a_mask_of_two(npu_pool: NpuPool) -> None:
    environment = {MASK: "2,3", "ASCEND_EMULATOR_DEVICES": "4"}
    check_start(npu_pool.run(2, emulated_launch.start, 2, environment=environment), [2, 3])


def test_d15_a_launcher_that_sets_only_the_rank(npu_pool: NpuPool) -> None:
    """Lightning alone would take each process for the one that starts the others."""
    check_start(npu_pool.run(2, emulated_launch.start, 2, environment=RANK_ONLY), [0, 1])
    two_nodes = {**RANK_ONLY, "RANK": "5", "WORLD_SIZE": "8"}
    for nodes, words in ((2, "RANK=5 is set and LOCAL_RANK is not, in a run with 2 nodes"), (1, "WORLD_SIZE=8, but devices=4")):
        ((text, started),) = npu_pool.run(1, emulated_launch.refused, 4, num_nodes=nodes, environment=two_nodes)
        assert words in text and not started


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("0,1,3,4", ["there is no device 4", "usable of these: 0, 1, 3."]),
        ("0,1,2,5", ["there is no device 5", "usable of these: 0, 1, 2."]),
        ("7,8", ["there is no device 7", "usable of these: none."]),
        ("a,b", ["'a' is not a device id"]),
        ("1,0", ["id 0 comes after 1"]),
    ],
)
def test_d16_masks_that_lose_devices(npu_pool: NpuPool, mask: str, words: list[str]) -> None:
    """A machine with four devices; the Trainer says what is wrong before anything starts."""
    environment = {MASK: mask, "ASCEND_EMULATOR_DEVICES": "4"}
    ((text, started),) = npu_pool.run(1, emulated_launch.refused, 4, environment=environment)
    assert text.startswith("ConfigError: ASCEND_RT_VISIBLE_DEVICES=") and not started
    assert all(w in text for w in words), text


def test_d43_two_ranks_on_one_device(npu_pool: NpuPool) -> None:
    """Every rank names both and the device, and HCCL has not started."""
    for text, by_then, later in npu_pool.run(2, emulated_launch.shared_device, environment={}):
        assert text.startswith("DeviceError: Ranks 0 and 1 both use NPU 0 of ")
        assert by_then == 0 < later
    for text, _ in npu_pool.run(2, emulated_launch.refused, 2, environment={"LOCAL_RANK": "0"}):
        assert text.startswith("DeviceError: Ranks 0 and 1 both use NPU 0 of ") and "LOCAL_RANK=0" in text


@pytest.mark.parametrize("kind", ["kept", "list", "built"])
def test_d20_workers_that_would_use_the_device(npu_pool: NpuPool, kind: str) -> None:
    ((text, steps),) = npu_pool.run(1, emulated_launch.fit_with_workers, kind, 2, environment={})
    assert text.startswith("ConfigError: DataLoader(num_workers=2) starts its workers by fork, and its OnDevice uses the npu (")
    assert steps == 0


@pytest.mark.parametrize(("kind", "num_workers"), [("kept", 0), ("cpu", 2), ("cpu", 0)])
def test_d20_d55_loaders_that_work(npu_pool: NpuPool, kind: str, num_workers: int) -> None:
    """Without workers the dataset may live on the NPU; with them, batches come pinned from the CPU, and CUDA is never asked."""
    assert npu_pool.run(1, emulated_launch.fit_with_workers, kind, num_workers, environment={}) == [("None", 1)]


def test_d20_loaders_that_need_no_check(npu_pool: NpuPool) -> None:
    (seen,) = npu_pool.run(1, emulated_launch.checked_loaders)
    assert seen.pop("forked").startswith("ConfigError: DataLoader(num_workers=2)")
    assert len(seen) == 4 and set(seen.values()) == {"None"}, seen
