"""Mixed precision, loss scaling and activation checkpointing on emulated NPUs."""

from __future__ import annotations

import emulated_recompute
import emulated_training
import pytest
from npu_pool import NpuPool

LOW = ("bfloat16", "float16")


@pytest.mark.parametrize("dtype", LOW)
def test_autocast(npu_pool: NpuPool, dtype: str) -> None:
    """Bit-equal to the same casts made by hand: operators see the same numbers in the same types."""
    (seen,) = npu_pool.run(1, emulated_training.autocast, dtype)
    assert seen["gap"] == 0.0
    assert seen["differs from fp32 by"] > 1e-5
    assert seen["inside"] == (True, f"torch.{dtype}", False)
    types = {k: seen[k] for k in ("head", "blocks.0.mlp.1", "norm", "loss", "grad")}
    assert types == {
        "head": f"torch.{dtype}", "blocks.0.mlp.1": f"torch.{dtype}", "norm": "torch.float32",
        "loss": "torch.float32", "grad": "torch.float32",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", LOW)
def test_autocast_as_on_the_cpu(npu_pool: NpuPool, dtype: str) -> None:
    assert npu_pool.run(1, emulated_training.cpu_autocast, dtype) == [0.0]


@pytest.mark.parametrize("kind", ["npu", "torch_npu"])
def test_loss_scale(npu_pool: NpuPool, kind: str) -> None:
    """torch.amp.GradScaler("npu") and torch_npu's own: the step with an infinite gradient is left out, the scale halves and grows."""
    (seen,) = npu_pool.run(1, emulated_training.loss_scale, kind)
    assert seen == {"scales": [1024.0, 512.0, 512.0, 1024.0, 1024.0], "moved": [True, False, True, True, True], "gap": 0.0}


@pytest.mark.parametrize(("kind", "scaler"), [("ddp", "npu"), ("ddp", "torch_npu"), ("fsdp2", "npu")])
def test_loss_scale_over_ranks(npu_pool: NpuPool, kind: str, scaler: str) -> None:
    """What only one rank sees, all of them act on."""
    assert npu_pool.run(2, emulated_training.loss_scale_over_ranks, kind, scaler) == [(512.0, False)] * 2


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "fsdp2"])
def test_recomputation_draws_the_same_dropout(npu_pool: NpuPool, low: bool, sharded: bool) -> None:
    """D42: gradients, and all random numbers drawn later, are bit-equal with and without activation checkpointing."""
    for same in npu_pool.run(2 if sharded else 1, emulated_training.recomputation, low, sharded):
        assert same == {"reentrant": True, "recompute": True, "wrapper": True, "forgetful": False}


@pytest.mark.parametrize("layout", emulated_recompute.LAYOUTS)
def test_d42_recomputation_in_the_hybrid_strategy(npu_pool: NpuPool, layout: str) -> None:
    """Gradients of the engine and of the Trainer are bit-equal with activation checkpointing inside the blocks and without."""
    assert npu_pool.run(2, emulated_recompute.engine, layout) == [True, True]
    assert npu_pool.run(2, emulated_recompute.trained, layout) == [True, True]


def test_d42_a_backend_whose_random_state_is_not_kept(npu_pool: NpuPool) -> None:
    """torch recomputes other numbers there without a word; the strategy does not start."""
    (seen,) = npu_pool.run(1, emulated_recompute.on_an_old_backend)
    assert seen["leaves no trace"] is True
    assert seen["torch is right"] is False, "torch restores them now: the check can go"
    assert seen["strategy"].startswith("DeviceError: Activation checkpointing does not restore the random numbers of npu:0.")
