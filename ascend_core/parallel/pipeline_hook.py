"""``configure_pipeline()``: a model says itself what its blocks are, where no list holds them.

The hook may be a method of the model, of a module inside it, or of a LightningModule. It returns the blocks in the order
in which they run, as modules or as names relative to the module that defines the hook; or a mapping::

    def configure_pipeline(self):
        return {
            "blocks": [self.stem, *self.encoder.layers, self.bridge, *self.decoder.layers],
            "pipeline_module": self,            # optional: the module whose call runs them all
            "split_points": ["decoder.layers.0"],  # optional: blocks that begin a new stage
        }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ascend_core.errors import ConfigError, nearest

HOOK = "configure_pipeline"
_KEYS = ("blocks", "pipeline_module", "split_points")


@dataclass(frozen=True)
class Configured:
    """What a hook returned, by names in the whole model.

    Attributes:
        label: How to call the hook in messages.
        holder: Name of the module that defines it ("" is the root).
        names: The blocks, in order.
        boundary: The module whose call is pipelined, or None when the hook leaves it open.
        split_points: Indices of the blocks that begin stages 1, 2, ..., or None when the hook leaves it open.
    """

    label: str
    holder: str
    names: tuple[str, ...]
    boundary: str | None
    split_points: tuple[int, ...] | None


def configured(root: nn.Module, within: str) -> Configured | None:
    """Call the hook of a model, if it has one: the root's, else the first that is found inside ``within``.

    Args:
        root: The model.
        within: Name of the module to look into.

    Returns:
        What it says, or None without a hook.

    Raises:
        ConfigError: It returned something else than blocks of this model.
    """
    for name, module in (("", root), *root.get_submodule(within).named_modules(prefix=within)):
        hook = getattr(module, HOOK, None)
        if callable(hook):
            return _Reader(root, name, f"{type(module).__name__}.{HOOK}()").read(hook())
    return None


class _Reader:
    """Checks one hook's return and turns modules into names."""

    def __init__(self, root: nn.Module, holder: str, label: str) -> None:
        self.holder, self.label = holder, label
        self.by_name = dict(root.named_modules(remove_duplicate=False))
        self.by_module = {id(m): n for n, m in root.named_modules()}

    def read(self, value: Any) -> Configured:
        if not isinstance(value, Mapping):
            value = {"blocks": value}
        for key in value:
            if key not in _KEYS:
                raise ConfigError(f"{self.label} returned the unknown key {key!r}.", "", nearest(str(key), _KEYS))
        names = self._blocks(value.get("blocks"))
        boundary = self._name(value["pipeline_module"]) if value.get("pipeline_module") is not None else None
        if boundary is not None:
            outside = [n for n in names if not n.startswith(f"{boundary}." if boundary else "")]
            if outside:
                raise ConfigError(
                    f"{self.label}: block {outside[0]!r} is not inside pipeline_module {boundary!r}.",
                    "The call of that module must run all blocks.",
                    "Name the module that holds all of them, or leave pipeline_module out.",
                )
        points = value.get("split_points")
        return Configured(self.label, self.holder, names, boundary, None if points is None else self._points(points, names))

    def _blocks(self, blocks: Any) -> tuple[str, ...]:
        if not isinstance(blocks, (Sequence, nn.ModuleList, nn.Sequential)) or isinstance(blocks, str) or not len(blocks):
            raise ConfigError(
                f"{self.label} returned no list of blocks (but {type(blocks).__name__}).",
                "It must return the blocks in the order in which they run, or {'blocks': [...]}.",
                "Return modules of this model, or their names.",
            )
        names = tuple(self._name(block) for block in blocks)
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ConfigError(f"{self.label} returned block {name!r} twice.", "Each block runs once.", "List it once.")
            inner = [n for n in names if n != name and (not name or n.startswith(f"{name}."))]
            if inner:
                raise ConfigError(
                    f"{self.label}: block {inner[0]!r} is inside block {name!r}.",
                    "Blocks run one after the other.",
                    "Leave one of them out.",
                )
        return names

    def _name(self, module: Any) -> str:
        if isinstance(module, str):
            name = ".".join(part for part in (self.holder, module) if part)
            if name in self.by_name:
                return self.by_module[id(self.by_name[name])]
            prefix = f"{self.holder}." if self.holder else ""
            known = [n[len(prefix) :] for n in self.by_name if n and n.startswith(prefix)]
            raise ConfigError(f"{self.label} names {module!r}, which is no module of it.", "", nearest(module, known))
        if isinstance(module, nn.Module) and id(module) in self.by_module:
            return self.by_module[id(module)]
        raise ConfigError(
            f"{self.label} returned a {type(module).__name__} that is not a module of this model.",
            "Blocks are submodules of the model that is trained, so that they are found by name.",
            "Assign it to an attribute in __init__, and return that attribute or its name.",
        )

    def _points(self, points: Any, names: tuple[str, ...]) -> tuple[int, ...]:
        found = [self._name(p) for p in points]
        unknown = [n for n in found if n not in names]
        if unknown:
            raise ConfigError(
                f"{self.label}: split point {unknown[0]!r} is not one of its blocks.",
                "A split point is the first block of a stage.",
                nearest(unknown[0], names),
            )
        indices = tuple(names.index(n) for n in found)
        if list(indices) != sorted(set(indices)) or 0 in indices:
            raise ConfigError(
                f"{self.label}: split_points {found} are out of order.",
                "They are the first blocks of the second and later stages.",
                "List them in the order of the blocks, without the first block.",
            )
        return indices
