"""The one file that names private things of Lightning. Each row: what, why, upstream, and when it can go.

It imports nothing but the standard library, because the registration hook uses it while torch is being imported.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Row:
    """One private name we depend on.

    Attributes:
        name: Path below the namespace (``lightning.pytorch`` or ``pytorch_lightning``).
        why: What it is needed for.
        upstream: Where it is defined.
        remove_when: The event that makes the row unnecessary.
    """

    name: str
    why: str
    upstream: str
    remove_when: str


ROWS: tuple[Row, ...] = (
    Row(
        "trainer.connectors.accelerator_connector._AcceleratorConnector._choose_auto_accelerator",
        "accelerator='auto' knows TPU, MPS and CUDA only, and falls back to the CPU in silence.",
        "accelerator_connector.py",
        "Lightning asks its accelerator registry",
    ),
    Row(
        "trainer.connectors.accelerator_connector._AcceleratorConnector._choose_strategy",
        "strategy='auto' runs an NPU on the CPU.",
        "accelerator_connector.py",
        "Lightning lets an accelerator name its strategy",
    ),
    Row(
        "trainer.connectors.accelerator_connector._AcceleratorConnector._strategy_flag",
        "Only a run with our strategy refuses the silent fall-back to the CPU.",
        "accelerator_connector.py",
        "the first row goes",
    ),
    Row(
        "trainer.trainer.Trainer._accelerator_connector",
        "use_distributed_sampler tells whether the user wants data sharded for them.",
        "trainer.py",
        "Trainer exposes use_distributed_sampler",
    ),
)


FABRIC_ROWS: tuple[Row, ...] = (
    Row(
        "utilities.distributed._init_dist_connection",
        "Starts the process group from any cluster environment; the strategy leaves device_id out, which its base passes.",
        "fabric/utilities/distributed.py",
        "HCCL supports split_group, or Lightning lets a strategy choose",
    ),
)


def start_process_group(fabric: str, environment: Any, backend: str, **options: Any) -> None:
    """Start the process group of a cluster environment.

    Args:
        fabric: ``lightning.fabric`` or ``lightning_fabric``.
        environment: The cluster environment.
        backend: torch's backend string.
        options: For ``init_process_group``.
    """
    importlib.import_module(f"{fabric}.utilities.distributed")._init_dist_connection(environment, backend, **options)


def patch_connector(module: ModuleType) -> None:
    """Teach the connector of one namespace what ``"auto"`` means on an Ascend machine.

    Args:
        module: ``...trainer.connectors.accelerator_connector``.
    """
    cls: Any = module._AcceleratorConnector
    if getattr(cls, "_ascend_patched", False):
        return
    old_accelerator, old_strategy = cls._choose_auto_accelerator, cls._choose_strategy

    @functools.wraps(old_accelerator)
    def choose_auto_accelerator(self: Any = None) -> str:
        name: str = old_accelerator()
        if name != "cpu":
            return name
        choice = importlib.import_module("lightning_ascend.accelerator")
        chosen: str = choice.auto_accelerator(getattr(self, "_strategy_flag", "auto"))
        return chosen

    @functools.wraps(old_strategy)
    def choose_strategy(self: Any) -> Any:
        flag = self._accelerator_flag
        if flag == "npu" or getattr(flag, "name", lambda: "")() == "npu":
            return "ascend_hybrid"
        return old_strategy(self)

    cls._choose_auto_accelerator = choose_auto_accelerator
    cls._choose_strategy = choose_strategy
    cls._ascend_patched = True


def uses_distributed_sampler(trainer: Any) -> bool:
    """Whether the Trainer was told to shard data for the user (its default)."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)
