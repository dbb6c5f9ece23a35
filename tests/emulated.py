"""Rank functions that run on emulated NPUs."""

from __future__ import annotations

import os
import time
from typing import Any

import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def here() -> torch.device:
    return torch.device("npu", torch.npu.current_device())


def devices() -> tuple[int, str, bool]:
    return torch.npu.device_count(), torch.npu.get_device_name(0), torch.npu.is_available()


def operators() -> list[str]:
    """Forward and backward of a mix of operators on the NPU against the CPU; names of those that differ."""
    cases: dict[str, Any] = {
        "linear": lambda x: F.linear(x, x, x[0]), "softmax": lambda x: x.softmax(-1), "layer_norm": lambda x: F.layer_norm(x, (6,)),
        "views": lambda x: x.t().unsqueeze(0).expand(2, -1, -1).reshape(-1)[3:].flip(0), "gather": lambda x: x.gather(1, (x > 0).long()),
        "index": lambda x: x[[0, 2], 1:], "where": lambda x: torch.where(x > 0, x, -x), "cumsum": lambda x: x.cumsum(0),
        "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), "topk": lambda x: x.topk(2).values,
        "conv": lambda x: F.conv1d(x[None], x[:2, :, None].expand(2, 6, 1)), "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
        "cat": lambda x: torch.cat([x, x * 2]).chunk(2)[1], "std": lambda x: x.std(), "norm": lambda x: torch.linalg.vector_norm(x),
        "gelu": F.gelu, "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(6, device=x.device) % 6), "pad": lambda x: F.pad(x, (1, 2)),
    }  # fmt: skip
    wrong = []
    for name, function in cases.items():
        cpu = torch.randn(6, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        npu = cpu.detach().to(here()).requires_grad_()
        a, b = function(cpu), function(npu)
        a.square().sum().backward()
        b.square().sum().backward()
        same = (
            b.device.type == "npu"
            and torch.allclose(a, b.cpu(), atol=1e-6)
            and torch.allclose(cpu.grad, npu.grad.cpu(), atol=1e-5)
        )
        if not same:
            wrong.append(name)
    return wrong


def rules() -> dict[str, Any]:
    """In-place, out=, mixed devices, memory limits, random states, direct operators, streams."""
    import torch_npu

    seen: dict[str, Any] = {}
    x = torch.arange(6.0, device=here()).view(2, 3)
    x.t().mul_(2)
    x[0].transpose_(0, 0)
    seen["in place through a view"] = x.cpu().tolist()
    out = torch.empty(0, device=here())
    seen["out grows"] = (torch.add(x, x, out=out) is out, out.cpu().tolist())
    seen["stays where it was asked for"] = [str(x.to("cpu").device), str(x.to("meta").device)]
    for name, call in {
        "mixed": lambda: x + torch.ones(2, 3), "device": lambda: torch.ones(1, device="npu:99"),
        "memory": lambda: torch.empty(2**40, device=here()),
        "channels last": lambda: torch.ones(1, 2, 3, 4, device=here()).to(memory_format=torch.channels_last),
    }.items():  # fmt: skip
        try:
            call()
            seen[name] = "accepted"
        except (RuntimeError, ValueError) as error:
            seen[name] = type(error).__name__ + ": " + str(error)[:60]
    torch.npu.manual_seed(3)
    state = torch.npu.get_rng_state()
    a, b = torch.rand(4, device=here()), F.dropout(torch.ones(64, device=here()))
    torch.npu.set_rng_state(state)
    seen["random state"] = bool((torch.rand(4, device=here()) == a).all()) and bool(
        (F.dropout(torch.ones(64, device=here())) == b).all()
    )
    seen["random moves on"] = bool((torch.rand(4, device=here()) != a).any())
    seen["memory is counted"] = torch.npu.memory_allocated() > 0
    event = torch.npu.Event()
    with torch.npu.stream(torch.npu.Stream()):
        y = x + 1
        event.record()
    torch.npu.current_stream().wait_event(event)
    seen["streams"] = (y - 1).cpu().equal(x.cpu())
    seen["a copy that does not block is pinned"] = x.to("cpu", non_blocking=True).is_pinned() and not x.cpu().is_pinned()
    seen["another format, the same values"] = torch_npu.npu_format_cast(x, 0).cpu().equal(x.cpu())
    return seen


def refused_types() -> dict[str, str]:
    """What a reduction of each unusual type gives: an error's text, or the value."""
    seen = {}
    for dtype in (torch.float64, torch.uint8, torch.uint64):
        for name in ("all_reduce", "reduce_scatter"):
            try:
                t = torch.tensor([1, 2]).to(dtype).to(here())
                if name == "all_reduce":
                    dist.all_reduce(t)
                else:
                    dist.reduce_scatter_tensor(t[:1].clone(), t)
                torch.npu.synchronize()
                seen[f"{name} {dtype}"] = str(t.cpu().tolist())
            except (RuntimeError, ValueError, TypeError) as error:
                seen[f"{name} {dtype}"] = "refused: " + str(error).splitlines()[0][:100]
    return seen


def asynchronous(elsewhere: bool) -> tuple[float, bool]:
    """A collective returns at once while a peer is late, and the result is right when it is used.

    Args:
        elsewhere: Use the result while another device is the current one.
    """
    t = torch.ones(1000, device=here())
    dist.all_reduce(t.clone())  # the first one creates the communicator, which waits for the peer
    torch.npu.synchronize()
    if dist.get_rank() == 0:
        time.sleep(0.5)
    start = time.monotonic()
    work = dist.all_reduce(t, async_op=True)
    enqueued = time.monotonic() - start
    work.wait()
    with torch.npu.device((torch.npu.current_device() + int(elsewhere)) % torch.npu.device_count()):
        return enqueued, bool((t == dist.get_world_size()).cpu().all())


def one_dies() -> None:
    """The last rank dies; the others are in a collective."""
    os.environ["HCCL_EXEC_TIMEOUT"] = "8"
    dist.all_reduce(torch.ones(4, device=here()))
    torch.npu.synchronize()
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(7)
    dist.all_reduce(t := torch.ones(4, device=here()))
    t.cpu()


def data_parallel(kind: str) -> float:
    """torch's own DDP or FSDP2 on NPUs; largest parameter gap to one CPU process after three steps."""
    plain, ours = tiny.build(), tiny.build().to(here())
    model: nn.Module = ours
    if kind == "ddp":
        model = DistributedDataParallel(ours, device_ids=[here().index])
    else:
        from torch.distributed.fsdp import fully_shard

        for block in ours.blocks:
            fully_shard(block)
        fully_shard(ours)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, ours)]
    for step in range(3):
        tiny.token_loss(plain(tiny.batch(step)[0]), tiny.batch(step)[1]).backward()
        x, y = (t.to(here()) for t in tiny.local_batch(step, dist.get_rank(), dist.get_world_size()))
        tiny.token_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    reference = dict(plain.named_parameters())
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in ours.named_parameters()}
    return max(float((p.detach().cpu() - reference[n]).abs().max()) for n, p in whole.items())
