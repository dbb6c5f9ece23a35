"""Registration without an import: scripts that never name this package find its strategy and accelerator.

torch runs the ``torch.backends`` entry points at the end of ``import torch``; ours puts one finder in front of
``sys.meta_path``, which registers our names right after Lightning's registries come into being. Standard library only,
about a millisecond, and it never raises. ``LIGHTNING_ASCEND_AUTOLOAD=0`` switches it off.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_ascend import _lightning

_CLASSES = {"lightning.pytorch": "lightning_ascend.pytorch", "pytorch_lightning": "lightning_ascend.pytorch_lightning"}


class _Lazy:
    """Stands in a registry for a class that is imported when the Trainer asks for it."""

    def __init__(self, namespace: str, name: str) -> None:
        self._where, self.__name__ = _CLASSES[namespace], name

    def _load(self) -> Any:
        return getattr(importlib.import_module(self._where), self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._load()(*args, **kwargs)

    def is_available(self) -> bool:
        return bool(self._load().is_available())


def _register_strategies(module: ModuleType) -> None:
    namespace = module.__name__.rsplit(".", 1)[0]
    module.StrategyRegistry.register(  # type: ignore[attr-defined]
        "ascend_hybrid",
        _Lazy(namespace, "AscendHybridStrategy"),
        description="pipeline x tensor x data parallel training on Ascend NPUs",
        override=True,
    )


def _register_accelerators(module: ModuleType) -> None:
    namespace = module.__name__.rsplit(".", 1)[0]
    module.AcceleratorRegistry.register(  # type: ignore[attr-defined]
        "npu", _Lazy(namespace, "NPUAccelerator"), description="Huawei Ascend NPU", override=True
    )


_HOOKS: dict[str, Callable[[ModuleType], None]] = {}
for _namespace in _CLASSES:
    _HOOKS[f"{_namespace}.strategies"] = _register_strategies
    _HOOKS[f"{_namespace}.accelerators"] = _register_accelerators
    _HOOKS[f"{_namespace}.trainer.connectors.accelerator_connector"] = _lightning.patch_connector


class _PostImportFinder:
    """Runs a hook after the execution of the few modules named in ``_HOOKS``; silent about all others."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        hook = _HOOKS.get(name)
        if hook is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                _wrap(spec.loader, hook)
                return spec
        return None


def _wrap(loader: Any, hook: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _run(hook, module)

    loader.exec_module = exec_module


def _run(hook: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as error:  # noqa: BLE001 - an unknown Lightning must still import; the strategy is then unknown
        import warnings

        warnings.warn(f"lightning-ascend could not register with {module.__name__}: {error}", stacklevel=2)


_FINDER = _PostImportFinder()


def autoload() -> None:
    """Install the hook; entry point of the group ``torch.backends``. Does nothing the second time."""
    if os.environ.get("LIGHTNING_ASCEND_AUTOLOAD", "1").strip().lower() in ("0", "false", "no", "off"):
        return
    if _FINDER in sys.meta_path:
        return
    sys.meta_path.insert(0, _FINDER)  # type: ignore[arg-type]
    for name, hook in _HOOKS.items():
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _run(hook, module)
