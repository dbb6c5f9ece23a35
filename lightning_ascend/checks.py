"""What the hybrid strategy refuses, before any process waits for another.

Every check raises one clear error on every rank, from what each rank knows by itself.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ascend_core.config import HybridConfig
from ascend_core.errors import ConfigError, ModelError, NotAvailableError
from ascend_core.mesh import Layout, resolve_layout
from ascend_core.parallel.blocks import BlockList, deal, find_blocks

_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true")


def check_module(module: Any, config: HybridConfig, world_size: int, pipeline_module: str) -> Layout:
    """Check a LightningModule against a configuration.

    Args:
        module: The LightningModule, as the user built it.
        config: The configuration.
        world_size: Number of ranks.
        pipeline_module: The strategy's argument.

    Returns:
        The layout it will get.

    Raises:
        ConfigError: The sizes do not fit the world or the model.
        ModelError: The module does something a pipeline cannot run.
    """
    blocks = _blocks(module, config, pipeline_module)
    layout = resolve_layout(config, world_size, len(blocks) if blocks else None)
    if layout.pp > 1:
        if blocks:
            deal(blocks, layout.pp * config.num_stages_per_rank)
        _check_pipelined(module)
    if (layout.pp > 1 or layout.tp > 1) and getattr(module, "_compiler_ctx", None) is not None:
        raise NotAvailableError(
            "A torch.compile'd LightningModule with pipeline or tensor parallel.",
            "Blocks are rearranged after compilation.",
            "Pass the module itself.",
        )
    return layout


def _blocks(module: Any, config: HybridConfig, pipeline_module: str) -> BlockList | None:
    built = any(True for _ in module.parameters())
    if config.pipeline_parallel_size == 1 or not built:
        return None
    return find_blocks(module, pipeline_module)


def _check_pipelined(module: Any) -> None:
    if not module.automatic_optimization:
        raise ModelError(
            "Manual optimization (automatic_optimization=False) with pipeline_parallel_size > 1.",
            "A pipeline runs forward and backward of all microbatches in one go.",
            "Use automatic optimization, or pipeline_parallel_size=1.",
        )
    base = next(c for c in type(module).__mro__ if c.__name__ == "LightningModule")
    if type(module).backward is not base.backward:  # type: ignore[attr-defined]
        raise ModelError(
            f"{type(module).__name__} overrides backward() with pipeline_parallel_size > 1.",
            "The pipeline runs backward itself; the override would not be called.",
            "Remove it, or use pipeline_parallel_size=1.",
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ModelError(
            "training_step(dataloader_iter) with pipeline_parallel_size > 1.",
            "A pipeline needs the batch to cut it into microbatches.",
            "Take the batch as argument.",
        )


def check_trainer(trainer: Any, layout: Layout, layer_sync: object) -> None:
    """Refuse Trainer options that would be wrong with a split model.

    Raises:
        NotAvailableError: Weight averaging, or synchronised batch norm.
    """
    if layout.pp == layout.tp == layout.ep == 1:
        return
    averaging = ("StochasticWeightAveraging", "WeightAveraging")
    for callback in trainer.callbacks:
        names = {c.__name__ for c in type(callback).__mro__}
        if names & set(averaging):
            raise NotAvailableError(
                f"{type(callback).__name__} with {layout}.",
                "It copies the module, and each rank holds only a part of it.",
                "Remove the callback.",
            )
    if layer_sync is not None:
        raise NotAvailableError(
            f"sync_batchnorm=True with {layout}.",
            "It would synchronise over ranks that hold different layers, and wait for ever.",
            "Set sync_batchnorm=False.",
        )


def check_precision(precision: str, device_type: str) -> None:
    """Refuse precision flags that have no mechanism yet, or none on the device.

    Raises:
        ConfigError: 64-true on NPUs.
        NotAvailableError: Such as 16-mixed, whose loss scale must be agreed over all axes.
    """
    if precision == "64-true" and device_type == "npu":
        raise ConfigError(
            "precision='64-true' on NPUs.",
            "Ascend has no matrix products of 64-bit floats, and HCCL does not reduce them.",
            "Use precision='32-true', or accelerator='cpu'.",
        )
    if precision not in _PRECISIONS:
        raise NotAvailableError(
            f"precision={precision!r} is not available yet with strategy='ascend_hybrid'.",
            "Its loss scale must be agreed over all ranks, which this version cannot do.",
            f"Use one of {', '.join(_PRECISIONS)}.",
        )


def check_optimizers(optimizers: list[torch.optim.Optimizer], layout: Layout) -> None:
    """Refuse optimizers that call the step more than once.

    Raises:
        ConfigError: LBFGS in a pipeline or with spread experts, or several optimizers.
    """
    for optimizer in optimizers:
        if (layout.pp > 1 or layout.ep > 1) and isinstance(optimizer, torch.optim.LBFGS):
            axis = "pipeline_parallel_size" if layout.pp > 1 else "expert_parallel_size"
            raise ConfigError(
                f"LBFGS with {axis} > 1.",
                "It evaluates the step several times and needs products over all parameters, which live on several ranks.",
                "Use a first-order optimizer.",
            )
