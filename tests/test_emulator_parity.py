"""The parity tests of the hybrid engine and of the Trainer, on emulated NPUs: the same comparisons as on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lit
import parity
import pytest
from npu_pool import NpuPool
from test_parity import LAYOUTS
from test_trainer_parity import check_same_checkpoint, check_same_run

# every kind once or more; what is left out combines kinds that are here, and would double the time
LEFT_OUT = {
    "tp4",
    "tp2-dp2-zero1",
    "pp2-interleaved-dp2-zero2",
    "pp2-tp2-dp2-interleaved",
    "pp2-tp2-dp2-zero2",
    "pp2-tp2-dp2-dualpipev",
}
TRAINED = ("pp2", "pp2-interleaved", "tp2", "dp2-replicate", "dp2-zero2", "dp2-zero3", "dp4-hsdp", "pp2-tp2-dp2")


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n not in LEFT_OUT])
def test_the_hybrid_engine_on_npus(npu_pool: NpuPool, name: str) -> None:
    """Ten steps within 1e-5 of one CPU process."""
    world, config = LAYOUTS[name]
    results = npu_pool.run(world, parity.compare, config, {}, "npu", deadline_s=200)
    for key in results[0]:
        worst = max(r[key] for r in results if key in r)
        assert worst < 1e-5, f"{name}: {key} differs by {worst:.2e}"


@pytest.mark.parametrize(("name", "accelerator"), [*((n, "npu") for n in TRAINED), ("pp2", "auto"), ("dp2-zero2", "auto")])
def test_the_trainer_on_npus(npu_pool: NpuPool, plain: dict[str, Any], tmp_path: Path, name: str, accelerator: str) -> None:
    """D13, D17: accelerator='npu' and 'auto' train on the NPUs; run and checkpoint equal those of one CPU process."""
    world, config = LAYOUTS[name]
    results = npu_pool.run(
        world, lit.fit, "lightning.pytorch", str(tmp_path), config, {}, accelerator=accelerator, deadline_s=200
    )
    assert [r["trained_on"] for r in results] == [f"npu:{rank}" for rank in range(world)]
    check_same_run(results, plain)
    check_same_checkpoint(lit.saved(results[0]["best"]), plain["checkpoint"])
