"""What each block of a model is called with: recorded from a small run of the whole model, before it is spread.

Blocks take masks, position embeddings and other arguments that only the model knows how to make. A model of the Hugging
Face kind says by ``main_input_name`` and its config what a small input looks like; for any other, a block is tried with
a random activation alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ascend_core.parallel.activations import activation, replace

TOKENS = 8
"""Sequence length of the small input; every tensor-parallel size up to it that is a power of two divides it."""


@dataclass(frozen=True)
class BlockInput:
    """Arguments of one call of a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> BlockInput:
        """Copy the tensors to a device."""
        return BlockInput(_map(self.args, lambda t: t.to(device)), _map(self.kwargs, lambda t: t.to(device)))

    @property
    def activation(self) -> torch.Tensor:
        """The tensor that the block turns into its output."""
        return activation(self.args, self.kwargs, "")

    def with_activation(self, tensor: torch.Tensor) -> BlockInput:
        """The same call with another activation."""
        args, kwargs = replace(self.args, self.kwargs, tensor)
        return BlockInput(args, kwargs)


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change every tensor of a nest; anything that is neither a tensor nor plain (a cache) becomes None."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: _map(v, change) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(v, change) for v in value)
    return value if isinstance(value, (bool, int, float, str)) else None


def record_block_inputs(root: nn.Module, names: tuple[str, ...]) -> dict[str, BlockInput]:
    """Record what the blocks are called with in a small run, each block but the first stepped over.

    Args:
        root: The whole model, on one device.
        names: Names of its blocks.

    Returns:
        Block name to arguments, for the blocks that were reached; empty if no small input is known for the model.
    """
    model = _self_describing(root)
    if model is None or not names:
        return {}
    blocks = {n: root.get_submodule(n) for n in names}
    for step_over in (True, False):
        recorded: dict[str, BlockInput] = {}
        try:
            with (
                _evaluating(model),
                torch.no_grad(),
                torch.random.fork_rng(devices=[]),
                _recording(blocks, recorded, step_over),
            ):
                model(**_small_input(model))
        except Exception:  # noqa: BLE001 - blocks that cannot be stepped over, or a model of another kind
            continue
        return recorded
    return {}


def _self_describing(root: nn.Module) -> Any:
    """The outermost module that has a config and names its main input, as Hugging Face models do."""
    for module in root.modules():
        if isinstance(getattr(module, "main_input_name", None), str) and hasattr(module, "config"):
            return module
    return None


def _small_input(model: Any) -> dict[str, Any]:
    config = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        side = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        pixels = torch.randn(2, config.num_channels, *side, generator=generator)
        return {"pixel_values": pixels.to(device=device, dtype=next(model.parameters()).dtype)}
    ids = torch.randint(0, text.vocab_size, (2, TOKENS), generator=generator).to(device)
    inputs = {model.main_input_name: ids}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return inputs


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    modes = {m: m.training for m in model.modules()}
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    cached = {key: c.use_cache for key, c in configs.items() if isinstance(getattr(c, "use_cache", None), bool)}
    model.eval()
    for key in cached:
        configs[key].use_cache = False
    try:
        yield
    finally:
        for key, value in cached.items():
            configs[key].use_cache = value
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _recording(blocks: dict[str, nn.Module], recorded: dict[str, BlockInput], step_over: bool) -> Iterator[None]:
    first_output: list[Any] = []
    forwards = {n: b.__dict__.get("forward") for n, b in blocks.items()}

    def watch(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            recorded.setdefault(name, BlockInput(_map(args, torch.clone), _map(kwargs, torch.clone)))
            if first_output and step_over:
                return first_output[0]
            output = call(*args, **kwargs)
            first_output.append(output)
            return output

        return forward

    for name, block in blocks.items():
        block.forward = watch(name, block.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, block in blocks.items():
            before: Any = forwards[name]
            if before is None:
                del block.forward
            else:
                block.forward = before


def plain_input(block: nn.Module) -> BlockInput | None:
    """A random activation of the width that the block's first weight matrix or norm takes; None without one."""
    for module in block.modules():
        width = _width(module)
        weight = getattr(module, "weight", None)
        if width is not None and isinstance(weight, torch.Tensor):
            generator = torch.Generator().manual_seed(0)
            return BlockInput((torch.randn(2, TOKENS, width, generator=generator).to(weight),))
    return None


def _width(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return module.in_features
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim
    weight = getattr(module, "weight", None)
    return int(weight.shape[-1]) if isinstance(weight, torch.Tensor) and weight.dim() == 1 else None
