"""What really ran: the order that was simulated, on one clock over all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import executed
import pytest
from npu_pool import NpuPool
from rank_pool import RankPool

from ascend_core.schedule import actions, peak_live, simulate
from ascend_core.schedule_rules import SCHEDULES, stage_owner


@pytest.fixture(scope="module")
def ran(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("timelines")
    return pool.run(4, executed.orders, SCHEDULES, folder, deadline_s=120), folder


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_run_what_is_simulated(ran: tuple[list[dict[str, Any]], Path], schedule: str) -> None:
    """Order of actions on 4 ranks; inputs come first on the common clock (5 ms for its error); nothing is recorded after."""
    results, folder = [r[schedule] for r in ran[0]], ran[1]
    chunks = 1 if schedule in ("GPipe", "1F1B") else 2
    expected = actions(schedule, 4, 8)
    for rank, result in enumerate(results):
        assert result["mine"] == expected[rank]
        assert result["recorded"] == result["after"] == 2 * len(expected[rank])
        assert peak_live(result["mine"]) / chunks == simulate(schedule, 4, 8).peak_live[rank]
        assert result["everyone"] == results[0]["everyone"]
    events = results[0]["everyone"]
    second = [e for r in range(4) for e in [e for e in events if e.rank == r][len(expected[r]) :]]
    assert all(e.rank == stage_owner(schedule, e.action.stage, 4) for e in events)
    assert min(executed.gaps(second, 4 * chunks)) > -5e-3
    boxes = [e for e in json.loads((folder / f"{schedule}.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["name"]) for e in boxes] == [(e.rank, str(e.action)) for e in events]
    assert boxes[-1]["ts"] == pytest.approx(1e6 * events[-1].start_s)
    assert (folder / f"{schedule}.html").read_text().count("<title>") == 1 + len(events)


def test_on_emulated_npus(npu_pool: NpuPool, tmp_path: Path) -> None:
    """There each action waits for the device, and clocks are compared through device tensors."""
    results = npu_pool.run(4, executed.orders, ("1F1B",), tmp_path, "npu", deadline_s=120)
    assert [r["1F1B"]["mine"] for r in results] == actions("1F1B", 4, 8)
    events = results[0]["1F1B"]["everyone"]
    assert len(events) == 2 * 4 * 16 and all(e.start_s < e.end_s for e in events)


def test_timelines_that_cannot_be(pool: RankPool, tmp_path: Path) -> None:
    for texts in pool.run(2, executed.refusals, tmp_path):
        assert "A timeline without a pipeline" in texts[0] and "Use .json or .html" in texts[1]
