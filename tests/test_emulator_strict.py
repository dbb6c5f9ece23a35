"""The emulated NPU refuses what a real one refuses, in both operator layers, and saturates where that is the mode."""

from __future__ import annotations

from math import inf
from typing import Any

import emulated
import strict
from npu_pool import NpuPool

MAX = strict.HALF_MAX


def test_which_layer_serves_what(either: tuple[str, NpuPool]) -> None:
    name, pool = either
    assert pool.run(1, strict.layer) == [(name, "python", "python")]


def test_operators_and_rules_in_either_layer(either: tuple[str, NpuPool]) -> None:
    assert either[1].run(1, emulated.operators) == [[]]
    (seen,) = either[1].run(1, emulated.rules)
    assert seen["out grows"] == (True, [[0.0, 4.0, 8.0], [12.0, 16.0, 20.0]])
    assert seen["stays where it was asked for"] == ["cpu", "meta"]
    assert seen["random state"] is True and seen["streams"] is True


def test_float64_kernels_that_npus_lack(either: tuple[str, NpuPool]) -> None:
    (seen,) = either[1].run(1, strict.float64)
    assert seen.pop("add") == "accepted: 8.0"
    assert seen.pop("cast") == "accepted: 8.0"
    for name, text in seen.items():
        assert "has no float64 kernel on NPUs" in text and "use float32" in text, (name, text)


def test_mixed_devices(either: tuple[str, NpuPool]) -> None:
    (seen,) = either[1].run(1, strict.mixed_devices)
    for name in ("two npus", "in a list"):
        assert "found at least two devices, npu:0 and npu:1!" in seen[name], seen
    for name in ("npu and cpu", "out", "zero-dim out", "zero-dim in place"):
        assert "Expected NPU tensor, please check whether the input tensor device is correct" in seen[name], seen
    assert seen["zero-dim cpu"] == "accepted: 6.0"
    assert seen["copy"] == "accepted: 6.0"
    assert seen["index"] == "accepted: 2.0"
    assert seen["result stays on"] == "accepted: npu:1"


def test_sparse_tensors_are_refused(either: tuple[str, NpuPool]) -> None:
    for text in either[1].run(1, strict.sparse)[0]:
        assert "The emulated NPU holds dense tensors only" in text, text


def check_saturation(seen: dict[str, Any]) -> None:
    assert seen["flag before"] == (False, [30000.0] * 3, False)
    assert seen["doubled"] == ([MAX] * 3, [-MAX] * 3, True)
    assert seen["in place"] == ([MAX] * 3, True)
    assert seen["foreach"] == ([[MAX] * 3] * 2, True)
    assert seen["out"] == ([MAX] * 3, True)
    assert seen["cast"] == ([MAX], True)
    assert seen["nan"] == [0.0]
    assert seen["written infinity stays"] == ([-inf, 0.0], False)


def test_saturating_mode(either: tuple[str, NpuPool]) -> None:
    (seen,) = either[1].run(1, strict.saturating_by_switch)
    check_saturation(seen)
    assert seen["afterwards"] == ([inf, inf], 1, 107000)


def test_loss_scaling_and_own_operators_in_saturating_mode(npu_pool: NpuPool) -> None:
    """D53: the scaler backs off by the device's flag, as no gradient becomes infinite."""
    (seen,) = npu_pool.run(1, strict.scaler_and_fused)
    assert seen["scales"] == [(512.0, True), (512.0, False)]
    assert seen["fused"] == [[MAX] * 4] and seen["flag"]


def test_the_layer_that_overflows_is_found_in_both_modes(npu_pool: NpuPool) -> None:
    """D53: saturated values look fine; the flag that torch_npu reads does not."""
    (seen,) = npu_pool.run(1, strict.layer_that_overflows)
    assert seen == {"saturating": [False, True, False], "inf": [False, True, False]}


def test_an_older_soc_has_no_bfloat16_and_saturates() -> None:
    pool = NpuPool(ASCEND_EMULATOR_SOC="Ascend910A")
    try:
        (seen,) = pool.run(1, strict.old_soc)
    finally:
        pool.close()
    assert (seen["name"], seen["supported"], seen["inf nan mode"]) == ("Ascend910A", False, False)
    assert seen["moving"] == "accepted: 2.0"
    for name in ("computing", "casting"):
        assert "bfloat16 is not supported on this SoC, Ascend910A" in seen[name] and "use float16" in seen[name], seen
    check_saturation(seen)
