"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
os.environ["ASCEND_DEVICE"] = "cpu"

import lit
import pytest
from npu_pool import NpuPool
from rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Worker processes that play 1 to 8 ranks."""
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def npu_pool() -> Iterator[NpuPool]:
    """Worker processes that play 1 to 8 ranks on emulated NPUs."""
    pool = NpuPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def plain(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run of one CPU process that every Trainer run is compared with."""
    folder = tmp_path_factory.mktemp("plain")
    result = pool.run(1, lit.fit_plain, "lightning.pytorch", str(folder), {}, deadline_s=120)[0]
    return {**result, "checkpoint": lit.saved(result["best"]), "last": str(folder / "last.ckpt")}


@pytest.fixture(scope="session")
def python_pool() -> Iterator[NpuPool]:
    """A machine whose operators all run in the Python layer."""
    pool = NpuPool(ASCEND_EMULATOR_OPS="python")
    yield pool
    pool.close()


@pytest.fixture(scope="session", params=["cpp", "python"])
def either(request: pytest.FixtureRequest) -> tuple[str, NpuPool]:
    """Each operator layer in turn."""
    return request.param, request.getfixturevalue("npu_pool" if request.param == "cpp" else "python_pool")
