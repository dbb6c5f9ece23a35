"""MoE layers in a pipelined step: what replicas must agree on, and load-balance losses of all stages.

Only the last stage's step sees the loss, so the other stages add theirs to the activation they send: its value is as
before, and in backward the load-balance loss gets the gradient that it would have as a summand of the loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ascend_core.errors import ModelError
from ascend_core.mesh import HybridMesh
from ascend_core.parallel.moe import MoELayer, load_balance_loss
from ascend_core.schedule_rules import SCHEDULES


def replicas_that_wait(root: nn.Module, mesh: HybridMesh) -> dist.ProcessGroup | None:
    """The data-parallel group, if replicas communicate inside of forward and so must run equally many microbatches."""
    waits = mesh.size("ep") > 1 or any(m.sum_over_replicas is not None for m in balanced_layers(root))
    return mesh.group("dp") if waits else None


def balanced_layers(root: nn.Module) -> list[MoELayer]:
    """The MoE layers of a model that have a load-balance loss, those of other stages included."""
    return [m for m in root.modules() if isinstance(m, MoELayer) and m.load_balance_coefficient]


def agree_on_schedule(
    group: dist.ProcessGroup, device: torch.device, schedule: str, num_microbatches: int, known: bool
) -> bool:
    """Check that all replicas run the same schedule, and tell whether all of them know their batch's shape.

    Args:
        group: The data-parallel group.
        device: Where the numbers travel.
        schedule: This replica's schedule.
        num_microbatches: Its number of microbatches.
        known: This replica need not measure the shapes between its stages.

    Returns:
        ``known`` on all replicas.

    Raises:
        ModelError: They would run different numbers of microbatches, on every rank of the group.

    Communication:
        One all-reduce of five int64 over the group; waits for it.
    """
    mine = [num_microbatches, SCHEDULES.index(schedule)]
    numbers = torch.tensor([*mine, *(-n for n in mine), int(not known)], device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    most, kind, least, other, unknown = numbers.tolist()
    if most != -least or kind != -other:
        raise ModelError(
            f"The batches of the replicas give between {-least} and {most} microbatches.",
            "MoE layers exchange tokens between replicas in every microbatch, so all need the same number.",
            "Give every replica the same batch size (drop_last=True in the data loader).",
        )
    return not unknown


class _Attached(torch.autograd.Function):
    """An activation, and a loss whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor, loss: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor, ctx.like = factor, loss.detach()
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, torch.full_like(ctx.like, ctx.factor), None


def attach_load_balance(
    blocks: Iterable[nn.Module], activation: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add the load-balance losses of a stage to what it sends.

    Args:
        blocks: The blocks of the stage.
        activation: Its output.
        factor: What the loss of this microbatch is multiplied by before backward.

    Returns:
        The activation with the gradient attached, and the value of the losses (None without any).
    """
    total = sum(load_balance_loss(block) for block in blocks)
    if not isinstance(total, torch.Tensor):
        return activation, None
    return _Attached.apply(activation, total, factor), total.detach()


def check_loss_was_added(layers: Iterable[MoELayer]) -> None:
    """Check that the step that has just run has asked for the load-balance loss of the model.

    Raises:
        ModelError: It has not, but the other stages have already added theirs.
    """
    for layer in layers:
        if layer.training and not layer.load_balance_loss_asked:
            raise ModelError(
                f"A MoE layer has load_balance_coefficient={layer.load_balance_coefficient}, but the step did not add "
                "load_balance_loss(model) to its loss.",
                "In a pipeline the other stages add theirs, so the step must add it as a whole, without a factor.",
                "Return loss + load_balance_loss(model) from the step, or set load_balance_coefficient=0.",
            )
        layer.load_balance_loss_asked = False
