"""Rank functions on emulated NPUs: checkpoints, pinned batches, memory statistics and random states."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import emulated_parallel as parallel
import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from emulated import here
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, TensorDataset

SAVED_AT = 2


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in steps:
        x, y = (t.to(here()) for t in tiny.local_batch(step, rank, size))
        tiny.token_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def save_sharded(folder: str, in_background: bool) -> None:
    """Train half of the steps with FSDP2, save model and optimizer as DTensors, and go on while they are written."""
    model = parallel.shard(parallel.build().to(here()))
    optimizer = parallel.adamw(model.parameters())
    train(model, optimizer, range(SAVED_AT))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if in_background:
        future = dcp.async_save(states, checkpoint_id=folder)
        train(model, optimizer, range(SAVED_AT, SAVED_AT + 1))  # what changes from here on must not reach the file
        future.result()
    else:
        dcp.save(states, checkpoint_id=folder)


def resume_sharded(folder: str) -> float:
    """Load on however many ranks there are and train the other half; gap to one CPU process that never stopped."""
    reference = parallel.build()
    parallel.plain(reference)
    torch.manual_seed(99)
    model = parallel.shard(tiny.TinyGPT(layers=2, tied=False, fused=False).to(here()))
    optimizer = parallel.adamw(model.parameters())
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert all(s["step"] == SAVED_AT for s in optimizer.state.values())
    train(model, optimizer, range(SAVED_AT, parallel.STEPS))
    return parallel.gap([], dict(model.named_parameters()), [], reference)


def saved_tensors(path: str) -> dict[str, Any]:
    """torch.save of NPU tensors (a view, a shared storage, a parameter, bf16), torch.load to every place."""
    base = torch.arange(6.0, device="npu:0")
    held = {"base": base, "view": base.view(2, 3).t(), "weight": nn.Parameter(base + 1), "low": base.bfloat16()}
    torch.save(held, path)
    seen: dict[str, Any] = {}
    places = {"as saved": None, "cpu": "cpu", "npu:1": "npu:1", "device": torch.device("npu", 1), "moved": {"npu:0": "npu:1"}}
    for name, place in places.items():
        back = torch.load(path, map_location=place, weights_only=True)
        same = all(torch.equal(back[k].detach().cpu(), t.detach().cpu()) and back[k].dtype == t.dtype for k, t in held.items())
        back["base"][1] = 50.0
        shared = float(back["view"][1, 0]) == 50.0 and back["view"].stride() == (1, 3)
        seen[name] = (str(back["base"].device), same and shared and isinstance(back["weight"], nn.Parameter))
    return seen


@contextmanager
def cuda_trapped() -> Iterator[None]:
    """Every function of torch.cuda raises, except those by which torch asks whether CUDA is there, as in torch.manual_seed."""
    allowed = {"_is_in_bad_fork", "is_available", "is_initialized", "manual_seed_all", "_lazy_call"}
    kept = dict(vars(torch.cuda))

    def trap(name: str, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"torch.cuda.{name} was called")

    for name, value in kept.items():
        if isinstance(value, types.FunctionType) and name not in allowed:
            setattr(torch.cuda, name, functools.partial(trap, name))
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(torch.cuda, name, value)


class Record(dict):
    """A batch of a user's own type."""


def collate(rows: list[Any]) -> Record:
    return Record(x=torch.stack([r[0] for r in rows]), y=[torch.stack([r[1] for r in rows])], name="text", size=len(rows))


def pinned(workers: int, device: str) -> dict[str, Any]:
    """D55: batches through pinned memory to the NPU; whether all were pinned, whether all are unchanged, warnings."""
    data = TensorDataset(torch.arange(40.0).view(20, 2), torch.arange(20))
    loader = DataLoader(data, batch_size=4, num_workers=workers, collate_fn=collate, pin_memory=True, pin_memory_device=device)
    was_pinned, same = [], [not data.tensors[0].is_pinned()]
    with warnings.catch_warnings(record=True) as caught, cuda_trapped():
        warnings.simplefilter("always")
        for number, batch in enumerate(loader):
            was_pinned += [batch["x"].is_pinned(), batch["y"][0].is_pinned()]
            x, y = batch["x"].to(here(), non_blocking=True), batch["y"][0].to(here(), non_blocking=True)
            rows = slice(4 * number, 4 * number + 4)
            same += [x.cpu().equal(data.tensors[0][rows]), y.cpu().equal(data.tensors[1][rows])]
            same += [isinstance(batch, Record), batch["name"] == "text", batch["size"] == 4, x.device.type == "npu"]
    return {"pinned": was_pinned, "same": same, "warnings": [str(w.message)[:60] for w in caught]}


def memory() -> dict[str, Any]:
    """What torch.npu says about memory while a megabyte comes and goes, and when there is not enough."""
    npu, seen, mega = torch.npu, {}, 1 << 20
    npu.empty_cache()
    start, free = npu.memory_allocated(), npu.mem_get_info()[0]
    npu.reset_peak_memory_stats()
    a = torch.empty(mega // 4, device=here())
    seen["one tensor"] = npu.memory_allocated() - start
    b = torch.empty(40 * mega, dtype=torch.uint8, device=here())
    seen["two tensors"] = npu.memory_allocated() - start
    seen["reserved covers it"] = npu.memory_reserved() >= npu.memory_allocated()
    seen["the device sees it"] = free - npu.mem_get_info()[0] >= 41 * mega
    del b
    seen["one tensor again"] = npu.memory_allocated() - start
    seen["peak"] = npu.max_memory_allocated() - start
    npu.reset_peak_memory_stats()
    seen["peak after reset"] = npu.max_memory_allocated() - start
    kept = npu.memory_reserved()
    npu.empty_cache()
    seen["empty_cache gives back"] = kept - npu.memory_reserved()
    seen["and the device has it"] = free - npu.mem_get_info()[0] < 40 * mega
    del a
    stats = npu.memory_stats()
    seen["stats"] = stats["allocated_bytes.all.current"] == npu.memory_allocated() and stats["num_ooms"] >= 0
    seen["summary"] = "Allocated memory" in npu.memory_summary()
    total = npu.mem_get_info()[1]
    seen["total"] = total == npu.get_device_properties(here()).total_memory
    try:
        torch.empty(total + 1, dtype=torch.uint8, device=here())
    except torch.OutOfMemoryError as error:
        seen["out of memory"] = str(error)
    seen["ooms"] = npu.memory_stats()["num_ooms"] - stats["num_ooms"]
    seen["still works"] = float(torch.ones(3, device=here()).sum()) == 3.0 and npu.memory_allocated() == start
    return seen


def random_numbers() -> dict[str, Any]:
    """Seeds, states, forks and generators of the NPU, and that they leave the CPU's alone."""
    seen: dict[str, Any] = {}

    def draw() -> list[Any]:
        x = torch.ones(64, device=here())
        return [
            torch.rand(3, device=here()),
            torch.randn(3, device=here()),
            torch.randperm(8, device=here()),
            F.dropout(x),
            x.bernoulli(0.3),
        ]

    def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return all(torch.equal(i, j) for i, j in zip(a, b, strict=True))

    torch.manual_seed(7)
    first = draw()
    torch.manual_seed(7)
    seen["torch.manual_seed seeds the NPU"] = equal(first, draw()) and torch.npu.initial_seed() == 7
    seen["numbers move on"] = not any(torch.equal(a, b) for a, b in zip(first, draw(), strict=True))
    torch.npu.manual_seed_all(7)
    seen["manual_seed_all"] = equal(first, draw())
    state, states = torch.npu.get_rng_state(), torch.npu.get_rng_state_all()
    second = draw()
    torch.npu.set_rng_state(state)
    seen["get and set state"] = equal(second, draw())
    torch.npu.set_rng_state_all(states)
    seen["get and set all states"] = equal(second, draw()) and len(states) == torch.npu.device_count()
    torch.npu.set_rng_state(state)
    with torch.random.fork_rng(devices=[here().index], device_type="npu"):
        draw()
        torch.manual_seed(1)
        draw()
    seen["fork_rng"] = equal(second, draw())
    cpu = torch.get_rng_state()
    draw()
    seen["the NPU leaves the CPU's numbers alone"] = torch.equal(cpu, torch.get_rng_state())
    state = torch.npu.get_rng_state()
    torch.rand(5), F.dropout(torch.ones(5))
    seen["the CPU leaves the NPU's numbers alone"] = torch.equal(state, torch.npu.get_rng_state())
    torch.manual_seed(7)
    seen["different streams"] = not torch.equal(torch.rand(3), first[0].cpu())
    own = torch.Generator(device=here()).manual_seed(7)
    before = torch.npu.get_rng_state()
    drawn = torch.rand(3, device=here(), generator=own)
    seen["a generator of the user's"] = torch.equal(before, torch.npu.get_rng_state()) and torch.equal(drawn, first[0])
    kept = own.get_state()
    drawn = torch.rand(3, device=here(), generator=own)
    own.set_state(kept)
    seen["its state"] = torch.equal(drawn, torch.rand(3, device=here(), generator=own)) and own.initial_seed() == 7
    other = torch.device("npu", (here().index + 1) % torch.npu.device_count())
    torch.npu.manual_seed_all(7)
    torch.rand(9, device=here())
    seen["a state for each device"] = torch.equal(torch.rand(3, device=other).cpu(), first[0].cpu())
    uniform, mask = torch.rand(20000, device=here()), F.dropout(torch.ones(20000, device=here()), 0.25)
    seen["right in distribution"] = (
        abs(float(uniform.mean()) - 0.5) < 0.01 and abs(float((mask == 0).float().mean()) - 0.25) < 0.015
    )
    return seen
