"""The verbs of a spread model that deal with whole state: what one process would have saved, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ascend_core.mesh import HybridMesh
from ascend_core.parallel import state
from ascend_core.parallel.data import local


class WholeState:
    """Base of :class:`ascend_core.parallel.ParallelModel`."""

    module: nn.Module
    mesh: HybridMesh
    names: state.Names
    parameter_names: dict[int, str]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The unsplit model's state dict on global rank 0, empty elsewhere. Every rank must call it."""
        return state.gather_model(self.module, self.names, self.mesh)

    def load_state_dict(self, whole: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load an unsplit state dict, given on every rank."""
        state.load_model(self.module, self.names, whole, strict=strict)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The unsplit optimizer's state dict on global rank 0. Every rank must call it."""
        return state.gather_optimizer(optimizer, self.module, self.names, self.mesh, self.parameter_names)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, whole: Mapping[str, Any]) -> None:
        """Load an unsplit optimizer state dict, given on every rank."""
        state.reshard(self.module)
        state.load_optimizer(optimizer, self.names, whole, self.parameter_names)

    def share_buffers(self) -> None:
        """Give every replica the buffers of the first one (batch norm's statistics), as torch's DDP does.

        Communication: one broadcast per buffer over the data-parallel axis.
        """
        if self.mesh.size("dp") == 1:
            return
        group = self.mesh.group("dp")
        source = dist.get_process_group_ranks(group)[0]
        with torch.no_grad():
            for buffer in self.module.buffers():
                dist.broadcast(local(buffer), src=source, group=group)
