"""User report D53 on emulated NPUs: overflow in the two modes, gradient scalers, and what the strategy says."""

from __future__ import annotations

import emulated_overflow
import pytest
from npu_pool import NpuPool

SATURATING = {"INF_NAN_MODE_ENABLE": "0", "INF_NAN_MODE_FORCE_DISABLE": "1"}
BACKS_OFF, KEEPS_ON = ([1024.0, 512.0, 512.0], [True, False, True]), ([1024.0] * 3, [True] * 3)


@pytest.mark.parametrize(
    ("scaler", "where", "environment", "wanted"),
    [
        ("npu", "forward", {}, [BACKS_OFF, BACKS_OFF]),
        ("torch_npu", "forward", {}, [BACKS_OFF, BACKS_OFF]),
        ("npu", "forward", SATURATING, [BACKS_OFF]),
        ("npu", "forward", SATURATING, [KEEPS_ON, BACKS_OFF]),  # each rank reads its own device's flag: weights part
        ("torch_npu", "backward", SATURATING, [BACKS_OFF, BACKS_OFF]),
        ("torch_npu", "forward", SATURATING, [KEEPS_ON, KEEPS_ON]),  # scale(loss) clears what the forward pass raised
    ],
    ids=lambda v: "saturating" if v is SATURATING else "infinities" if v == {} else str(len(v)) if isinstance(v, list) else v,
)
def test_d53_scalers(npu_pool: NpuPool, scaler: str, where: str, environment: dict[str, str], wanted: list[object]) -> None:
    """The last rank overflows in layer 2 in the second step; what torch 2.13 and torch_npu 2.13 make of it."""
    seen = npu_pool.run(len(wanted), emulated_overflow.backs_off, scaler, where, environment=environment)
    assert [(s["scale"], s["moved"]) for s in seen] == wanted
    assert all(s["saturates"] is bool(environment) for s in seen)
    if where == "forward":
        assert seen[-1]["largest"][1] == (65504.0 if environment else float("inf"))
    if wanted[0] is wanted[-1]:
        assert all(s["weights"] == seen[0]["weights"] for s in seen)


def test_d53_the_strategy_names_the_mode(npu_pool: NpuPool) -> None:
    ((line, warned),) = npu_pool.run(1, emulated_overflow.told, environment={})
    assert line.endswith("over HCCL; overflow gives infinities") and not warned
    ((line, warned),) = npu_pool.run(1, emulated_overflow.told, environment=SATURATING)
    assert line.endswith("over HCCL; overflow saturates")
    (text,) = warned
    assert text.startswith("npu:0 is in saturation mode") and "Set INF_NAN_MODE_ENABLE=1" in text
