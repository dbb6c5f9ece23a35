"""A single-file checkpoint of any layout resumes in any other, with optimizer and schedule, and in plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lit
import pytest
from rank_pool import RankPool
from test_parity import PP2, TP2

LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "plain": (1, None),
    "pp2-tp2": (4, {**PP2, **TP2}),
    "tp2-zero2": (4, {**TP2, "zero_stage": 2}),
    "pp2-interleaved": (2, {**PP2, "schedule": "Interleaved1F1B"}),
    "dp2": (2, {}),
    "dp4-zero1": (4, {"zero_stage": 1, "partition_gradients": True}),
}
WAYS = [
    ("plain", "pp2-tp2"), ("pp2-tp2", "plain"), ("pp2-tp2", "tp2-zero2"), ("tp2-zero2", "pp2-interleaved"),
    ("pp2-interleaved", "dp2"), ("dp2", "pp2-tp2"), ("dp2", "dp4-zero1"), ("dp4-zero1", "plain"),
]  # fmt: skip


def run(pool: RankPool, layout: str, folder: Path, **options: Any) -> dict[str, Any]:
    world, strategy = LAYOUTS[layout]
    return pool.run(world, lit.fit, "lightning.pytorch", str(folder), strategy, {}, deadline_s=120, **options)[0]


@pytest.fixture(scope="module")
def whole(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    run(pool, "plain", folder)
    return lit.saved(str(folder / "last.ckpt"))


@pytest.mark.parametrize(("first", "second"), WAYS)
def test_resume(pool: RankPool, tmp_path: Path, whole: dict[str, Any], first: str, second: str) -> None:
    """One epoch in one layout and one in another equal two epochs in one process."""
    run(pool, first, tmp_path / "a", max_epochs=1)
    run(pool, second, tmp_path / "b", ckpt_path=str(tmp_path / "a" / "last.ckpt"))
    end = lit.saved(str(tmp_path / "b" / "last.ckpt"))
    assert end["global_step"] == whole["global_step"]
    assert end["lr_schedulers"] == whole["lr_schedulers"]
    for name, tensor in whole["state_dict"].items():
        assert (end["state_dict"][name] - tensor).abs().max() < 1e-5, name


def test_optimizer_state_is_named_and_whole(pool: RankPool, tmp_path: Path, whole: dict[str, Any]) -> None:
    run(pool, "pp2-tp2", tmp_path)
    ours = lit.saved(str(tmp_path / "last.ckpt"))["optimizer_states"][0]
    theirs = whole["optimizer_states"][0]
    names = [n for n in whole["state_dict"] if n != "model.head.weight"]
    assert sorted(ours["param_groups"][0]["params"]) == sorted(names)
    order = ours["param_groups"][0]["params"]
    for number, name in enumerate(order):
        for key, value in theirs["state"][number].items():
            assert ours["state"][name][key].shape == value.shape
            assert (ours["state"][name][key] - value).abs().max() < 1e-6, (name, key)
