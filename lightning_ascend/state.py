"""Checkpoints of the hybrid strategy as single files: what one process would have saved, in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ascend_core._shim import pytree
from ascend_core.parallel import ParallelModel


class StateMixin:
    """Gathers whole state dicts on global rank 0 and cuts them up again on load."""

    parallel: ParallelModel | None
    _is_plain: Any

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are loaded into the whole model, before it is split."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state dict on global rank 0; empty elsewhere unless the model is not split."""
        if self.parallel is None or self._is_plain:
            return _on_cpu(super().lightning_module_state_dict())  # type: ignore[misc]
        return self.parallel.state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights, before or after the split."""
        module = self.lightning_module  # type: ignore[attr-defined]
        if self.parallel is None or self._is_plain or self.parallel.module is not module:
            super().load_model_state_dict(checkpoint, strict=strict)  # type: ignore[misc]
        else:
            self.parallel.load_state_dict(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole optimizer state by parameter name, on global rank 0; plain torch can load it as well."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self.parallel is None or self._is_plain:
            return _on_cpu(super().optimizer_state(optimizer))  # type: ignore[misc]
        return self.parallel.optimizer_state_dict(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states saved in any layout."""
        states = checkpoint["optimizer_states"]
        by_number = all(isinstance(k, int) for s in states for k in s["state"])
        if self.parallel is None or (self._is_plain and by_number):
            super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
            return
        optimizers: list[torch.optim.Optimizer] = self.optimizers  # type: ignore[attr-defined]
        for optimizer, state in zip(optimizers, states, strict=True):
            self.parallel.load_optimizer_state_dict(optimizer, state)


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Tensors on an NPU cannot be loaded on a machine without one; CPU tensors are left as they are."""
    return pytree.tree_map(lambda v: v.cpu() if isinstance(v, torch.Tensor) else v, state)
