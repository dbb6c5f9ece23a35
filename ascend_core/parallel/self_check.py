"""Self-check before the first step: outputs and gradients of the spread model against the unsplit one, on a few samples.

The unsplit model is kept as a skeleton without values on global rank 0. When the first batch comes, it gets the gathered
weights, and both run on the same samples, in evaluation mode: each block's output, the model's output, and the gradient
of every parameter are compared. Nothing of it is left behind: gradients, random states and modes are as before.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ascend_core import _shim
from ascend_core._shim import pytree
from ascend_core.config import HybridConfig
from ascend_core.errors import ConfigError, ModelError
from ascend_core.parallel import state
from ascend_core.parallel.blocks import find_blocks
from ascend_core.parallel.compare import differs, floats, outputs_of, probe
from ascend_core.parallel.failures import raise_together
from ascend_core.parallel.microbatch import batch_size, choose_microbatches, take_samples
from ascend_core.parallel.rng import generator_states, set_generator_states

if TYPE_CHECKING:
    from ascend_core.parallel.model import ParallelModel


class _Captured(BaseException):
    """Carries the arguments of the model's call out of the user's step."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = {"args": args, "kwargs": kwargs}


class SelfCheck:
    """What is kept of the unsplit model until the first batch.

    Args:
        boundary: Name of the module that is compared; "" is the root.
        blocks: Names of its blocks.
        skeleton: That module without values, on global rank 0; None elsewhere.
    """

    def __init__(self, boundary: str, blocks: tuple[str, ...], skeleton: nn.Module | None) -> None:
        self.boundary, self.blocks, self.skeleton = boundary, blocks, skeleton

    @classmethod
    def prepare(
        cls, model: nn.Module, config: HybridConfig, *, pipeline_module: str, root_is_boundary: bool
    ) -> SelfCheck | None:
        """Keep the skeleton, if the configuration wants a check.

        Raises:
            ConfigError: A check is asked for, and there is no module whose call could be compared.
        """
        asked = config.self_check == "first_batch"
        if not asked and not (config.self_check == "auto" and config.tensor_parallel_plan != "auto"):
            return None
        boundary: str | None = "" if root_is_boundary else None
        names: tuple[str, ...] = ()
        try:
            found = find_blocks(model, pipeline_module, root_is_boundary=root_is_boundary)
            boundary, names = found.boundary, found.names
        except ModelError:
            pass
        if boundary is None and asked:
            raise ConfigError(
                f"self_check='first_batch': {type(model).__name__} runs its blocks itself.",
                "The check compares the call of a module that holds the blocks.",
                "Put the blocks into a module of their own, or leave self_check out.",
            )
        if boundary is None:
            return None
        module = model.get_submodule(boundary)
        return cls(boundary, names, _skeleton(module) if dist.get_rank() == 0 else None)

    def run(self, model: ParallelModel, step_fn: Callable[[Any, int], Any], batch: Any) -> None:
        """Compare the spread model with the unsplit one.

        Args:
            model: The spread model; every rank must call it.
            step_fn: The user's step, which is run up to its call of the model.
            batch: The first batch; a few samples of rank 0's are used.

        Raises:
            ModelError: They differ, on every rank; it names the first module that does.

        Communication:
            Gathers weights and gradients on global rank 0; what two steps of the model need.
        """
        outside = generator_states(model.device)
        call, error = None, None
        try:
            call = self._small_call(model, step_fn, batch)
        except Exception as caught:  # noqa: BLE001 - raised on every rank
            error = caught
        finally:
            set_generator_states(outside, model.device)
        raise_together(error)
        message = [call]
        dist.broadcast_object_list(message, src=0)
        call = _to(message[0], model.device)
        with _as_before(model):
            seen, gradients = self._spread_results(model, call)
        whole = state.gather_model(model.module, model.names, model.mesh)
        verdict: list[Any] = [None]
        if dist.get_rank() == 0:
            verdict = [self._judge(whole, _to(call, torch.device("cpu")), seen, gradients)]
        dist.broadcast_object_list(verdict, src=0)
        if isinstance(verdict[0], BaseException):
            raise verdict[0]

    # ---- the samples

    def _small_call(self, model: ParallelModel, step_fn: Callable[[Any, int], Any], batch: Any) -> Any:
        module = model.module.get_submodule(self.boundary)

        def grab(*args: Any, **kwargs: Any) -> Any:
            raise _Captured(args, kwargs)

        try:
            with torch.no_grad(), _shim.replaced_call(module, grab):
                step_fn(batch, 0)
        except _Captured as captured:
            call = captured.call
        else:
            raise ModelError(
                f"self_check: the step did not call {self.boundary or 'the model'!r}.", "", "Leave self_check out."
            )
        size, wanted = batch_size(call), 1
        if model.gates is not None:
            _, wanted = choose_microbatches(model.config.schedule, model.gates.size, model.config.num_microbatches, size)
        return _to(take_samples(call, min(size, max(2, wanted))), torch.device("cpu"))

    # ---- the spread model

    def _spread_results(self, model: ParallelModel, call: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Outputs by block name ("" is the model's), and gradients by name; on global rank 0."""
        module = model.module.get_submodule(self.boundary)
        with outputs_of(model.module, self.blocks) as seen, torch.no_grad():
            output = module(*call["args"], **call["kwargs"])
        if model.mesh.size("pp") > 1:
            everyone: list[Any] = [None] * model.mesh.size("pp")
            dist.all_gather_object(everyone, dict(seen), group=model.mesh.group("pp"))
            seen = {name: value for part in everyone for name, value in part.items()}
        seen[""] = floats(output)

        def step(part: Any, number: int) -> torch.Tensor:
            return probe(module(*part["args"], **part["kwargs"]), batch_size(part))

        model.forward_backward(step, call)
        model.finish_gradients()
        return dict(seen), state.gather_gradients(model.gradients(), model.names, model.mesh)

    # ---- the unsplit model, on global rank 0

    def _judge(
        self, whole: Mapping[str, torch.Tensor], call: Any, seen: dict[str, Any], gradients: dict[str, torch.Tensor]
    ) -> BaseException | None:
        try:
            assert self.skeleton is not None
            prefix = f"{self.boundary}." if self.boundary else ""
            module = _fill(self.skeleton, whole, prefix).eval()
            inner = tuple(n[len(prefix) :] for n in self.blocks)
            with outputs_of(module, inner) as expected:
                output = module(*call["args"], **call["kwargs"])
            with outputs_of(module, inner) as again, torch.no_grad():
                repeated = module(*call["args"], **call["kwargs"])
            if _differ(expected, again) or differs(floats(output), floats(repeated)):
                warnings.warn(
                    "The self-check did not compare anything: the unsplit model gives other values each time, also in "
                    "evaluation mode (it draws random numbers).",
                    stacklevel=2,
                )
                return None
            for name in inner:
                problem = differs(expected.get(name), seen.get(prefix + name))
                if problem:
                    return _mismatch(f"the output of block {prefix + name!r}", problem)
            problem = differs(floats(output), seen[""])
            if problem:
                return _mismatch("the model's output, though those of its blocks agree,", problem)
            probe(output, batch_size(call)).backward()
            for name, p in reversed(list(module.named_parameters())):
                got = gradients.get(prefix + name)
                if p.grad is None and got is None:
                    continue
                zero = torch.zeros_like(p)
                problem = differs([zero if p.grad is None else p.grad], [zero if got is None else got])
                if problem:
                    return _mismatch(f"the gradient of {prefix + name!r}", problem)
        except Exception as error:  # noqa: BLE001 - every rank must hear of it
            return ModelError("The self-check could not run the unsplit model.", f"{type(error).__name__}: {error}", _DO)
        return None


def _differ(one: Mapping[str, list[torch.Tensor]], other: Mapping[str, list[torch.Tensor]]) -> bool:
    return any(differs(value, other.get(name)) for name, value in one.items())


_DO = "Leave self_check out if the model is known to be right, or split it in another way."


def _mismatch(what: str, problem: str) -> ModelError:
    return ModelError(
        f"Self-check: {what} differs between the spread and the unsplit model.",
        f"{problem} on the first batch's samples, in evaluation mode.",
        "Mend the tensor_parallel_plan, or leave this module out of it; see docs/self_check.md.",
    )


@contextmanager
def _as_before(model: ParallelModel) -> Iterator[None]:
    """Run in evaluation mode with gradients of its own; put modes, gradients and random states back."""
    outside = generator_states(model.device)
    modes = {m: m.training for m in model.module.modules()}
    carriers = [*model.named.values(), *model.carriers()]
    gradients = [p.grad for p in carriers]
    for p in carriers:
        p.grad = None
    model.module.eval()
    try:
        yield
    finally:
        for p, grad in zip(carriers, gradients, strict=True):
            p.grad = grad
        for module, mode in modes.items():
            module.training = mode
        set_generator_states(outside, model.device)


def _skeleton(module: nn.Module) -> nn.Module:
    """A copy whose parameters have no values; buffers are copied, as not all of them are in the state dict."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in module.parameters()
    }
    return copy.deepcopy(module, memo)


def _fill(skeleton: nn.Module, whole: Mapping[str, torch.Tensor], prefix: str) -> nn.Module:
    """Give a skeleton values, keeping its ties."""
    real: dict[int, nn.Parameter] = {}
    for path, module in skeleton.named_modules():
        dot = f"{path}." if path else ""
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(p) not in real:
                real[id(p)] = nn.Parameter(whole[prefix + dot + name].to(p.dtype).clone(), requires_grad=p.requires_grad)
            setattr(module, name, real[id(p)])
        for name, buffer in module.named_buffers(recurse=False):
            if prefix + dot + name in whole:
                buffer.copy_(whole[prefix + dot + name])
    return skeleton


def _to(value: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, value)
