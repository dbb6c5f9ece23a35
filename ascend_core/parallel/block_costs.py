"""What a pipeline stage costs: estimated from the model's shapes, or measured by a timed forward."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ascend_core.errors import ConfigError, ModelError
from ascend_core.parallel.blocks import BlockList, around

Cut = list[tuple[int, int]]
"""``(first, one past last)`` block of every stage."""


@dataclass(frozen=True)
class BlockCosts:
    """Relative costs of one microbatch, in any unit.

    Attributes:
        blocks: Of each block.
        before: Of what runs before the blocks, on the first stage.
        after: Of what runs after them, on the last stage: the output head.

    Raises:
        ConfigError: There is no block, or a cost is negative.
    """

    blocks: tuple[float, ...]
    before: float = 0.0
    after: float = 0.0

    def __post_init__(self) -> None:
        """Check the costs."""
        if not self.blocks or min(*self.blocks, self.before, self.after) < 0:
            raise ConfigError(f"{self}", "There is at least one block, and no cost is negative.", "Give other costs.")

    def stages(self, cut: Cut) -> list[float]:
        """Cost of every stage."""
        costs = [float(sum(self.blocks[first:end])) for first, end in cut]
        costs[0] += self.before
        costs[-1] += self.after
        return costs


def estimated_costs(model: nn.Module, blocks: BlockList) -> BlockCosts:
    """Estimate costs from shapes, before the model is cut: equal on all ranks without communication.

    A forward counts one per weight (one multiplication per token and weight), none for embeddings, and for convolutions
    one per weight and output position, relative to the first one's. A backward counts as much again for gradients of
    activations, where something earlier is trained, and for gradients of trained parameters. Attention scores, which
    depend on the sequence length and are alike in all blocks, and the loss are left out.

    Args:
        model: The whole model.
        blocks: Its blocks.

    Returns:
        Multiplications per token.
    """
    modules = dict(model.named_modules())
    before, after = around(model, blocks, modules)
    walk = _Estimate(trained=any(p.requires_grad for p in model.parameters(recurse=False)))
    first = sum(walk.add(module) for module in before)
    each = tuple(walk.add(modules[name]) for name in blocks.names)
    return BlockCosts(each, first, sum(walk.add(module) for module in after))


@dataclass
class _Estimate:
    """Walks a model in the order of registration."""

    trained: bool
    positions: float = 1.0  # output positions of convolutions, relative to the input

    def add(self, module: nn.Module) -> float:
        """Cost of a module."""
        cost, gradients_in = 0.0, self.trained
        for part in module.modules():
            weights = list(part.parameters(recurse=False))
            self.positions /= _positions_per_output(part)
            if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                forward = self.positions * sum(p.numel() for p in weights)
                trained = self.positions * sum(p.numel() for p in weights if p.requires_grad)
                gradients_in |= trained > 0
                cost += forward * (2 if gradients_in else 1) + trained
            self.trained |= any(p.requires_grad for p in weights)
        return cost


def _positions_per_output(module: nn.Module) -> float:
    """How many input positions make one output position: the product of the strides of a convolution or pooling."""
    stride = getattr(module, "stride", None)
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        assert isinstance(stride, tuple)
        return 1 / math.prod(stride) if module.transposed else math.prod(stride)
    dims = {nn.MaxPool1d: 1, nn.AvgPool1d: 1, nn.MaxPool2d: 2, nn.AvgPool2d: 2, nn.MaxPool3d: 3, nn.AvgPool3d: 3}
    if type(module) in dims:
        return float(math.prod(stride) if isinstance(stride, tuple) else int(stride or 1) ** dims[type(module)])
    return 1.0


def measured_costs(model: nn.Module, blocks: BlockList, run: Callable[[], Any], repeats: int = 3) -> BlockCosts:
    """Measure costs by timed forward passes of the whole model.

    Args:
        model: The whole model, on the device it will be trained on.
        blocks: Its blocks, from :func:`ascend_core.parallel.blocks.find_blocks`.
        run: Calls the model (and its loss) on one microbatch; called without gradients.
        repeats: Passes after one to warm up; of each part the fastest counts.

    Returns:
        Seconds of a forward. Buffers and random states are as before afterwards.
    """
    modules = dict(model.named_modules())
    parts = [modules[name] for name in blocks.names]
    marks: list[float] = []
    mark = lambda *_: marks.append(_now(model))  # noqa: E731 - also a hook, which gets arguments
    hooks = [h for m in parts for h in (m.register_forward_pre_hook(mark), m.register_forward_hook(mark))]
    saved = [(b, b.clone()) for b in model.buffers()]
    passes = []
    try:
        with torch.no_grad(), _random_state_kept(model):
            for _ in range(repeats + 1):
                marks.clear()
                mark()
                run()
                mark()
                passes.append([b - a for a, b in itertools.pairwise(marks)])
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)
    if {len(p) for p in passes} != {2 * len(parts) + 1}:
        raise ModelError(
            f"The blocks of {blocks.list_name!r} were not called once each.",
            "Each of them is timed.",
            "Give a function that calls the model once.",
        )
    fastest = [min(times) for times in zip(*passes[1:], strict=True)]
    return BlockCosts(tuple(fastest[1:-1:2]), fastest[0], fastest[-1])


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _now(model: nn.Module) -> float:
    device = _device(model)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()


def _random_state_kept(model: nn.Module) -> AbstractContextManager[None]:
    device = _device(model)
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device.index], device_type=device.type)
