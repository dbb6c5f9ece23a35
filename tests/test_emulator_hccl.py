"""The emulated HCCL under the real ProcessGroupHCCL: every collective, data type and reduction on 2, 4 and 8 ranks."""

from __future__ import annotations

import hccl_suite
import pytest
from npu_pool import NpuPool


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("suite", [hccl_suite.reductions, hccl_suite.movements, hccl_suite.uneven, hccl_suite.ways])
def test_collectives_equal_a_plain_computation(npu_pool: NpuPool, suite: object, world: int) -> None:
    assert npu_pool.run(world, suite, deadline_s=150) == [[]] * world


def test_the_average_of_integers(npu_pool: NpuPool) -> None:
    """torch_npu sums, then divides in place: integers cannot take the quotient."""
    for text in npu_pool.run(2, hccl_suite.integer_average):
        assert text == "refused: result type Float can't be cast to the desired output type Long"
