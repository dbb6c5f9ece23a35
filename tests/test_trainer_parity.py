"""Trainer.fit with the hybrid strategy equals Trainer.fit in one process, with everything a user switches on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lit
import pytest
from rank_pool import RankPool
from test_parity import LAYOUTS

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


def check_same_run(results: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    for r in results:
        assert r["hooks"] == plain["hooks"]
        assert r["steps"] == plain["steps"]
        assert r["metrics"].keys() == plain["metrics"].keys()
        assert r["metrics"] == results[0]["metrics"], "self.log differs between ranks"
        for key, values in plain["history"].items():
            assert r["history"][key] == pytest.approx(values, abs=1e-5), key
        assert r["norms"] == pytest.approx(plain["norms"], rel=1e-5), "D08: the norm before clipping, equal on all ranks"
        assert r["again"] == pytest.approx(r["best_score"], abs=1e-6), "the best checkpoint, loaded into the split model"
        assert r["best_score"] == pytest.approx(plain["best_score"], abs=1e-5)


def check_same_checkpoint(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    for name, tensor in theirs["state_dict"].items():
        assert (ours["state_dict"][name] - tensor).abs().max() < 1e-5, name
    assert ours["global_step"] == theirs["global_step"]


CASES = [(n, "lightning.pytorch") for n in LAYOUTS if n not in ("pp2-gpipe", "pp2-looped", "tp4", "pp2-interleaved-dp2-zero2")]
CASES += [("pp2", "pytorch_lightning"), ("pp2-tp2-dp2", "pytorch_lightning")]


@pytest.mark.parametrize(("name", "namespace"), CASES)
def test_trainer_fit(pool: RankPool, plain: dict[str, Any], tmp_path: Path, name: str, namespace: str) -> None:
    """Accumulation 2, clip 0.5, scheduler, sanity check, validation, ModelCheckpoint, EarlyStopping, tied embedding."""
    world, config = LAYOUTS[name]
    results = pool.run(world, lit.fit, namespace, str(tmp_path), config, {}, deadline_s=150)
    check_same_run(results, plain)
    check_same_checkpoint(lit.saved(results[0]["best"]), plain["checkpoint"])
