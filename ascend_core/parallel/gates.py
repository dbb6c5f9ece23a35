"""Gates in front of the blocks, which let unmodified model code run one stage at a time.

Every stage runs the user's whole step. Blocks of earlier stages are stepped over (their output is NaN, so that nothing
can use it unnoticed); the first local block gets the received activation in place of its argument; the first block of
the next stage ends the step by :class:`Cut`, which carries the activation out. On the last stage the step runs to its
end and returns the loss. Outside of a training step, a call of the model runs all stages in turn and gives every rank
the real output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ascend_core import _shim
from ascend_core.errors import ModelError
from ascend_core.parallel.activations import activation, argument_order, broadcast_nest, in_order, poison, replace
from ascend_core.parallel.block_outputs import BlockOutputs, OutputForm
from ascend_core.parallel.blocks import BlockList
from ascend_core.parallel.failures import portable
from ascend_core.parallel.hugging_face import CallGuard, owner
from ascend_core.parallel.recompute import BlockRecompute
from ascend_core.parallel.rng import StepRng
from ascend_core.schedule_rules import stage_owner


class Cut(BaseException):
    """Ends the user's step at the end of a stage. Not an Exception, so that user code does not catch it.

    Args:
        activation: What the stage sends on, or None in an evaluation.
    """

    def __init__(self, activation: torch.Tensor | None = None) -> None:
        super().__init__("end of the pipeline stage")
        self.activation = activation


@dataclass
class StageRun:
    """The stage that is running: its blocks, its input, and which block must be called next."""

    first: int
    end: int
    received: torch.Tensor | None
    expected: int = 0


class BlockGates:
    """The gates of one model.

    Args:
        root: The model, pruned for this rank.
        blocks: Its blocks.
        stages: ``(first, one past last)`` block of every stage.
        group: The pipeline group.
        rng: Random streams.
        schedule: The schedule, which tells which rank of the group owns which stage.
        recompute: Runs blocks under activation checkpointing, or None.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: BlockList,
        stages: list[tuple[int, int]],
        group: dist.ProcessGroup,
        rng: StepRng,
        schedule: str,
        recompute: BlockRecompute | None = None,
    ) -> None:
        self.recompute = recompute
        self.blocks, self.stages, self.group, self.rng, self.schedule = blocks, stages, group, rng, schedule
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.run: StageRun | None = None
        self._chained = 0
        self._due = 0  # the stage whose output is shared next
        self._inside = False
        self.pretrained = owner(root, blocks.names[0])
        self._guard = CallGuard(self.pretrained) if self.pretrained is not None else None
        modules = dict(root.named_modules())
        self._gated = [modules[name] for name in blocks.names]
        self._root, self._block_modules = root, list(self._gated)
        self.outputs = BlockOutputs(self._block_modules, blocks.names)
        self._orders = [argument_order(block) for block in self._gated]
        for index, block in enumerate(self._gated):
            _shim.override_call(block, functools.partial(self._call_block, index, _shim.original_call(block)))
        if blocks.boundary is not None:
            boundary = modules[blocks.boundary]
            if boundary in self._gated:
                raise ModelError("The pipelined module is itself a block.", "", "Name the module that holds the list.")
            self._gated.append(boundary)
            _shim.override_call(boundary, functools.partial(self._call_boundary, _shim.original_call(boundary)))

    def remove(self) -> None:
        """Take the gates off again."""
        for module in self._gated:
            _shim.restore_call(module)
        if self._guard is not None:
            self._guard.remove()

    @property
    def labels_given(self) -> bool:
        """The last call of the Hugging Face model, if there is one, had labels: the loss is its own."""
        return self._guard is not None and self._guard.labels_given

    def owner(self, stage: int) -> int:
        """Pipeline rank of a stage."""
        return stage_owner(self.schedule, stage, self.size)

    def stage_parameters(self, stage: int) -> Iterator[nn.Parameter]:
        """Those of its blocks, and those outside of all blocks: any stage may use them, between its blocks too.

        Asked anew each time, as FSDP2 exchanges them.
        """
        first, end = self.stages[stage]
        own = [p for block in self._block_modules[first:end] for p in block.parameters()]
        inside = {id(p) for block in self._block_modules for p in block.parameters()}
        own += [p for p in self._root.parameters() if id(p) not in inside]
        return iter({id(p): p for p in own}.values())

    def stage_blocks(self, stage: int) -> list[nn.Module]:
        """The blocks of a stage."""
        first, end = self.stages[stage]
        return self._block_modules[first:end]

    def run_stage(self, stage: int, received: torch.Tensor | None, step: Callable[[], Any]) -> Any:
        """Run the user's step for one stage.

        Args:
            stage: Stage index.
            received: Activation from the previous stage; None on the first.
            step: The user's step for one microbatch.

        Returns:
            The activation to send, or on the last stage what ``step`` returned.

        Raises:
            ModelError: The step does not call the blocks once each, in order.
        """
        first, end = self.stages[stage]
        self.run = StageRun(first, end, received)
        last = end == len(self.blocks)
        try:
            result = step()
            if not last or self.run.expected != len(self.blocks):
                raise ModelError(
                    f"The step ended after {self.run.expected} of {len(self.blocks)} blocks of {self.blocks.list_name!r}.",
                    "A pipeline stage must see every block called once, in order.",
                    "Call the pipelined model once in the step, or use pipeline_parallel_size=1.",
                )
            return result
        except Cut as cut:
            return cut.activation
        finally:
            self.run = None
            self._inside = False

    # ---- one block

    def _call_block(self, index: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.blocks.boundary is not None and not self._inside:
            raise ModelError(
                f"Block {self.blocks.names[index]!r} was called outside of {self.blocks.boundary!r}'s forward.",
                "The pipeline cuts the call of that module.",
                "Call the module itself, or name the one that is called with pipeline_module=...",
            )
        kwargs = in_order(kwargs, self._orders[index])
        if self.run is None:
            return self._chain(index, call, args, kwargs)
        return self._in_stage(self.run, index, call, args, kwargs)

    def _in_stage(
        self, run: StageRun, index: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._check_order(index, run.expected)
        run.expected = index + 1
        if index == run.end:
            raise Cut(activation(args, kwargs, self.blocks.names[index]))
        if index < run.first:
            return self.outputs.imitate(index, poison(activation(args, kwargs, self.blocks.names[index]), fresh=index == 0))
        if index == run.first:
            if run.received is not None:
                args, kwargs = replace(args, kwargs, run.received)
            self.rng.enter_blocks()
            if self.recompute is not None:
                self.recompute.end_group()
        output = self.recompute(index, call, args, kwargs) if self.recompute is not None else call(*args, **kwargs)
        if index == run.end - 1:
            self.rng.leave_blocks()
        self.outputs.note(index, output)
        return output

    def _check_order(self, index: int, expected: int) -> None:
        if index == expected:
            return
        n = len(self.blocks)
        if index == 0 or expected == n:
            raise ModelError(
                f"The pipelined blocks {self.blocks.list_name!r} were called a second time in one step.",
                "One step runs once through the pipeline.",
                "Call the model once per step, concatenate the inputs, or use pipeline_parallel_size=1.",
            )
        raise ModelError(
            f"Block {self.blocks.names[index]!r} was called when {self.blocks.names[expected]!r} was due.",
            "Pipeline stages run the blocks in the order of their list.",
            "Run the blocks in order, or use pipeline_parallel_size=1.",
        )

    # ---- evaluation: all stages in turn, the real output everywhere

    def _call_boundary(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nested, self._inside = self._inside, True
        try:
            if self.run is not None or nested:
                return call(*args, **kwargs)
            return self._chain_boundary(call, args, kwargs)
        finally:
            self._inside = nested

    def _chain_boundary(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            raise ModelError(
                "The pipelined model was called with gradients enabled, outside of a training step.",
                "Gradients exist only inside a pipelined step.",
                "Wrap the call in torch.no_grad().",
            )
        self._chained = self._due = 0
        output: Any = None
        try:
            output = call(*args, **kwargs)
        except Cut:
            pass
        except Exception as error:
            self._fail(error)
            raise
        return self._share(output, len(self.stages) - 1)

    def _fail(self, error: Exception) -> None:
        """Tell the others at this rank's next turn to send; until then take what they send."""
        while self._due < len(self.stages):
            mine = self.owner(self._due) == self.rank
            received, failure = broadcast_nest(
                None, self.owner(self._due), self.group, self.rng.device, portable(error) if mine else None
            )
            if failure is not None:
                self._due = len(self.stages)
            elif isinstance(received, OutputForm):
                self.outputs.learn(received)
            else:
                self._due += 1

    def _chain(self, index: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_order(index, self._chained)
        self._chained = index + 1
        stage = self._stage_of(index)
        mine = self.owner(stage) == self.rank
        output = call(*args, **kwargs) if mine else activation(args, kwargs, self.blocks.names[index])
        output = self._learn(index, output, stage)
        ends_stage = index == self.stages[stage][1] - 1
        if index == len(self.blocks) - 1:
            self._chained = 0
            if self.blocks.boundary is not None:
                if not mine:
                    raise Cut
                return output
        return self._share(output, stage) if ends_stage else output

    def _learn(self, index: int, output: Any, stage: int) -> Any:
        """At a block's first evaluation, tell the other ranks how its output is nested."""
        mine = self.owner(stage) == self.rank
        if not self.outputs.known(index):
            self.outputs.learn(self._exchange(self.outputs.describe(index, output) if mine else None, stage))
        return output if mine else self.outputs.imitate(index, output)

    def _stage_of(self, index: int) -> int:
        return next(s for s, (first, end) in enumerate(self.stages) if first <= index < end)

    def _share(self, output: Any, stage: int) -> Any:
        """Broadcast a stage's output, any nesting of tensors and plain values, over the pipeline group."""
        received = self._exchange(output, stage)
        self._due = stage + 1
        return received

    def _exchange(self, output: Any, stage: int) -> Any:
        received, failure = broadcast_nest(output, self.owner(stage), self.group, self.rng.device)
        if failure is not None:
            self._due = len(self.stages)
            raise failure
        return received
