"""``make bench``: our engine against hand-written torch loops, side by side in one run; ratios, since machines differ.

Each row runs both contenders in the same processes, alternating step by step, and reports the median step of each.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ascend_core import HybridConfig, build_mesh, parallelize

DIM, LAYERS, BATCH, SEQ, MICROBATCHES, STEPS = 256, 4, 16, 64, 4, 15
Step = Callable[[torch.Tensor], Any]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Mlp() for _ in range(LAYERS)])


def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(y, target)


def ours(**config: Any) -> Step:
    c = HybridConfig(**config)
    model = parallelize(build(), c, build_mesh(c, "cpu"), loss_fn=loss_fn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> None:
        model.train_step(x, x)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_pipeline() -> Step:
    rank, half = dist.get_rank(), LAYERS // 2
    part = build()[rank * half : (rank + 1) * half]
    part_of_batch = torch.zeros(BATCH // MICROBATCHES, SEQ, DIM, requires_grad=rank > 0)
    stage = PipelineStage(
        part, rank, 2, torch.device("cpu"), input_args=(part_of_batch,), output_args=(part_of_batch.detach().requires_grad_(),)
    )
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda y, t: loss_fn(y, t) / MICROBATCHES, scale_grads=False)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> None:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=losses)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_wrapped(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> None:
        loss_fn(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_tensor_parallel() -> Step:
    mesh = build_mesh(HybridConfig(tensor_parallel_size=2), "cpu")
    plan = {f"{i}.{n}": style for i in range(LAYERS) for n, style in (("up", ColwiseParallel()), ("down", RowwiseParallel()))}
    return torch_wrapped(parallelize_module(build(), mesh.device_mesh["tp"], plan))


def torch_fsdp() -> Step:
    mesh = build_mesh(HybridConfig(zero_stage=3), "cpu").device_mesh["dp_shard"]
    model = build()
    for block in model:
        fully_shard(block, mesh=mesh)
    return torch_wrapped(fully_shard(model, mesh=mesh))


ROWS: dict[str, tuple[Callable[[], Step], Callable[[], Step]]] = {
    "pipeline 2, 1F1B | torch.distributed.pipelining": (
        lambda: ours(pipeline_parallel_size=2, num_microbatches=MICROBATCHES),
        torch_pipeline,
    ),
    "tensor 2 | torch DTensor plan": (lambda: ours(tensor_parallel_size=2), torch_tensor_parallel),
    "data 2 | torch DistributedDataParallel": (ours, lambda: torch_wrapped(DistributedDataParallel(build()))),
    "ZeRO-3 on 2 | torch fully_shard": (lambda: ours(zero_stage=3), torch_fsdp),
}


def measure(name: str) -> tuple[float, float]:
    """Median seconds of a step, ours and torch's."""
    contenders = [make() for make in ROWS[name]]
    times: list[list[float]] = [[], []]
    for i in range(STEPS + 3):
        x = torch.randn(BATCH, SEQ, DIM, generator=torch.Generator().manual_seed(i))
        for contender, record in zip(contenders, times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            contender(x)
            dist.barrier()
            record.append(time.perf_counter() - start)
    return statistics.median(times[0][3:]), statistics.median(times[1][3:])


def rank_main(rank: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for name in ROWS:
        result = measure(name)
        if rank == 0:
            results.put((name, *result))
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=rank_main, args=(r, port, results)) for r in range(2)]
    for process in ranks:
        process.start()
    table = Table(title=f"{LAYERS} layers, width {DIM}, batch {BATCH} x {SEQ}, 2 ranks on {os.cpu_count()} cores, gloo")
    for column in ("ours | theirs", "ours, ms", "theirs, ms", "ratio"):
        table.add_column(column, justify="left" if "|" in column else "right")
    for _ in ROWS:
        name, mine, theirs = results.get(timeout=300)
        table.add_row(name, f"{mine * 1e3:.1f}", f"{theirs * 1e3:.1f}", f"{mine / theirs:.2f}")
    for process in ranks:
        process.join(30)
    Console().print(table)


if __name__ == "__main__":
    main()
