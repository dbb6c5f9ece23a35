"""What the emulated NPU costs: microseconds an operator and a training step, against torch on the CPU of the same process.

    python -m ascend_emulator --devices 1 benchmarks/emulator.py

Times are CPU seconds of the process, medians of alternating rounds, with one thread.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_gpt_lightning import GPT

DEVICES = ("cpu", "npu")


def operators(device: str) -> dict[str, Callable[[], object]]:
    """Small operators, where the cost of a call is all there is."""
    x, y = torch.randn(32, 32, device=device), torch.randn(32, 32, device=device)
    many = [x] * 8
    return {
        "add": lambda: x + y, "mul_": lambda: x.mul_(1.0), "mm": lambda: x @ y, "sum": lambda: x.sum(),
        "clone": lambda: x.clone(), "cat of 8": lambda: torch.cat(many), "softmax": lambda: x.softmax(-1),
        "layer_norm": lambda: F.layer_norm(x, (32,)), "add, out=": lambda: torch.add(x, y, out=x),
        "randn": lambda: torch.randn(32, device=device), "dropout": lambda: F.dropout(x),
        "view": lambda: x.view(-1), "item": lambda: x[0, 0].item(),
    }  # fmt: skip


def microseconds(call: Callable[[], object], count: int = 200) -> float:
    """CPU time of one call."""
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count * 1e6


def training_step(device: str, dim: int, dropout: float) -> Callable[[], None]:
    """A step of the demo's GPT, 4 layers, batch 16 x 64, AdamW."""
    torch.manual_seed(0)
    model = GPT(96, 64, 4, dim, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 96, (16, 65)).to(device)

    def step() -> None:
        logits = F.dropout(model(ids[:, :-1]), dropout)
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def alternate(calls: list[Callable[[], object]], measure: Callable[[Callable[[], object]], float], rounds: int) -> list[float]:
    """Median of each contender over rounds in which they take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, record in zip(calls, times, strict=True):
            record.append(measure(call))
    return [statistics.median(record) for record in times]


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title="emulated NPU against CPU torch, CPU time")
    for column in ("", "CPU", "emulated NPU", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    suites = [operators(d) for d in DEVICES]
    for name in suites[0]:
        cpu, npu = alternate([s[name] for s in suites], microseconds, 7)
        table.add_row(f"{name}, us", f"{cpu:.1f}", f"{npu:.1f}", f"{npu / cpu:.1f}")
    table.add_section()
    for dim in (64, 128, 256, 512):
        cpu, npu = alternate([training_step(d, dim, 0.1) for d in DEVICES], lambda c: microseconds(c, 1) / 1e3, 7)
        table.add_row(f"training step, width {dim}, ms", f"{cpu:.1f}", f"{npu:.1f}", f"{npu / cpu:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
