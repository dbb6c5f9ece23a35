"""User report D54 on emulated NPUs: types that HCCL refuses reach every rank all the same."""

from __future__ import annotations

import emulated_launch
import emulated_reductions
import pytest
from npu_pool import NpuPool
from rank_pool import RankPool


def test_d54_every_type_is_reduced(npu_pool: NpuPool) -> None:
    assert npu_pool.run(4, emulated_reductions.every_type) == [[]] * 4


def test_d54_flags(npu_pool: NpuPool) -> None:
    """Of True on rank 1 only, True everywhere, and True nowhere."""
    some, every = [True, True, False], [False, True, False]
    assert npu_pool.run(4, emulated_reductions.flags) == [[some, some, every, every]] * 4


def test_d54_bytes_are_gathered_and_wrong_calls_are_named(npu_pool: NpuPool) -> None:
    assert npu_pool.run(4, emulated_reductions.moved_bytes) == [[]] * 4


def test_d54_values_of_the_trainer(npu_pool: NpuPool, pool: RankPool) -> None:
    """A 64-bit metric, logged values and the strategy's reductions keep every digit, on NPUs as on the CPU."""
    total = 2.0 + 3 * 2.0**-40
    for kind, ranks in (("npu", npu_pool), ("cpu", pool)):
        for seen in ranks.run(4, emulated_reductions.trainer_values, kind, deadline_s=60):
            assert seen == {
                "metric": ("torch.float64", total), "on": kind,
                "logged": {"double": 2.5, "long": 2.5, "half": 2.5, "metric": total},
                "double mean": total / 2, "double sum": total, "int mean": 0.5,
                "any": [True, True], "all": [False, True], "share": [0.0, 1.0], "bytes": [200, 201],
            }  # fmt: skip


@pytest.mark.parametrize("kind", ["npu", "cpu"])
def test_64_bit_training_is_refused_on_npus_only(npu_pool: NpuPool, pool: RankPool, kind: str) -> None:
    ((text, steps),) = (npu_pool if kind == "npu" else pool).run(1, emulated_launch.double_precision, kind)
    if kind == "npu":
        assert text.startswith("ConfigError: precision='64-true' on NPUs.") and steps == 0
    else:
        assert (text, steps) == ("None", 1)
