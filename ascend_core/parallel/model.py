"""A spread model and its verbs: forward and backward of a batch, finished gradients, norm, clip, whole state.

Both frameworks' adapters, and users without a framework, work with this class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ascend_core.config import HybridConfig
from ascend_core.errors import ConfigError
from ascend_core.mesh import HybridMesh
from ascend_core.parallel import grads
from ascend_core.parallel.apply import Applied
from ascend_core.parallel.data import is_expert
from ascend_core.parallel.expert_steps import replicas_that_wait
from ascend_core.parallel.pipeline import PipelineRunner, StepFn
from ascend_core.parallel.self_check import SelfCheck
from ascend_core.parallel.timeline import Timeline
from ascend_core.parallel.whole_state import WholeState
from ascend_core.parallel.zero1 import OptimizerShards


class ParallelModel(WholeState):
    """A model spread over a mesh; made by :func:`ascend_core.parallel.parallelize`.

    Calling it runs the whole model: without a pipeline like the module itself, with one under ``torch.no_grad()``
    only, with the real output on every rank.

    Args:
        module: This rank's part of the model.
        config: The configuration.
        mesh: The mesh.
        device: This rank's device.
        applied: What was made of the model.
        loss_fn: ``(output, target) -> scalar loss`` for :meth:`train_step`.
        self_check: The comparison with the unsplit model that the first batch will bring, or None.
    """

    def __init__(
        self,
        module: nn.Module,
        config: HybridConfig,
        mesh: HybridMesh,
        device: torch.device,
        applied: Applied,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        self_check: SelfCheck | None = None,
    ) -> None:
        self._self_check = self_check
        self.module, self.config, self.mesh, self.device, self.loss_fn = module, config, mesh, device, loss_fn
        self.names, self.rng, self.gates, self.recompute = applied.names, applied.rng, applied.gates, applied.recompute
        self._sharded = applied.sharded
        self._sync = True
        self.named = dict(module.named_parameters())
        self.parameter_names = {id(p): n for n, p in self.named.items()}
        deferred = applied.sharded if applied.gates is not None else ()
        self._shards: OptimizerShards | None = None
        if config.zero_stage == 1 and mesh.size("dp_shard") > 1:
            whole = [p for p in self.named.values() if not is_expert(p)]
            self._shards = OptimizerShards(whole, mesh, partition=config.partition_gradients is True)
            self.parameter_names |= self._shards.names(self.parameter_names)
        self._finisher = grads.GradientFinisher(
            self.named,
            mesh,
            deferred,
            self._shards,
            summed=applied.summed,
            contiguous=config.contiguous_gradients is True,
            overlap=applied.gates is None and config.overlap_gradients is not False,
        )
        waiting = replicas_that_wait(module, mesh)
        self.runner = PipelineRunner(applied.gates, module, config, device, waiting) if applied.gates is not None else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer."""
        yield from self.named.values()

    # ---- training

    def train_step(
        self,
        inputs: Any,
        target: Any,
        *,
        scale: float = 1.0,
        weight_fn: Callable[[Any], float] | None = None,
        reduction: str = "mean",
    ) -> torch.Tensor:
        """Forward and backward of one batch with ``loss_fn(model(inputs), target)``; gradients add up.

        Args:
            inputs: A tensor, or a tuple of arguments; dim 0 is the batch.
            target: Target of the loss.
            scale: Factor on the loss before backward, e.g. 1 / accumulation steps.
            weight_fn: Weight of a microbatch ``(inputs, target)`` in the mean loss. Default: equal.
            reduction: ``"sum"`` if ``loss_fn`` sums over samples; see :meth:`PipelineRunner.forward_backward`.

        Returns:
            This replica's loss, detached, equal on all of its ranks.
        """
        if self.loss_fn is None:
            raise ConfigError("train_step without a loss.", "", "Give loss_fn to parallelize(), or use forward_backward().")
        loss_fn = self.loss_fn

        def step(batch: Any, number: int) -> torch.Tensor:
            x, y = batch
            return loss_fn(self.module(*x) if isinstance(x, tuple) else self.module(x), y)

        self.announce_finish()
        loss, _ = self.forward_backward(step, (inputs, target), scale=scale, weight_fn=weight_fn, reduction=reduction)
        if self._sync:
            self.finish_gradients()
        self.rng.step += 1
        return loss

    def forward_backward(
        self,
        step_fn: StepFn,
        batch: Any,
        *,
        scale: float = 1.0,
        weight_fn: Callable[[Any], float] | None = None,
        reduction: str = "mean",
        payload: Callable[[], Any] | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Run a user's step; see :meth:`PipelineRunner.forward_backward`. Gradients are not finished."""
        self.check_first_batch(step_fn, batch)
        self._finisher.drop_finished_copies()
        if self.runner is not None:
            return self.runner.forward_backward(
                step_fn, batch, scale=scale, weight_fn=weight_fn, reduction=reduction, payload=payload
            )
        if self.mesh.size("tp") > 1:
            with self.rng.user_code(0, 0):
                loss = step_fn(batch, 0)
        else:
            loss = step_fn(batch, 0)
        (loss * scale).backward()
        return loss.detach(), payload() if payload else None

    def check_first_batch(self, step_fn: StepFn, batch: Any) -> None:
        """Run the self-check, once, if one is due; :meth:`forward_backward` does so. See :class:`SelfCheck`."""
        check, self._self_check = self._self_check, None
        if check is None:
            return
        synchronised = self._sync
        self._set_sync(True)
        try:
            check.run(self, step_fn, batch)
        finally:
            self._set_sync(synchronised)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients unfinished inside: for all but the last backward of an accumulation."""
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)

    def _set_sync(self, sync: bool) -> None:
        self._sync = sync
        if self.gates is None:
            for module in self._sharded:
                assert isinstance(module, FSDPModule)
                module.set_requires_gradient_sync(sync, recurse=False)

    def announce_finish(self) -> None:
        """Say that :meth:`finish_gradients` follows the next backward, unless inside :meth:`no_sync`.

        Gradients then travel while backward runs. Optional; without it they travel afterwards.
        """
        if self._sync:
            self._finisher.arm()

    def finish_gradients(self) -> None:
        """Make ``.grad`` the global batch's gradient; see :class:`GradientFinisher`."""
        self._finisher.finish()

    @contextmanager
    def gradients_aside(self) -> Iterator[GradientStash]:
        """Collect the gradients made inside apart from ``.grad``, which is as before afterwards.

        For frameworks that zero gradients between forward and backward.
        """
        before = {n: p.grad for n, p in self.named.items()}
        for p in self.named.values():
            p.grad = None
        stash = GradientStash()
        try:
            with self._finisher.gradients_elsewhere():
                yield stash
        finally:
            for name, p in self.named.items():
                stash.grads[name] = p.grad
                p.grad = before[name]

    def add_gradients(self, stash: GradientStash) -> None:
        """Add stashed gradients to ``.grad``."""
        self._finisher.drop_finished_copies()
        for name, grad in stash.grads.items():
            p = self.named[name]
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad.add_(grad)
        stash.grads.clear()
        self._finisher.keep()

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Finished gradients by local name: under ZeRO-1 those of this rank's shards, as DTensors."""
        return {n: p.grad for n, p in zip(self.named, self.carriers(), strict=True)}

    def carriers(self) -> list[nn.Parameter]:
        """Whatever holds the finished gradient of each parameter: under ZeRO-1 its shard, else itself."""
        named = list(self.named.values())
        return named if self._shards is None else self._shards.carriers(named)

    def hold_parameters(self, hold: bool) -> None:
        """Keep FSDP2's parameters whole, so that forward needs no other rank; or let them go again.

        For evaluations in which ranks see different numbers of batches. A rank then holds all parameters at once.

        Communication:
            One all-gather per sharded module over its shard axis, when they are taken.
        """
        for module in self._sharded:
            assert isinstance(module, FSDPModule)
            module.set_reshard_after_forward(not hold and self.config.zero_stage == 3, recurse=False)
            if hold:
                module.unshard()
            else:
                module.reshard()

    @contextmanager
    def record_timeline(self) -> Iterator[Timeline]:
        """Record when each pipeline action runs inside; see :class:`ascend_core.parallel.timeline.Timeline`.

        Raises:
            ConfigError: There is no pipeline.

        Communication: point to point between the ranks of the pipeline; every rank must enter it.
        """
        if self.runner is None:
            raise ConfigError("A timeline without a pipeline.", "There are no stages.", "Set pipeline_parallel_size above 1.")
        self.runner.timeline = Timeline(self.runner.gates.group, self.device)
        try:
            yield self.runner.timeline
        finally:
            self.runner.timeline = None

    # ---- norm and clip

    def grad_norm(self, parameters: Any = None, norm_type: float = 2.0) -> torch.Tensor:
        """Norm of the finished gradients over all axes; equal on all ranks. Every rank must call it."""
        params = self.carriers() if parameters is None else list(parameters)
        return grads.total_norm(params, self.mesh, self._finisher.first_holder, norm_type)

    def clip_grad_norm_(self, max_norm: float, parameters: Any = None, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the norm of the whole model; returns the norm before clipping."""
        params = self.carriers() if parameters is None else list(parameters)
        norm = self.grad_norm(params, norm_type)
        grads.clip_by_norm(params, max_norm, norm)
        return norm

    def clip_grad_value_(self, value: float, parameters: Any = None) -> None:
        """Clamp gradient elements to ``[-value, value]``."""
        grads.clip_by_value(self.carriers() if parameters is None else parameters, value)

    # ---- optimizers

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare an optimizer over this model's parameters; call it once, before its first step.

        Under ZeRO-1 its parameters become this rank's shards. Multi-tensor (foreach) kernels cannot mix plain and
        sharded parameters, so a group that mixes them and does not ask for a kernel runs tensor by tensor.

        Raises:
            ConfigError: A group asks for foreach or fused and mixes; ZeRO-1, and the optimizer has state already.
        """
        if self._shards is not None:
            self._shards.adopt(optimizer)
        for group in optimizer.param_groups:
            meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}
            if len(meshes) < 2 or "foreach" not in group:
                continue
            for kernel in ("foreach", "fused"):
                if group.get(kernel):
                    raise ConfigError(
                        f"{type(optimizer).__name__}({kernel}=True) over plain and sharded parameters.",
                        "torch's multi-tensor kernels refuse to mix them.",
                        f"Leave {kernel} out.",
                    )
            group["foreach"] = False

    def close(self) -> None:
        """Take the gates and recomputation off the module."""
        if self.gates is not None:
            self.gates.remove()
        elif self.recompute is not None:
            self.recompute.remove()


class GradientStash:
    """Gradients kept aside by :meth:`ParallelModel.gradients_aside`."""

    def __init__(self) -> None:
        self.grads: dict[str, torch.Tensor | None] = {}
