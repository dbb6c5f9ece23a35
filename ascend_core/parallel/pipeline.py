"""Run one training step through the pipeline, with torch's own stages and schedules.

Each stage is handed the microbatch number and the received activation, and runs the user's step up to its cut. Shapes
between stages are measured once per batch shape and given to torch as static metadata, so that a shorter batch never
reads a stale buffer. An error on one stage does not strand the others: the schedule finishes with zeros, and then
every rank raises the same error.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from ascend_core._shim import pytree
from ascend_core.config import HybridConfig
from ascend_core.errors import ModelError
from ascend_core.parallel.expert_steps import (
    agree_on_schedule,
    attach_load_balance,
    balanced_layers,
    check_loss_was_added,
)
from ascend_core.parallel.failures import exchange_failed, portable, shape_changed
from ascend_core.parallel.gates import BlockGates
from ascend_core.parallel.loss_weights import Shares, loss_shares, refuse_own_loss, weighted
from ascend_core.parallel.microbatch import batch_size, choose_microbatches, split_batch
from ascend_core.parallel.stage import Stage, StageModule, sendable
from ascend_core.parallel.timeline import Timeline
from ascend_core.schedule_rules import MULTI_STAGE_SCHEDULES

StepFn = Callable[[Any, int], torch.Tensor]
"""The user's step: ``(microbatch, its number) -> scalar loss``, which calls the pipelined model once."""

_MAX_SHAPES = 8


@dataclass
class _Step:
    """What the stages of the running step share."""

    step_fn: StepFn
    microbatches: list[Any]
    shares: Shares
    scale: float
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    check_nan: bool = False
    balances: list[tuple[int, torch.Tensor]] = field(default_factory=list)


class PipelineRunner:
    """Trains one rank's stages.

    Args:
        gates: Gates of the model.
        root: The model; whether its parameters are trained tells whether an activation carries gradients.
        config: The configuration.
        device: This rank's device.
        waiting: Replicas that wait for each other in every microbatch, or None.
    """

    def __init__(
        self,
        gates: BlockGates,
        root: nn.Module,
        config: HybridConfig,
        device: torch.device,
        waiting: dist.ProcessGroup | None = None,
    ) -> None:
        self.gates, self.root, self.config, self.device = gates, root, config, device
        self.waiting, self.balanced = waiting, balanced_layers(root)
        self.num_stages = len(gates.stages)
        self.local_stages = [s for s in range(self.num_stages) if gates.owner(s) == gates.rank]
        self._schedules: OrderedDict[Any, tuple[Any, list[Stage]]] = OrderedDict()
        self._step: _Step | None = None
        self.timeline: Timeline | None = None

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
        """Run forward and backward of one batch; gradients are added to ``.grad``.

        Args:
            step_fn: The user's step.
            batch: This replica's batch, the same on all of its ranks.
            scale: Factor on the loss before backward (1 / accumulation steps, a loss scale).
            weight_fn: Weight of a microbatch in the mean, for losses that are means over something other than
                samples (valid tokens). Default: the numbers of valid ``labels`` for a Hugging Face model that computes
                its own loss; else equal weights.
            reduction: ``"mean"``: the batch's loss is the mean of the microbatches'; ``"sum"``: their sum, for losses
                that are sums, or are divided by a number that belongs to the whole batch.
            payload: Called on the rank of the last stage after the step; its value is returned on every rank.

        Returns:
            The loss of the batch (detached, 0-dim, float32, equal on all ranks of the pipeline), and the payload.

        Raises:
            Exception: Whatever a stage raised, on every rank of the pipeline.

        Communication:
            Point to point between neighbouring stages, and one all-reduce of two numbers over the pipeline group; an object
            broadcast with a payload, an object all-gather after an error. A new batch shape costs one more forward of a
            microbatch.
        """
        size = batch_size(batch)
        schedule, m = choose_microbatches(self.config.schedule, self.gates.size, self.config.num_microbatches, size)
        parts = split_batch(batch, m)
        shares = loss_shares(parts, weight_fn, reduction, self.gates.pretrained)
        self._step = _Step(step_fn, parts, shares, scale)
        try:
            runner, stages = self._schedule(schedule, m, _shapes(parts[0]))
            numbers = torch.arange(m)
            last = self.num_stages - 1 in self.local_stages
            try:
                runner.step(mb=numbers, target=numbers if last else None, return_outputs=False)
            except RuntimeError as error:  # errors of stages are kept for _agree: this one is the communication's
                raise exchange_failed(self.gates.rank, [s.under_way() for s in stages], error) from error
            return self._agree(payload)
        finally:
            self._step = None

    @property
    def weights(self) -> list[float]:
        """The shares of the running step's microbatches in its loss."""
        assert self._step is not None
        return self._step.shares.values

    # ---- one microbatch on one stage; called by torch's schedule

    def run_microbatch(self, stage: int, received: torch.Tensor | None, number: int, meta: torch.Tensor) -> torch.Tensor:
        """Run microbatch ``number``; on an error remember it and return zeros shaped like ``meta``."""
        step = self._step
        assert step is not None
        try:
            output = self._run(stage, received, number)
        except Exception as error:  # noqa: BLE001 - kept for _agree, so that the neighbours are not left waiting
            step.errors.append(error)
            output = torch.zeros(meta.shape, dtype=meta.dtype, device=self.device, requires_grad=True)
            return output if received is None else output + 0 * received.detach().nan_to_num().sum().to(meta.dtype)
        if stage == self.num_stages - 1:
            step.losses[number] = output.detach()
        elif output.shape != meta.shape or output.dtype != meta.dtype:
            step.errors.append(shape_changed(stage, number, output, meta))
            return torch.zeros(meta.shape, dtype=meta.dtype, device=self.device, requires_grad=True)
        return sendable(output)

    def _run(self, stage: int, received: torch.Tensor | None, number: int) -> torch.Tensor:
        step = self._step
        assert step is not None
        with self.gates.rng.user_code(stage, number):
            output = self.gates.run_stage(stage, received, lambda: step.step_fn(step.microbatches[number], number))
        if stage == self.num_stages - 1:
            check_loss_was_added(self.balanced)
            refuse_own_loss(step.shares, self.gates.labels_given)
            return _checked_loss(output, step.check_nan and step.shares.values[number] != 0)
        if self.balanced:
            factor = step.shares.values[number] * step.scale
            output, value = attach_load_balance(self.gates.stage_blocks(stage), output, factor)
            if value is not None:
                step.balances.append((number, value))
        return output  # type: ignore[no-any-return]

    def record(self, error: BaseException) -> None:
        """Remember an error for the end of the step."""
        assert self._step is not None
        self._step.errors.append(error)

    def _agree(self, payload: Callable[[], Any] | None) -> tuple[torch.Tensor, Any]:
        """Exchange loss, payload and errors; raise everywhere if any stage failed."""
        step = self._step
        assert step is not None
        balance = sum(step.shares.values[number] * float(value) for number, value in step.balances)
        mean, mine = torch.full((), float(balance), device=self.device), None
        if self.num_stages - 1 in self.local_stages and not step.errors:
            parts = [weighted(step.losses[i].float(), share) for i, share in enumerate(step.shares.values)]
            mean = mean + torch.stack(parts).sum()
            try:
                mine = payload() if payload else None
                pickle.dumps(mine)
            except Exception as caught:  # noqa: BLE001 - raised below, once every rank knows
                step.errors.append(caught)
        failed = mean.new_tensor(float(bool(step.errors)))
        status = torch.stack([failed, torch.zeros_like(mean) if step.errors else mean])
        dist.all_reduce(status, group=self.gates.group)  # other stages add load-balance losses only, or zero
        if float(status[0]):
            self._raise_together(step.errors)
        if payload is not None:
            message = [mine]
            source = dist.get_global_rank(self.gates.group, self.gates.owner(self.num_stages - 1))
            dist.broadcast_object_list(message, src=source, group=self.gates.group)
            mine = message[0]
        return status[1], mine

    def _raise_together(self, errors: list[BaseException]) -> None:
        """Raise the first pipeline rank's error on every rank."""
        everyone: list[Any] = [None] * self.gates.size
        dist.all_gather_object(everyone, portable(errors[0]) if errors else None, group=self.gates.group)
        rank, error = next((r, e) for r, e in enumerate(everyone) if e is not None)
        if rank == self.gates.rank:
            error = errors[0]
        error.add_note(f"(raised on pipeline rank {rank}; every rank of the pipeline stops with it)")
        raise error

    # ---- torch's schedule for one batch shape

    def _schedule(self, name: str, m: int, shapes: Any) -> tuple[Any, list[Stage]]:
        key = (name, m, shapes, torch.is_autocast_enabled(self.device.type), self.root.training)
        assert self._step is not None
        known = key in self._schedules
        measure = not known if self.waiting is None else not agree_on_schedule(self.waiting, self.device, name, m, known)
        metas = self._measure() if measure else []  # also with a known shape, if another replica's is new
        if known:
            self._schedules.move_to_end(key)
            return self._schedules[key]
        self._step.check_nan = True
        stages = [self._stage(s, metas) for s in self.local_stages]
        schedule = get_schedule_class(name)(
            stages if name in MULTI_STAGE_SCHEDULES else stages[0],
            n_microbatches=m,
            loss_fn=self._scaled,
            scale_grads=False,
        )
        self._schedules[key] = schedule, stages
        while len(self._schedules) > _MAX_SHAPES:
            self._schedules.popitem(last=False)
        return schedule, stages

    def _scaled(self, loss: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        assert self._step is not None
        return weighted(loss, self._step.shares.values[int(number)] * self._step.scale)

    def _stage(self, stage: int, metas: list[torch.Tensor]) -> Stage:
        meta = metas[stage]
        module = StageModule(
            lambda received, number: self.run_microbatch(stage, received, number, meta),
            lambda: self.gates.stage_parameters(stage),
        )
        inputs = () if stage == 0 else (metas[stage - 1],)
        return Stage(module, stage, self.num_stages, self.device, inputs, meta, self.gates.group, self.record, self._span)

    def _span(self, kind: str, stage: int, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext() if self.timeline is None else self.timeline.span(kind, stage, microbatch)

    def _measure(self) -> list[torch.Tensor]:
        """Measure what each stage sends, on the meta device: one forward of one microbatch, stage after stage.

        Buffers (batch norm's statistics) and random states are as before afterwards.
        """
        metas: list[torch.Tensor] = []
        carries = False
        for stage in range(self.num_stages - 1):
            message: list[Any] = [None]
            if stage in self.local_stages:
                message = [self._measure_stage(stage, metas[-1] if metas else None, carries)]
            source = dist.get_global_rank(self.gates.group, self.gates.owner(stage))
            dist.broadcast_object_list(message, src=source, group=self.gates.group)
            if isinstance(message[0], BaseException):
                raise message[0]
            shape, dtype, carries, forms = message[0]
            self.gates.outputs.make_known(forms)
            metas.append(torch.empty(shape, dtype=dtype, device="meta", requires_grad=carries))
        metas.append(torch.zeros((), device="meta", requires_grad=True))
        return metas

    def _measure_stage(self, stage: int, meta: torch.Tensor | None, carries: bool) -> Any:
        saved = [(b, b.clone()) for b in self.root.buffers()]
        received = None if meta is None else torch.zeros(meta.shape, dtype=meta.dtype, device=self.device)
        try:
            with torch.no_grad():
                output = self._run(stage, received, 0)
        except Exception as error:  # noqa: BLE001 - sent to every rank of the pipeline, which raise it together
            return portable(error)
        finally:
            with torch.no_grad():
                for buffer, value in saved:
                    buffer.copy_(value)
        if not output.is_floating_point():
            return tuple(output.shape), output.dtype, False, self.gates.outputs.seen(*self.gates.stages[stage])
        trained = carries or any(p.requires_grad for p in self.root.parameters())
        return tuple(output.shape), output.dtype, trained, self.gates.outputs.seen(*self.gates.stages[stage])


def _checked_loss(loss: Any, check_nan: bool) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ModelError(
            f"The step returned {type(loss).__name__} instead of a scalar loss.",
            "A pipelined step needs one loss per microbatch.",
            "Return the loss tensor (0-dim) from the step.",
        )
    if check_nan and bool(loss.isnan()):
        raise ModelError(
            "The loss is NaN in the first step of this batch shape.",
            "Either the model itself gives NaN, or code after a pipeline cut uses a value from before it (a skip "
            "connection around the blocks), which other stages do not have and see as NaN.",
            "Check the model with pipeline_parallel_size=1; if it is finite there, move the skip connection into a block.",
        )
    return loss.reshape(())


def _shapes(batch: Any) -> Any:
    """Shapes and dtypes of all tensors of a microbatch, as a hashable key."""
    leaves = pytree.tree_leaves(batch)
    return tuple((tuple(t.shape), t.dtype) for t in leaves if isinstance(t, torch.Tensor))
