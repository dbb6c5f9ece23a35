"""Rank functions about how processes and NPUs meet; most run in new processes without device or process group."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import tiny
import torch
import torch.distributed as dist
from emulated import here
from emulated_state import cuda_trapped
from refusals import Plain
from torch.utils.data import DataLoader, Dataset

from ascend_core import HybridConfig, binding, build_mesh
from ascend_core.device import local_device
from lightning_ascend import AscendHybridStrategy
from lightning_ascend.workers import check_workers

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def trainer(devices: int, num_nodes: int = 1, accelerator: str = "npu", precision: Any = None, **config: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator=accelerator, devices=devices, num_nodes=num_nodes, precision=precision, max_steps=1, logger=False,
        strategy=AscendHybridStrategy(**config),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def said(call: Any) -> str:
    """The result of a call, or its error."""
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def local_devices(cases: list[tuple[dict[str, str], int | None]]) -> list[str]:
    """The device for each set of launcher variables and number of nodes."""
    seen = []
    for variables, nodes in cases:
        for key in LAUNCHER:
            os.environ.pop(key, None)
        os.environ.update(variables)
        seen.append(said(lambda n=nodes: local_device("npu", n)))
    return seen


class Placed(Plain):
    """Notes where it trains."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.places = {str(p.device) for p in self.parameters()} | {str(t.device) for t in batch}
        return super().training_step(batch, batch_idx)


def start(devices: int, **config: Any) -> dict[str, Any]:
    """Fit one step; what was called to bind the process, in order, and where it ended."""
    seen: dict[str, Any] = {"calls": []}

    def watch(module: Any, name: str) -> None:
        function = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen["calls"].append(name)
            return function(*args, **kwargs)

        setattr(module, name, watched)

    watch(torch.npu, "set_device")
    watch(dist, "init_process_group")
    ours = trainer(devices, **config)
    seen["initialized by Trainer()"] = torch.npu.is_initialized()
    seen["launcher"] = type(ours.strategy.launcher).__name__
    module = Placed()
    ours.fit(module)
    index = torch.npu.current_device()
    assert module.places == {f"npu:{index}"}, module.places
    seen["slot"] = (binding.read_mask() or list(range(8)))[index]
    seen["index"], seen["global rank"] = index, ours.global_rank
    return seen


def refused(devices: int, **config: Any) -> tuple[str, bool]:
    """The error of a run that must not start, and whether the process group or the NPU was in use by then."""
    text = said(lambda: trainer(devices, **config).fit(Plain()))
    return text, dist.is_initialized() or torch.npu.is_initialized()


def communicators() -> int:
    """HCCL communicators of this process: each maps a file of shared memory."""
    return len({line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line})


def shared_device() -> tuple[str, int, int]:
    """The core's own check with both ranks on NPU 0; the error, HCCL communicators by then, and on two devices."""
    torch.npu.set_device(0)
    dist.init_process_group("cpu:gloo,npu:hccl")
    text, by_then = said(lambda: build_mesh(HybridConfig(), "npu")), communicators()
    torch.npu.set_device(dist.get_rank())
    mesh = build_mesh(HybridConfig(), "npu")
    dist.all_reduce(torch.ones(1, device="npu"), group=mesh.group("dp"))
    return text, by_then, communicators()


def slots() -> tuple[int, int]:
    """The NPU of this rank, and its place on the tensor-parallel axis."""
    mesh = build_mesh(HybridConfig(tensor_parallel_size=2), "npu")
    return torch.npu.current_device(), mesh.rank("tp")


class OnDevice(Dataset):
    """Samples that live on the NPU, are built there, or are on the CPU."""

    def __init__(self, kind: str) -> None:
        self.kind, (self.x, self.y) = kind, tiny.batch(0, 16)
        if kind == "kept":
            self.x = self.x.to("npu")
        elif kind == "list":
            self.rows = [row.to("npu") for row in self.x]

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if self.kind == "list":
            return self.rows[index], self.y[index]
        if self.kind == "raises":
            raise KeyError("this dataset fails")
        x = self.x[index]
        return (x.to("npu").cpu() if self.kind == "built" else x), self.y[index]


def fit_with_workers(kind: str, num_workers: int) -> tuple[str, int]:
    """Fit one step with a dataset of a kind, while nothing may ask for a CUDA device; the error, and steps done."""
    trap = ExitStack()

    class Module(Placed):
        def on_train_start(self) -> None:
            trap.enter_context(cuda_trapped())

        def on_train_end(self) -> None:
            trap.close()

        def train_dataloader(self) -> DataLoader:
            return DataLoader(OnDevice(kind), batch_size=8, num_workers=num_workers, pin_memory=kind == "cpu")

    module = Module()
    text = said(lambda: trainer(1).fit(module))
    trap.close()
    return text, module.stepped


def checked_loaders() -> dict[str, str]:
    """What the check of loader workers says to loaders that need none, and to a dataset that fails by itself."""
    kept, options = OnDevice("kept"), {"batch_size": 8, "num_workers": 2}
    loaders: dict[str, Any] = {
        "no workers": DataLoader(kept, batch_size=8), "spawned": DataLoader(kept, multiprocessing_context="spawn", **options),
        "fails by itself": DataLoader(OnDevice("raises"), **options), "no loader": [1, 2], "forked": DataLoader(kept, **options),
    }  # fmt: skip
    return {name: said(lambda x=loader: check_workers(x, here())) for name, loader in loaders.items()}


def double_precision(accelerator: str) -> tuple[str, int]:
    """Fit one step in 64-bit floats; the error, and steps done."""
    module = Plain()
    return said(lambda: trainer(1, accelerator=accelerator, precision="64-true").fit(module)), module.stepped
