"""SyncBatchNorm on emulated NPUs."""

from __future__ import annotations

import emulated_sync_batch_norm
import pytest
from npu_pool import NpuPool


@pytest.mark.parametrize(
    ("dtype", "affine", "limit"), [("float32", True, 1e-5), ("float32", False, 1e-5), ("bfloat16", True, 0.05)]
)
def test_it_is_batch_norm_of_the_whole_batch(npu_pool: NpuPool, dtype: str, affine: bool, limit: float) -> None:
    """Outputs and gradients, relative to values of up to about 10; bfloat16 rounds outputs of that size to 0.03."""
    for gaps in npu_pool.run(2, emulated_sync_batch_norm.against_batch_norm, dtype, affine):
        assert len(gaps) == (7 if affine else 5)
        assert max(gaps.values()) < limit, gaps
