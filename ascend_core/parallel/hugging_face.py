"""What is particular to Hugging Face models in a pipeline; they are known by what they have, not by their class.

A *pretrained model* here is a module with a ``config`` that has a ``model_type``, as ``transformers`` builds them with
random or loaded weights. Nothing of that package is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from ascend_core.errors import ModelError

_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")
_CACHES = ("past_key_values", "cache")


def is_pretrained(module: nn.Module) -> bool:
    """Tell whether a module is a Hugging Face model (or a base model inside one)."""
    return isinstance(getattr(getattr(module, "config", None), "model_type", None), str)


def owner(root: nn.Module, block: str) -> nn.Module | None:
    """The outermost pretrained model that holds a block.

    Args:
        root: The model.
        block: Name of a block in it.

    Returns:
        The pretrained model, or None.
    """
    module = root
    for step in block.split("."):
        if is_pretrained(module):
            return module
        module = module.get_submodule(step)
    return None


def planned_list(scope: nn.Module, prefix: str) -> str | None:
    """Name of the block list that a model's own ``base_model_pp_plan`` names, or None without one.

    Args:
        scope: Where to look.
        prefix: Name of ``scope`` in the whole model.
    """
    for name, module in scope.named_modules(prefix=prefix):
        plan = getattr(getattr(module, "config", None), "base_model_pp_plan", None)
        children = dict(module.named_children())
        for key in plan if isinstance(plan, Mapping) else ():
            child = children.get(key)
            if isinstance(child, nn.ModuleList) and len(child):
                return f"{name}.{key}" if name else key
    return None


def check(model: nn.Module) -> None:
    """Refuse a pretrained model that cannot be cut into stages.

    Raises:
        ModelError: An encoder-decoder; a configuration that collects values from all blocks.
    """
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder, with pipeline_parallel_size > 1.",
            "One activation travels from stage to stage, but every decoder block also needs the encoder's output (and in T5 "
            "the first block's position bias).",
            "Use pipeline_parallel_size=1 with tensor_parallel_size or zero_stage=3.",
        )
    for name in _COLLECTED:
        if getattr(config, name, False):
            raise _collects(type(model).__name__, f"config.{name}=True")


def _collects(model: str, what: str) -> ModelError:
    return ModelError(
        f"{model} with {what} and pipeline_parallel_size > 1.",
        "It collects values from every block, and each stage has only its own.",
        "Switch it off, or use pipeline_parallel_size=1.",
    )


class CallGuard:
    """Looks at each call of a pretrained model: no cache, nothing collected from all blocks, and whose loss it is.

    Args:
        model: The pretrained model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.labels_given = False
        parameters = inspect.signature(model.forward).parameters.values()
        named = any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in parameters)
        self._has_cache = named and hasattr(model.config, "use_cache")
        self._handle = model.register_forward_pre_hook(self._before, with_kwargs=True)

    def remove(self) -> None:
        """Stop looking."""
        self._handle.remove()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for name in _COLLECTED:
            if kwargs.get(name):
                raise _collects(type(model).__name__, f"{name}=True")
        if kwargs.get("use_cache") or any(kwargs.get(name) is not None for name in _CACHES):
            raise ModelError(
                f"{type(model).__name__} was called with a key-value cache and pipeline_parallel_size > 1.",
                "Each stage would fill the cache of its own blocks only.",
                "Pass use_cache=False (generate() takes it too).",
            )
        self.labels_given = kwargs.get("labels") is not None
        return args, {**kwargs, "use_cache": False} if self._has_cache else kwargs
