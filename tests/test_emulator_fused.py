"""torch_npu's own operators on the emulated NPU: forward and gradient equal plain torch formulas; conventions; errors."""

from __future__ import annotations

import re
from pathlib import Path

import fused_attention
import fused_coverage
import fused_training
import pytest
from npu_pool import NpuPool

from ascend_emulator import fused
from ascend_emulator.fused.registry import FORMULAS, table

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def results(npu_pool: NpuPool) -> dict[str, list[str]]:
    """All areas, in one run."""
    (found,) = npu_pool.run(1, fused_coverage.run, deadline_s=120)
    return found


@pytest.mark.parametrize("area", fused_coverage.AREAS)
def test_equal_to_plain_torch(results: dict[str, list[str]], area: str) -> None:
    assert results[area] == []


def test_every_formula_is_reached(results: dict[str, list[str]]) -> None:
    assert results["unreached"] == []


def test_attention_refuses_what_an_npu_gets_wrong(npu_pool: NpuPool) -> None:
    """D57: a mask of another rank is refused; so is one that contradicts the mode, and a gradient that is not computed."""
    (seen,) = npu_pool.run(1, fused_attention.refused)
    shapes = [name for name in seen if re.match(r"mask \[", name)]
    assert len(shapes) == 6
    for name in shapes:
        assert re.match(r"RuntimeError: atten_mask has shape \(.*\); with layout BNSD it can be", seen.pop(name)), name
    expected = {
        "CPU mask": "RuntimeError: Expected all tensors to be on the same device", "TND without lengths": "RuntimeError: query has 4",
        "contradiction": "RuntimeError: atten_mask shows positions that pre_tockens", "heads": "RuntimeError: head_num is 3",
        "float mask": "RuntimeError: atten_mask must be bool or uint8", "keep_prob": "RuntimeError: The keep_prob value must be",
        "layout": "RuntimeError: The input_layout should be", "mode 2 with [S,S]": "RuntimeError: atten_mask has shape (6, 6)",
        "mode 3 upside down": "RuntimeError: sparse_mode 3 takes the compressed mask", "mode 9": "RuntimeError: The sparse_mode",
        "padding_mask": "NotImplementedError: npu::npu_fusion_attention: the emulator has no formula for the argument",
        "pse gradient": "RuntimeError: npu::npu_fusion_attention: 'pse' requires a gradient", "pse shape": "RuntimeError: pse has",
        "seed": "NotImplementedError: npu_fusion_attention with a seed",
    }  # fmt: skip
    assert set(seen) == set(expected)
    for name, text in expected.items():
        assert seen[name].startswith(text), (name, seen[name])


def test_rules_of_the_device(npu_pool: NpuPool) -> None:
    (seen,) = npu_pool.run(1, fused_training.rules)
    assert seen["unknown"].startswith("NotImplementedError: npu::npu_deep_norm has no formula in the emulator")
    assert seen["unknown aclnn"].startswith("NotImplementedError: npu::npu_clipped_swiglu has no formula in the emulator")
    assert "can't convert negative value" in seen["in Python"], "operators in Python without tensor arguments are reached"
    assert seen["own code"] == "torch.Size([4, 4])"
    for name in ("cpu", "other device"):
        assert seen[name].startswith("RuntimeError: Expected all tensors to be on the same device"), seen[name]
    assert seen["float64"].startswith("RuntimeError: npu::npu_rms_norm has no kernel for torch.float64")
    assert seen["odd"].startswith("RuntimeError: dimension -1 has odd size 7")


def test_operators_wait_for_communication(npu_pool: NpuPool) -> None:
    assert npu_pool.run(2, fused_training.waits_for_communication) == [True, True]


def test_the_documented_table_is_the_registry() -> None:
    """docs/emulator_operators.md lists every formula, with what the registry says of it."""
    fused.load()
    text = (ROOT / "docs/emulator_operators.md").read_text()
    assert table() in text
    documented = re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)
    assert documented == sorted(FORMULAS)
    backward = {name for f in FORMULAS.values() for name in f.backward}
    assert backward <= set(FORMULAS), "a derivative calls an operator without a formula"
