"""Rank functions on emulated NPUs: every type through the paths that HCCL allows (user report D54)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torchmetrics
from emulated import here
from refusals import Plain

from ascend_core import hccl
from lightning_ascend import AscendHybridStrategy

TYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint64,
)  # fmt: skip


def every_type() -> list[str]:
    """``hccl.all_reduce`` of 1, 2, ... over the ranks, for each type and operation; names of what is wrong."""
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), []
    values = torch.arange(1, size + 1, dtype=torch.float64)
    wanted = {"SUM": values.sum(), "AVG": values.mean(), "MAX": values.max(), "MIN": values.min(), "PRODUCT": values.prod()}
    for dtype in TYPES:
        for op, value in wanted.items():
            if op == "AVG" and not dtype.is_floating_point:
                continue
            t = torch.full((3, 2), rank + 1).to(dtype).to(here())
            out = hccl.all_reduce(t, op)
            if out is not t or t.dtype != dtype or t.device != here() or not bool((t.cpu().double() == value).all()):
                wrong.append(f"{dtype} {op}: {t.cpu().flatten()[0]}")
    fine = torch.tensor([1.0 + 2.0**-40 * (rank + 1)], dtype=torch.float64, device=here())  # more digits than fp32 has
    if float(hccl.all_reduce(fine)) != size + 2.0**-40 * float(values.sum()):
        wrong.append("float64 lost digits")
    large = torch.tensor([2**60 + rank], device=here())
    if int(hccl.all_reduce(large, "MAX")) != 2**60 + size - 1:
        wrong.append("int64 lost digits")
    strided = torch.full((4, 4), float(rank), dtype=torch.float64, device=here())[:, 1]
    if float(hccl.all_reduce(strided).sum()) != 4 * float(values.sum() - size):
        wrong.append("a view")
    return wrong


def flags() -> list[list[bool]]:
    """One rank's flag, all ranks' flags, and nobody's, by each operation."""
    rank, seen = dist.get_rank(), []
    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        seen.append(hccl.all_reduce(torch.tensor([rank == 1, True, False], device=here()), op).tolist())
    return seen


def moved_bytes() -> list[str]:
    """Packed signs go by all_gather and all_to_all; a user's own reduction of 64-bit floats says which type it was."""
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), []
    out = torch.empty(2 * size, dtype=torch.uint8, device=here())
    dist.all_gather_into_tensor(out, torch.tensor([rank, 255 - rank], dtype=torch.uint8, device=here()))
    if out.tolist() != [v for r in range(size) for v in (r, 255 - r)]:
        wrong.append("all_gather")
    swapped = torch.empty(size, dtype=torch.uint8, device=here())
    dist.all_to_all_single(swapped, torch.arange(200, 200 + size, device=here()).to(torch.uint8))
    if swapped.tolist() != [200 + rank] * size:
        wrong.append("all_to_all")
    try:
        dist.all_reduce(torch.ones(2, dtype=torch.float64, device=here()))
        wrong.append("a reduction of float64 was accepted")
    except RuntimeError as error:
        if "Unsupported data type" not in str(error) or "kDouble" not in str(error):
            wrong.append(str(error))
    try:
        hccl.all_reduce(torch.ones(2, dtype=torch.int64, device=here()), "AVG")
        wrong.append("the mean of integers was accepted")
    except TypeError:
        pass
    return wrong


class Total(torchmetrics.Metric):
    """A sum in 64-bit floats."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, value: torch.Tensor) -> None:
        self.total += value.to(self.total.device)

    def compute(self) -> torch.Tensor:
        return self.total


class Measured(Plain):
    """A metric whose state is in 64-bit floats, and values of several types logged over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = Total()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        replica = self.trainer.strategy.mesh.rank("dp")
        self.metric.update(torch.tensor(1.0 + 2.0**-40 * (replica + 1), dtype=torch.float64))
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        for name, dtype in (("double", torch.float64), ("long", torch.int64), ("half", torch.float16)):
            self.log(name, torch.tensor(replica * 3 + 1, dtype=dtype, device=self.device), sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        value = self.metric.compute()
        self.seen = (value.dtype, float(value), value.device.type)


def trainer_values(accelerator: str) -> dict[str, Any]:
    """What the Trainer and the strategy make of them: two replicas of two tensor-parallel ranks."""
    trainer = pl.Trainer(
        accelerator=accelerator, devices=4, strategy=AscendHybridStrategy(tensor_parallel_size=2), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Measured()
    trainer.fit(module)
    strategy, device = trainer.strategy, trainer.strategy.root_device
    replica = strategy.mesh.rank("dp")
    double = torch.tensor([2.0**-40 * (replica + 1) + 1], dtype=torch.float64, device=device)
    flag = torch.tensor([replica == 0, True], device=device)
    return {
        "metric": (str(module.seen[0]), module.seen[1]), "on": module.seen[2],
        "logged": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "double mean": float(strategy.reduce(double.clone())), "double sum": float(strategy.reduce(double, reduce_op="sum")),
        "int mean": float(strategy.reduce(torch.tensor(replica, device=device))),
        "any": strategy.reduce(flag.clone(), reduce_op="max").tolist(), "all": strategy.reduce(flag, reduce_op="min").tolist(),
        "share": strategy.reduce(flag, reduce_op="mean").tolist(),
        "bytes": strategy.all_gather(torch.tensor([replica + 200], dtype=torch.uint8, device=device)).flatten().tolist(),
    }  # fmt: skip
