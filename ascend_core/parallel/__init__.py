"""Pipeline, tensor, data and expert parallel training of an unmodified model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ascend_core.config import HybridConfig
from ascend_core.device import current_device
from ascend_core.mesh import HybridMesh
from ascend_core.parallel.apply import apply
from ascend_core.parallel.block_costs import BlockCosts, measured_costs
from ascend_core.parallel.blocks import find_blocks
from ascend_core.parallel.model import ParallelModel
from ascend_core.parallel.moe import ExpertList, MoELayer, load_balance_loss
from ascend_core.parallel.self_check import SelfCheck
from ascend_core.parallel.vocabulary import vocab_parallel_cross_entropy

__all__ = [
    "BlockCosts",
    "ExpertList",
    "MoELayer",
    "ParallelModel",
    "find_blocks",
    "load_balance_loss",
    "measured_costs",
    "parallelize",
    "vocab_parallel_cross_entropy",
]


def parallelize(
    model: nn.Module,
    config: HybridConfig,
    mesh: HybridMesh,
    *,
    device: torch.device | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    pipeline_module: str = "auto",
    root_is_boundary: bool = True,
    stage_cuts: Sequence[int] | BlockCosts | None = None,
) -> ParallelModel:
    """Spread a model over a mesh, in place.

    Args:
        model: The whole model with real parameters. Rank 0's values are given to all ranks.
        config: The configuration.
        mesh: From :func:`ascend_core.mesh.build_mesh`.
        device: This rank's device; default: the CPU, or the current NPU.
        loss_fn: ``(output, target) -> scalar loss``, for :meth:`ParallelModel.train_step`.
        pipeline_module: Name of the module whose call is pipelined; default: the model itself.
        root_is_boundary: With ``"auto"``, whether the model's own call is the pipelined one (else a child's).
        stage_cuts: Where pipeline stages begin. Default: blocks are dealt by cost estimated from their shapes, the output
            head included (:mod:`ascend_core.parallel.balance`). A :class:`BlockCosts`, for example from
            :func:`measured_costs`, deals by those; numbers name the first block of every stage but the first.

    Returns:
        The spread model.

    Raises:
        ConfigError: Sizes, plan and model do not fit.
        ModelError: The model has no blocks, or parameters without values.

    Communication:
        Every rank must call it; see :func:`ascend_core.parallel.apply.apply`.

    Example:
        >>> model = parallelize(model, config, mesh, loss_fn=F.cross_entropy)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> loss = model.train_step(x, y); model.clip_grad_norm_(1.0); optimizer.step(); optimizer.zero_grad()
    """
    if device is None:
        device = current_device(mesh.device_type)
    check = SelfCheck.prepare(model, config, pipeline_module=pipeline_module, root_is_boundary=root_is_boundary)
    applied = apply(
        model,
        config,
        mesh,
        device,
        pipeline_module=pipeline_module,
        root_is_boundary=root_is_boundary,
        stage_cuts=stage_cuts,
    )
    return ParallelModel(model, config, mesh, device, applied, loss_fn, check)
