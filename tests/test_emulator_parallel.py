"""torch's own parallel training on emulated NPUs equals one CPU process.

Tolerance 1e-6 in losses near 4 and in parameters after four AdamW steps: ranks and microbatches only change the order
of fp32 sums, which moves them by a few units in the last place (2.4e-7 at 4).
"""

from __future__ import annotations

import emulated_parallel
import emulated_pipeline
import pytest
from npu_pool import NpuPool

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.parametrize("kind", emulated_parallel.WRAPS)
def test_data_parallel(npu_pool: NpuPool, kind: str) -> None:
    assert max(npu_pool.run(4 if kind == "hsdp" else 2, emulated_parallel.data_parallel, kind)) < 1e-6


def test_fsdp2_in_bf16(npu_pool: NpuPool) -> None:
    """Bit-equal: two addends have one sum, and everything else is done to the same numbers in the same order."""
    assert npu_pool.run(2, emulated_parallel.fsdp2_bf16) == [0.0, 0.0]


@pytest.mark.parametrize("sequence", [False, True], ids=["rows-and-columns", "sequence-parallel"])
def test_tensor_parallel(npu_pool: NpuPool, sequence: bool) -> None:
    assert max(npu_pool.run(2, emulated_parallel.tensor_parallel, sequence)) < 1e-6


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipeline_schedules(npu_pool: NpuPool, name: str) -> None:
    assert max(npu_pool.run(2, emulated_pipeline.schedule, name)) < 1e-6
