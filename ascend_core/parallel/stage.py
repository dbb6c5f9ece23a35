"""One stage as torch's schedules see it: a module that runs the user's step up to its cut, and its backward.

Schedules that split the backward ask for the gradients of the received activation first and for those of parameters
later. torch does so by autograd graph, from the stage's parameters; here these are those that the user's step can reach
in this stage, wherever they live in the model. Each stage remembers which messages are under way, so that a rank that waits
in vain can say for what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage

from ascend_core import _shim


class StageModule(nn.Module):
    """What torch's stage calls. It registers no child, so that torch leaves the model's gradients alone.

    Args:
        run: ``(received activation or None, microbatch number) -> output``.
        reach: The parameters that the stage may use.
    """

    def __init__(
        self, run: Callable[[torch.Tensor | None, int], torch.Tensor], reach: Callable[[], Iterator[nn.Parameter]]
    ) -> None:
        super().__init__()
        self._run, self._reach = run, reach

    def forward(self, received: torch.Tensor | None = None, *, mb: torch.Tensor) -> torch.Tensor:
        """Run microbatch ``mb`` (an int64 tensor of one element)."""
        return self._run(received, int(mb))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters that a split backward differentiates by."""
        return self._reach()


class Stage(PipelineStage):
    """A torch stage whose backward errors are kept until the schedule has finished.

    Args:
        module: What it runs.
        stage: Its index.
        num_stages: Stages of all ranks.
        device: This rank's device.
        inputs: What it receives, on the meta device.
        output: What it sends, on the meta device.
        group: The pipeline group.
        record: Takes an error.
        span: ``(kind, stage, microbatch) -> context`` around every action; kinds are torch's letters F, B, I and W.
    """

    def __init__(
        self,
        module: StageModule,
        stage: int,
        num_stages: int,
        device: torch.device,
        inputs: tuple[torch.Tensor, ...],
        output: torch.Tensor,
        group: dist.ProcessGroup,
        record: Callable[[BaseException], None],
        span: Callable[[str, int, int], AbstractContextManager[None]],
    ) -> None:
        super().__init__(module, stage, num_stages, device, input_args=inputs, output_args=(output,), group=group)
        self.record, self.span = record, span
        self._awaited: dict[tuple[str, int], int] = {}  # what is received, for which microbatch: from which global rank
        self._sent: dict[tuple[str, int], int] = {}  # likewise, to which global rank
        self._whole: dict[int, Any] = {}  # backward passes that are done whole, at their second half: roots, gradients

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a forward. torch has waited for its input already."""
        self._awaited.pop(("activation", fwd_chunk_id), None)
        with self.span("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run a whole backward, or its first half."""
        self._awaited.pop(("gradient", bwd_chunk_id), None)
        with self.span("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the second half of a backward."""
        with self.span("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    # ---- what is under way

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive an activation."""
        return self._noted(super().get_fwd_recv_ops(fwd_chunk_id), self._awaited, "activation", fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive a gradient."""
        return self._noted(super().get_bwd_recv_ops(bwd_chunk_id), self._awaited, "gradient", bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send an activation."""
        return self._noted(super().get_fwd_send_ops(fwd_chunk_id), self._sent, "activation", fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send a gradient."""
        return self._noted(super().get_bwd_send_ops(bwd_chunk_id), self._sent, "gradient", bwd_chunk_id)

    def _noted(self, ops: list[dist.P2POp], where: dict[tuple[str, int], int], what: str, microbatch: int) -> list[dist.P2POp]:
        for op in ops:
            where[what, microbatch] = op.peer
        return ops

    def under_way(self) -> str:
        """What the stage waits for, and which of its messages may not have been taken."""
        awaited = [f"the {what} of microbatch {i} from rank {peer}" for (what, i), peer in self._awaited.items()]
        last = {what: f"the {what} of microbatch {i} to rank {peer}" for (what, i), peer in self._sent.items()}
        parts = [f"receive {' and '.join(awaited)}"] if awaited else []
        parts += [f"last sent {' and '.join(last.values())}"] if last else []
        return f"stage {self.stage_index}: {'; '.join(parts) or 'nothing'}"

    def clear_runtime_states(self) -> None:
        """Forget the last step."""
        super().clear_runtime_states()
        self._awaited.clear()
        self._sent.clear()

    # ---- backward

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        """Run torch's backward; on an error send zeros on and remember it."""
        try:
            if backward_type == "input":
                return self._first_half(bwd_kwargs, last_backward)
            if backward_type == "weight" and bwd_kwargs["param_groups"] is None:
                return self._do_whole(bwd_kwargs["stage_output"])
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)
        except Exception as error:  # noqa: BLE001 - kept for _agree, so that the neighbours are not left waiting
            self.record(error)
            return tuple(None for _ in bwd_kwargs.get("input_values", ())), []

    def _first_half(self, bwd_kwargs: dict[str, Any], last_backward: bool) -> Any:
        """Gradients of the stage's input.

        torch finds a stage's parameters on the way from its output to its input. Where there is no such way (nothing before
        the stage is trained, or the stage leaves its input alone) it would find none, so that the whole backward is put off.
        """
        outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
        roots = [  # the outputs themselves are detached in place
            (get_gradient_edge(o), torch.ones_like(o) if gradients is None else gradients[i])
            for i, o in enumerate(outputs)
            if o.requires_grad
        ]
        if _any_gradient(bwd_kwargs["input_values"]):
            result = super().backward_maybe_with_nosync("input", bwd_kwargs, last_backward=last_backward)
            if any(grad is not None for grad in result[0]):
                return result
        self._whole[id(outputs[0])] = roots
        return tuple(None for _ in bwd_kwargs["input_values"]), None

    def _do_whole(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        roots = self._whole.pop(id(outputs[0]))
        if roots:
            torch.autograd.backward([edge for edge, _ in roots], [gradient for _, gradient in roots])
        return (), None


def _any_gradient(values: Any) -> bool:
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def sendable(output: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that is no view: a split backward detaches it in place, which views do not allow."""
    output = output.contiguous()
    return output.clone() if _shim.is_view(output) else output
