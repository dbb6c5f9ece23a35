"""Loader workers and the NPU: a forked worker cannot use a device that its parent has used.

The workers of a DataLoader are forks on Linux. A dataset that keeps its data on the NPU, or builds tensors there, then
fails in the middle of a run with the runtime's error; here it fails before the first batch, with the reason.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset

from ascend_core._shim import pytree
from ascend_core.errors import ConfigError

PATIENCE_S = 10.0
"""Longest wait for a first sample; a dataset that takes longer is not judged."""


class _Touched(BaseException):
    """Not an Exception, so that the dataset's own handlers let it through."""


class _NoDevice(TorchFunctionMode):
    """Raises before any call that has a tensor of the device, or names the device."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def check(self, values: Any, name: str) -> None:
        for value in pytree.tree_leaves(values):
            where = value.device.type if isinstance(value, torch.Tensor) else str(value).partition(":")[0]
            if isinstance(value, (torch.Tensor, torch.device, str)) and where == self.device_type:
                raise _Touched(name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.check((args, kwargs), getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def check_workers(loader: Any, device: torch.device) -> None:
    """Refuse a DataLoader whose forked workers would use the device.

    The first sample of a map-style dataset is read in a forked child, as a worker would, so that files and connections
    it opens stay the child's. Iterable datasets are not read: their samples may exist only once.

    Args:
        loader: Any loader; only a DataLoader with workers is looked at.
        device: The device of this process.

    Raises:
        ConfigError: Reading a sample uses the device.
    """
    if device.type == "cpu" or not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method != "fork" or isinstance(loader.dataset, IterableDataset):
        return
    call = _device_call(loader.dataset, device.type)
    if call is not None:
        raise ConfigError(
            f"DataLoader(num_workers={loader.num_workers}) starts its workers by fork, and its "
            f"{type(loader.dataset).__name__} uses the {device.type} ({call}).",
            "The NPU runtime does not survive a fork: every worker would fail.",
            "Keep samples on the CPU, where the Trainer fetches each batch from; or set num_workers=0; or "
            "multiprocessing_context='spawn'.",
        )


def _device_call(dataset: Any, device_type: str) -> str | None:
    """Name the call by which reading the first sample uses the device; None when it does not, or cannot be told."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_read_first, args=(dataset, device_type, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(PATIENCE_S) else None
    except EOFError:
        return None  # the dataset failed for a reason of its own, which the loader will show
    finally:
        child.kill()
        child.join()
        ours.close()


def _read_first(dataset: Any, device_type: str, result: Connection) -> None:
    watch = _NoDevice(device_type)
    try:
        with watch:
            sample = dataset[0]
        watch.check(sample, f"samples are {device_type} tensors")
    except _Touched as touched:
        result.send(str(touched))
    except BaseException:  # noqa: BLE001 - the loader shows it, in its own process
        return
    finally:
        result.close()  # at once: the end of a forked child may take long
