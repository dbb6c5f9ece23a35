"""Compare split blocks with the whole ones, on the ranks that will run them: output and every gradient.

A plan that leaves a hole (a column projection whose output stays split where the code expects it whole, a parameter that
gets part of its gradient) trains a wrong model without an error. So each kind of block runs once before it is split and
once after, with the same small input, and the first module that differs is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ascend_core._shim import pytree
from ascend_core.errors import ModelError
from ascend_core.parallel.block_inputs import BlockInput, plain_input
from ascend_core.parallel.dry_run import dry_run, signature
from ascend_core.parallel.sequence import cut_tokens, gather_tokens, sequence_dim
from ascend_core.parallel.state import Names, describe, full_tensor


@dataclass
class _Run:
    """What one run of a block leaves behind: outputs of its modules in the order of the calls, and gradients."""

    outputs: dict[str, torch.Tensor]
    output: torch.Tensor
    returned: list[torch.Tensor]
    grads: dict[str, torch.Tensor | None]


class BlockCheck:
    """References of whole blocks, taken before they are split.

    Args:
        root: The model, whole or pruned, on its device.
        names: Names of this rank's blocks; one of each kind is checked.
        inputs: What blocks are called with, where it is known.
    """

    def __init__(self, root: nn.Module, names: list[str], inputs: Mapping[str, BlockInput]) -> None:
        self.root = root
        self.references: dict[str, tuple[BlockInput, _Run, tuple[list[str], list[str], dict[str, str]]]] = {}
        self.covered: dict[str, str] = {}
        kinds: dict[Any, str] = {}
        for name in names:
            block = root.get_submodule(name)
            if not any(True for _ in block.parameters()) or not any(True for _ in block.children()):
                continue  # hollow, or a piece of a region that its neighbours end
            kind = kinds.setdefault(signature(block), name)
            if kind == name:
                self._take(name, block, inputs.get(name) or plain_input(block))
            if kind in self.references:
                self.covered[name] = kind

    def _take(self, name: str, block: nn.Module, given: BlockInput | None) -> None:
        if given is None:
            return
        given = given.to(next(block.parameters()).device)
        try:
            run, again = _run(block, given), _run(block, given, seed=1)
        except Exception:  # noqa: BLE001 - without arguments that fit, the block cannot be checked
            return
        if run.output.is_floating_point() and _alike(run.output, again.output):  # else: it is random even in evaluation
            self.references[name] = (given, run, describe(block))

    def covers(self, module: str) -> bool:
        """Whether a module is inside a block that is checked."""
        return self.block_of(module) is not None

    def block_of(self, module: str) -> str | None:
        """The checked block that holds a module, or None."""
        return next((block for block in self.covered if module.startswith(f"{block}.")), None)

    def input_of(self, block: str) -> BlockInput:
        """What a checked block is called with."""
        return self.references[self.covered[block]][0]

    def compare(self, group: dist.ProcessGroup, summed: frozenset[str], *, sequence: bool = False) -> None:
        """Run the split blocks and compare.

        Args:
            group: The tensor-parallel group, whose ranks all must call this.
            summed: Names of parameters whose gradient is a part on every rank, kept as ranks x part.
            sequence: The blocks take and give this rank's tokens.

        Raises:
            ModelError: A block gives another output or gradient than before it was split.

        Communication:
            That of a forward and a backward of each kind of block, one all-reduce per summed parameter, and one
            all-gather per split one.
        """
        for name, (given, whole, description) in self.references.items():
            block = self.root.get_submodule(name)
            try:
                split = _run(block, given, group if sequence else None)
            except Exception as error:
                raise _refusal(name, f"fails once it is split: {type(error).__name__}: {error}") from error
            _join_gradients(split, block, Names(*description, block), summed, name, group)
            problem = _difference(whole, split)
            agreed = torch.tensor(float(bool(problem)), device=split.output.device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
            if agreed:
                raise _refusal(name, problem or "differs on another rank")


def _refusal(name: str, problem: str) -> ModelError:
    return ModelError(
        f"Block {name!r} {problem}.",
        "A small run of the block before and after the split must give the same output and gradients.",
        "Between a 'colwise' and a 'rowwise' projection, use only code that works column by column or head by head, "
        "or use colwise_gather and rowwise_split there.",
    )


def _run(block: nn.Module, given: BlockInput, tokens_over: dist.ProcessGroup | None = None, seed: int = 0) -> _Run:
    outputs: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                outputs.setdefault(name, output.detach())

        return hook

    hooks = [m.register_forward_hook(note(n)) for n, m in block.named_modules() if n]
    x = given.activation.detach().clone().requires_grad_(given.activation.is_floating_point())
    size = dist.get_world_size(tokens_over) if tokens_over is not None else 1
    dim = sequence_dim(block)
    try:
        with dry_run(block, seed), torch.enable_grad():
            call = given.with_activation(x if tokens_over is None else cut_tokens(x, dim, size, tokens_over))
            result = block(*call.args, **call.kwargs)
            result = result if tokens_over is None else gather_tokens(result, dim, size, tokens_over)
            leaves, _ = pytree.tree_flatten(result)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            output = tensors[0]
            generator = torch.Generator().manual_seed(1)
            weights = torch.randn(output.shape, generator=generator).to(output)
            wanted = {n: p for n, p in block.named_parameters() if p.requires_grad}
            sources = [*wanted.values(), *([x] if x.requires_grad else [])]
            found = torch.autograd.grad((output * weights).sum(), sources, allow_unused=True) if output.requires_grad else []
    finally:
        for hook in hooks:
            hook.remove()
    return _Run(outputs, output.detach(), [t.detach() for t in tensors], dict(zip([*wanted, ""], found, strict=False)))


def _join_gradients(
    run: _Run, block: nn.Module, names: Names, summed: frozenset[str], prefix: str, group: dist.ProcessGroup
) -> None:
    """Make the split run's gradients whole, by the unsplit names."""
    whole: dict[str, torch.Tensor] = {}
    for name, grad in run.grads.items():
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            grad = full_tensor(grad).to(run.output.device)
        if f"{prefix}.{name}" in summed:
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
            grad = grad / dist.get_world_size(group)
        whole[name] = grad
    run.grads = dict(names.merge(whole))


def _difference(whole: _Run, split: _Run) -> str:
    """A sentence about the first thing that differs; empty if nothing does."""
    if not _alike(whole.output, split.output):
        for name, output in whole.outputs.items():
            other = split.outputs.get(name)
            if other is not None and other.shape == output.shape and not _alike(output, other):
                return f"gives another output once it is split; the first module that differs is {name!r}"
        return "gives another output once it is split"
    if len(whole.returned) != len(split.returned) or not all(map(_alike, whole.returned, split.returned)):
        return "returns something else beside its activation once it is split"
    largest = max((float(g.abs().max()) for g in whole.grads.values() if g is not None and g.numel()), default=0.0)
    for name, grad in whole.grads.items():
        other = split.grads.get(name)
        if grad is None or other is None:
            if (grad is None) != (other is None):
                return f"loses or gains a gradient once it is split: {name or 'its input'}"
        elif not _alike(grad, other, largest):
            return f"gives another gradient once it is split, for {f'parameter {name!r}' if name else 'its input'}"
    return ""


def _alike(a: torch.Tensor, b: torch.Tensor, largest: float = 0.0) -> bool:
    """Equal up to the order of sums: 1e-4 of the largest value in fp32, 5 % in half precision.

    Gradients that are zero but for rounding (the bias of a key projection) are measured by ``largest``, the largest of all.
    """
    if a.shape != b.shape:
        return False
    exact = a.dtype in (torch.float32, torch.float64)
    tolerance, floor = (1e-4, 1e-6) if exact else (5e-2, 1e-2)
    scale = float(a.abs().max()) if a.numel() else 0.0
    return bool(torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance * max(scale, 1e-6) + floor * largest))
