"""Training, evaluation and backward of the hybrid strategy.

Lightning zeroes gradients between ``training_step`` and ``backward``. A pipeline computes both in one go, so its
gradients are kept aside during ``training_step`` and put in place in ``backward``; hooks, counters, accumulation and
callbacks then happen exactly as in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ascend_core.config import HybridConfig
from ascend_core.mesh import HybridMesh
from ascend_core.parallel import ParallelModel
from ascend_core.parallel.model import GradientStash
from lightning_ascend import data
from lightning_ascend.logs import StepLogs


class StepMixin:
    """What happens inside one step."""

    config: HybridConfig
    mesh: HybridMesh | None
    parallel: ParallelModel | None
    layout: Any
    _stash: GradientStash | None = None
    _blocked = False
    _checked_batch = False
    _uneven: set[str]
    _holding = False

    # ---- training

    def training_step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """Run the user's ``training_step``: once, or in a pipeline once per microbatch on each stage."""
        assert self.parallel is not None and self.mesh is not None
        module: Any = self.lightning_module  # type: ignore[attr-defined]
        self._check_first_batch(batch)
        self.parallel.rng.step = module.trainer.fit_loop.epoch_loop.total_batch_idx
        self.parallel.check_first_batch(self._step_of(module, rest, kwargs), batch)
        if self.layout.pp > 1:
            return self._pipelined_step(module, batch, rest, kwargs)
        if self.layout.tp > 1:
            with self.parallel.rng.user_code(0, 0):
                return super().training_step(batch, *rest, **kwargs)  # type: ignore[misc]
        return super().training_step(batch, *rest, **kwargs)  # type: ignore[misc]

    def _step_of(self, module: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The user's step without a trace in the logs."""
        logs = StepLogs(module)

        def step(batch: Any, number: int) -> Any:
            with logs.capture(number):
                return module.training_step(batch, *rest, **kwargs)

        return step

    def _check_first_batch(self, batch: Any) -> None:
        if not self._checked_batch and (self.layout.pp > 1 or self.layout.tp > 1):
            assert self.mesh is not None
            data.check_same_batch(batch, self.mesh)
        self._checked_batch = True

    def _pipelined_step(self, module: Any, batch: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.parallel is not None
        logs = StepLogs(module)

        def step(microbatch: Any, number: int) -> Any:
            with logs.capture(number), self.precision_plugin.train_step_context():  # type: ignore[attr-defined]
                return logs.loss(number, module.training_step(microbatch, *rest, **kwargs))

        with self.parallel.gradients_aside() as stash:
            loss, collected = self.parallel.forward_backward(
                step,
                batch,
                scale=1.0 / module.trainer.accumulate_grad_batches,
                weight_fn=getattr(module, "microbatch_weight", None),
                reduction=getattr(module, "microbatch_reduction", "mean"),
                payload=lambda: logs.collect(self.parallel.runner.weights),  # type: ignore[union-attr]
            )
        self._stash = stash
        logs.replay(collected)
        extra = collected["extra"]
        return {"loss": loss, **extra} if extra else loss

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Backward, or the gradients a pipeline already has; then every sum the layout leaves open."""
        assert self.parallel is not None
        module = self.lightning_module  # type: ignore[attr-defined]
        plugin = self.precision_plugin  # type: ignore[attr-defined]
        self.pre_backward(closure_loss)  # type: ignore[attr-defined]
        closure_loss = plugin.pre_backward(closure_loss, module)
        if self._stash is not None:
            self.parallel.add_gradients(self._stash)
            self._stash = None
        else:
            self.parallel.announce_finish()
            plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if not self._blocked:
            self.parallel.finish_gradients()
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)  # type: ignore[attr-defined]
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave gradients unfinished, for all but the last batch of an accumulation."""
        assert self.parallel is not None
        self._blocked = True
        try:
            with self.parallel.no_sync():
                yield
        finally:
            self._blocked = False

    # ---- evaluation: replicas first agree on buffers, as they do under DDP

    def on_validation_start(self) -> None:
        """Called before validation, the sanity check included."""
        self._evaluate("validation")

    def on_test_start(self) -> None:
        """Called before testing."""
        self._evaluate("test")

    def on_predict_start(self) -> None:
        """Called before predicting."""
        self._evaluate("predict")

    def on_validation_end(self) -> None:
        """Called after validation, the sanity check included."""
        self._evaluated()

    def on_test_end(self) -> None:
        """Called after testing."""
        self._evaluated()

    def on_predict_end(self) -> None:
        """Called after predicting."""
        self._evaluated()

    def _evaluate(self, kind: str) -> None:
        if self.parallel is not None:
            self.parallel.share_buffers()
            self._holding = kind in self._uneven
            if self._holding:
                self.parallel.hold_parameters(True)

    def _evaluated(self) -> None:
        if self.parallel is not None and self._holding:
            self.parallel.hold_parameters(False)
        self._holding = False

    # ---- clipping; put in place of the precision plugin's own

    def _clip_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        assert self.parallel is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.last_grad_norm = self.parallel.clip_grad_norm_(float(clip_val), parameters)

    def _clip_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        assert self.parallel is not None
        self.parallel.clip_grad_value_(float(clip_val), [p for group in optimizer.param_groups for p in group["params"]])
