"""Dry runs of a block: in what order it calls its projections, and whether a region between them can be split.

A split is proved by numbers. The outputs of the column projections are replaced by random values, and what reaches the
row projection is compared: once with all columns, and once for every rank with its own. Only if the ranks' pieces put
together are the whole is the split used.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ascend_core._shim import pytree
from ascend_core.parallel.block_inputs import BlockInput
from ascend_core.parallel.dry_run import dry_run
from ascend_core.parallel.projections import Projection, as_projection
from ascend_core.parallel.tp_styles import local_columns, parse_style, part_sizes

_HEADS = (
    "num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads", "num_key_value_heads", "n_kv_heads",
)  # fmt: skip
_KEY_VALUE_HEADS = ("num_key_value_heads", "n_kv_heads")
_WIDTHS = ("split_size", "embed_dim", "all_head_size", "hidden_size", "inner_dim")
_HEAD_WIDTHS = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")


@dataclass(frozen=True)
class Proof:
    """A split that was shown to be exact.

    Attributes:
        styles: Column name to style.
        attributes: What to set on the module that holds the columns: head counts and widths of one rank.
        summed: Names of modules with parameters in between.
    """

    styles: dict[str, str]
    attributes: dict[str, Any]
    summed: tuple[str, ...]


@dataclass
class _Seen:
    """What one dry run shows: the row projection's input, and every tensor that the block returns."""

    row_input: torch.Tensor
    returned: list[torch.Tensor]


def called_projections(block: nn.Module, given: BlockInput) -> list[str] | None:
    """Names of a block's projections in the order of their calls.

    Args:
        block: The block.
        given: Its arguments.

    Returns:
        The names, each once; None if the block cannot be run, or calls one twice.
    """
    called: list[str] = []
    hooks = [
        m.register_forward_pre_hook(lambda m, args, name=n: called.append(name))  # type: ignore[misc]
        for n, m in block.named_modules()
        if as_projection(m) is not None
    ]
    try:
        with dry_run(block):
            block(*given.args, **given.kwargs)
    except Exception:  # noqa: BLE001 - the caller falls back to what is right for any code
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return called if len(set(called)) == len(called) else None


def prove_split(block: nn.Module, given: BlockInput, columns: tuple[str, ...], row: str, size: int) -> Proof | None:
    """Find a way to split a region that a dry run shows to be exact.

    Args:
        block: The block.
        given: Its arguments.
        columns: Names of the projections into the region.
        row: Name of the projection out of it.
        size: Tensor-parallel ranks.

    Returns:
        The proof, or None if no way was found.
    """
    owners = {c.rpartition(".")[0] for c in columns}
    if len(owners) != 1:
        return None
    scope = block.get_submodule(owners.pop())
    if any(True for _ in scope.parameters(recurse=False)):
        return None  # a bare parameter may be used inside and outside
    trial = _Trial(block, scope, given, columns, row)
    if trial.whole is None or trial.row.in_features % size:
        return None
    for styles in _style_choices([trial.projections[c] for c in columns], trial.row, scope, size):
        for attributes in _attribute_choices(scope, styles, size):
            if trial.fits(styles, attributes, size):
                return Proof(dict(zip(columns, styles, strict=True)), attributes, tuple(trial.between))
    return None


def modules_between(block: nn.Module, given: BlockInput, columns: tuple[str, ...], row: str) -> tuple[str, ...]:
    """Names of the modules with parameters that run between column projections and a row projection."""
    scope = block.get_submodule(columns[0].rpartition(".")[0])
    return tuple(_Trial(block, scope, given, columns, row).between)


class _Trial:
    """Dry runs of one region."""

    def __init__(self, block: nn.Module, scope: nn.Module, given: BlockInput, columns: tuple[str, ...], row: str) -> None:
        self.block, self.scope, self.given, self.columns = block, scope, given, columns
        projections = {n: as_projection(block.get_submodule(n)) for n in (*columns, row)}
        self.projections: dict[str, Projection] = {n: p for n, p in projections.items() if p is not None}
        self.row = self.projections[row]
        self.between: dict[str, None] = {}
        self._names = {id(m): n for n, m in block.named_modules()}
        self._inside = {id(m) for m in scope.modules()}
        self._foreign = False
        generator = torch.Generator().manual_seed(0)
        shapes = self._output_shapes()
        self.outputs = [torch.randn(s, generator=generator).to(given.activation) for s in shapes] if shapes else []
        self.whole = self._region(self.outputs) if shapes else None
        if self._foreign:
            self.whole = None

    def fits(self, styles: tuple[str, ...], attributes: dict[str, Any], size: int) -> bool:
        """Whether the ranks' pieces put together are the whole."""
        assert self.whole is not None
        pieces, whole = [], self.whole.row_input
        for rank in range(size):
            local = [local_columns(o, s, rank, size) for o, s in zip(self.outputs, styles, strict=True)]
            with _attributes(self.scope, attributes):
                seen = self._region(local)
            if seen is None or seen.row_input.shape[:-1] != whole.shape[:-1] or len(seen.returned) != len(self.whole.returned):
                return False
            if not all(_alike(a, b) for a, b in zip(seen.returned, self.whole.returned, strict=True)):
                return False  # the block returns something of the inside, e.g. a bias per head
            pieces.append(seen.row_input)
        return _alike(torch.cat(pieces, dim=-1), whole)

    def _output_shapes(self) -> list[tuple[int, ...]] | None:
        shapes: dict[str, tuple[int, ...]] = {}

        def note(name: str) -> Any:
            return lambda m, args, output: shapes.setdefault(name, tuple(output.shape)) and None

        hooks = [self.projections[c].module.register_forward_hook(note(c)) for c in self.columns]
        self._run(hooks, [False])
        return [shapes[c] for c in self.columns] if len(shapes) == len(self.columns) else None

    def _region(self, outputs: list[torch.Tensor]) -> _Seen | None:
        """Run the block with the outputs of the columns and of the row projection replaced."""
        started = [False]

        def replace(index: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> torch.Tensor:
                started[0] = True
                return outputs[index]

            return hook

        def watch(module: nn.Module, args: Any) -> None:
            if started[0] and any(True for _ in module.parameters(recurse=False)):
                if id(module) in self._inside and not self._is_shared(module):
                    self.between[self._names[id(module)]] = None
                else:
                    self._foreign = True

        hooks = [self.projections[c].module.register_forward_hook(replace(i)) for i, c in enumerate(self.columns)]
        ours = {id(p.module) for p in self.projections.values()}
        hooks += [m.register_forward_pre_hook(watch) for m in self.block.modules() if id(m) not in ours]
        return self._run(hooks, started)

    def _is_shared(self, module: nn.Module) -> bool:
        parameters = {id(p) for p in module.parameters(recurse=False)}
        return any(id(p) in parameters for m in self.block.modules() if m is not module for p in m.parameters(recurse=False))

    def _run(self, hooks: list[Any], started: list[bool]) -> _Seen | None:
        row, seen = self.row.module, []

        def replaced(x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            started[0] = False
            shape = (*x.shape[:-1], self.row.out_features)
            return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(x)

        row.forward = replaced  # type: ignore[assignment]
        try:
            with dry_run(self.block):
                result = self.block(*self.given.args, **self.given.kwargs)
        except Exception:  # noqa: BLE001 - any failure of the dry run means: not proven, so the split is not used
            return None
        finally:
            del row.forward
            for hook in hooks:
                hook.remove()
        leaves = pytree.tree_flatten(result)[0]
        return _Seen(seen[0], [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]) if len(seen) == 1 else None


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    tolerance = 1e-4 if a.dtype in (torch.float32, torch.float64) else 2e-2
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance / 10)


def _style_choices(columns: list[Projection], row: Projection, scope: nn.Module, size: int) -> Iterator[tuple[str, ...]]:
    """Ways to split the columns of a region, the simplest first."""
    if all(c.out_features % size == 0 for c in columns):
        yield ("colwise",) * len(columns)
    if len(columns) == 1:
        out, q = columns[0].out_features, row.in_features
        fused = ["fused_colwise", "packed_colwise"]
        if (out - q) % 2 == 0 and 0 < (out - q) // 2 != q:
            fused.append(f"fused_colwise:{q},{(out - q) // 2},{(out - q) // 2}")
        for style in fused:
            count = 2 if style == "packed_colwise" else 3
            if (":" in style or out % count == 0) and all(p % size == 0 for p in part_sizes(style, out)):
                yield (style,)
    if len(columns) == 3 and columns[0].out_features % size == 0:
        width = next((v for n in _HEAD_WIDTHS if isinstance(v := getattr(scope, n, None), int)), 0)
        heads = columns[1].out_features // width if width else 0
        if heads and size % heads == 0 and columns[1].out_features == columns[2].out_features == heads * width:
            yield ("colwise", f"shared_colwise:{heads}", f"shared_colwise:{heads}")


def _attribute_choices(scope: nn.Module, styles: tuple[str, ...], size: int) -> Iterator[dict[str, Any]]:
    """What one rank's head counts and widths could be, on the module itself or in a copy of its config."""
    shared = next((parse_style(s)[1][0] for s in styles if s.startswith("shared_colwise")), 0)
    heads = _divided(scope, _HEADS, size, shared)
    widths = _divided(scope, _WIDTHS, size, 0)
    groups: dict[str, Any] = {}
    total = getattr(scope, "num_key_value_groups", None)
    if shared and isinstance(total, int) and (total * shared) % size == 0:
        groups = {"num_key_value_groups": total * shared // size}
    config = getattr(scope, "config", None)
    configs: list[dict[str, Any]] = [{}]
    if config is not None and (counts := _divided(config, _HEADS, size, shared)):
        local = copy.copy(config)
        for name, value in counts.items():
            setattr(local, name, value)
        configs.append({"config": local})
    seen: list[dict[str, Any]] = []
    for c, h, w in itertools.product(configs, ({}, heads), ({}, widths)):
        choice = {**groups, **c, **h, **w}
        if choice not in seen:
            seen.append(choice)
            yield choice


def _divided(owner: Any, names: tuple[str, ...], size: int, shared: int) -> dict[str, int]:
    found = {}
    for name in names:
        value = getattr(owner, name, None)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if shared and name in _KEY_VALUE_HEADS:
            found[name] = 1
        elif value % size == 0:
            found[name] = value // size
    return found


@contextmanager
def _attributes(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    saved = {n: getattr(module, n) for n in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)
