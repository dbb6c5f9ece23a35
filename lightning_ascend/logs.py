"""``self.log`` inside a pipelined step: captured per microbatch, combined, and logged once on every rank.

The user's step runs once per microbatch, and to its end on the last stage only. Values are combined over microbatches
as Lightning combines them over batches (``reduce_fx``), and replayed on all ranks of the pipeline, so that callbacks,
schedulers and loggers see the same numbers everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ascend_core.errors import ModelError


class StepLogs:
    """Collects what one pipelined training step logs and returns.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._log = module.log
        self._number = 0
        self._logged: dict[str, tuple[dict[str, Any], dict[int, torch.Tensor]]] = {}
        self._returned: dict[int, dict[str, Any]] = {}

    @contextmanager
    def capture(self, number: int) -> Iterator[None]:
        """Capture ``self.log`` calls of microbatch ``number``."""
        self._number = number
        self._module.log = self._capture
        try:
            yield
        finally:
            del self._module.log

    def _capture(self, name: str, value: Any, **options: Any) -> None:
        if not isinstance(value, (torch.Tensor, int, float)):
            raise ModelError(
                f"self.log({name!r}) of a {type(value).__name__} in a pipelined training step.",
                "The object is updated on the last stage only, so it cannot be reduced over all ranks.",
                "Log a number or tensor in training_step; metric objects work in validation and test steps.",
            )
        value = value.detach().float().mean() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        self._logged.setdefault(name, (options, {}))[1][self._number] = value

    def loss(self, number: int, output: Any) -> Any:
        """Take the loss out of what ``training_step`` returned, and keep the rest."""
        if isinstance(output, Mapping):
            if "loss" not in output:
                raise ModelError("training_step returned a dict without 'loss'.", "", "Put the loss under the key 'loss'.")
            self._returned[number] = {k: v for k, v in output.items() if k != "loss"}
            return output["loss"]
        return output

    def collect(self, weights: Sequence[float]) -> dict[str, Any]:
        """Combine over microbatches: plain values that can travel to other ranks.

        Args:
            weights: Of each microbatch in a mean, as in the loss.
        """
        logs = {}
        for name, (options, values) in self._logged.items():
            numbers = sorted(values)
            stacked = torch.stack([values[i].cpu() for i in numbers])
            logs[name] = (options, float(_combine(stacked, [weights[i] for i in numbers], options.get("reduce_fx", "mean"))))
        keys = self._returned[0].keys() if self._returned else ()
        extra = {k: _join([self._returned[i][k] for i in sorted(self._returned)]) for k in keys}
        return {"logs": logs, "extra": extra}

    def replay(self, collected: Mapping[str, Any]) -> None:
        """Log the combined values on this rank."""
        for name, (options, value) in collected["logs"].items():
            self._log(name, value, **options)


def _combine(
    values: torch.Tensor, weights: Sequence[float], reduce_fx: str | Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    if callable(reduce_fx):
        return reduce_fx(values)
    reductions: dict[str, Callable[[], torch.Tensor]] = {
        "mean": lambda: _mean(values, weights),
        "avg": lambda: _mean(values, weights),
        "sum": values.sum,
        "max": values.max,
        "min": values.min,
    }
    return reductions[reduce_fx.lower()]()


def _mean(values: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Weighted mean; a microbatch without weight (no valid token, so its mean is NaN) does not take part."""
    counted = [(v, w) for v, w in zip(values, weights, strict=True) if w]
    if not counted or len(set(weights)) == 1:
        return values.mean()
    return torch.stack([v * w for v, w in counted]).sum() / sum(w for _, w in counted)


def _join(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        tensors = [v.detach().cpu() for v in values]
        if first.dim():
            return torch.cat(tensors)
        return torch.stack(tensors).float().mean()
    return values if len(values) > 1 else first
