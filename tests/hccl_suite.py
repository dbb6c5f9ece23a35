"""Every collective, data type and reduction of the emulated HCCL against a plain computation in float64 or int64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from emulated import here

OPS = dist.ReduceOp
REDUCIBLE = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64]
MOVABLE = [*REDUCIBLE, torch.uint8, torch.int16, torch.bool, torch.float64]
SIZES = [1, 5, 300_001]  # the last one is longer than a window of shared memory, and odd


class Check:
    """Collects the names of results that differ from what is wanted."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def equal(self, name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        got, wanted = got.cpu(), wanted.to(got.dtype)
        if got.shape != wanted.shape or not torch.equal(got, wanted):
            self.wrong.append(f"{name}: {got.flatten()[:4].tolist()} instead of {wanted.flatten()[:4].tolist()}")


def values(rank: int, size: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small whole numbers that each rank can compute for every other; sums of 8 are exact in every type."""
    i = torch.arange(size, dtype=torch.int64)
    whole = (i * 7 + rank * 3 + salt) % 5 - (0 if dtype in (torch.uint8, torch.bool) else 2)
    return whole > 1 if dtype == torch.bool else whole.to(dtype)


def combine(parts: list[torch.Tensor], op: Any) -> torch.Tensor:
    """The plain computation."""
    stack = torch.stack([p.double() if p.is_floating_point() else p.long() for p in parts])
    by_op: dict[Any, Callable[[], torch.Tensor]] = {
        OPS.SUM: lambda: stack.sum(0),
        OPS.AVG: lambda: stack.double().mean(0),
        OPS.MAX: lambda: stack.amax(0),
        OPS.MIN: lambda: stack.amin(0),
        OPS.PRODUCT: lambda: stack.prod(0),
    }
    return by_op[op]()


def reductions() -> list[str]:
    """all_reduce, reduce and reduce_scatter for every type, operation and size."""
    rank, world, check = dist.get_rank(), dist.get_world_size(), Check()
    for dtype in REDUCIBLE:
        operations = [OPS.SUM, OPS.MAX, OPS.MIN, OPS.PRODUCT] + ([OPS.AVG] if dtype.is_floating_point else [])
        for op in operations:
            for size in SIZES[: 3 if op == OPS.SUM else 2]:
                name = f"{dtype} {op} {size}"
                wanted = combine([values(r, size, dtype) for r in range(world)], op)
                t = values(rank, size, dtype).to(here())
                dist.all_reduce(t, op)
                check.equal(f"all_reduce {name}", t, wanted)
                t = values(rank, size, dtype).to(here())
                dist.reduce(t, world - 1, op)
                if rank == world - 1:
                    check.equal(f"reduce {name}", t, wanted)
                whole = values(rank, size * world, dtype).to(here())
                piece = torch.empty(size, dtype=dtype, device=here())
                dist.reduce_scatter_tensor(piece, whole, op)
                wanted = combine([values(r, size * world, dtype).view(world, size)[rank] for r in range(world)], op)
                check.equal(f"reduce_scatter_tensor {name}", piece, wanted)
    flags = values(rank, 9, torch.bool).to(here())
    dist.all_reduce(flags)  # any of them
    check.equal("all_reduce bool", flags, torch.stack([values(r, 9, torch.bool) for r in range(world)]).any(0))
    return check.wrong


def movements() -> list[str]:
    """Collectives that only move, for every type."""
    rank, world, check = dist.get_rank(), dist.get_world_size(), Check()
    for dtype in MOVABLE:
        for size in SIZES[: 3 if dtype == torch.float32 else 2]:
            name = f"{dtype} {size}"
            mine = values(rank, size, dtype).to(here())
            every = torch.stack([values(r, size, dtype) for r in range(world)])
            t = mine.clone()
            dist.broadcast(t, world - 1)
            check.equal(f"broadcast {name}", t, every[-1])
            out = torch.empty(world * size, dtype=dtype, device=here())
            dist.all_gather_into_tensor(out, mine)
            check.equal(f"all_gather_into_tensor {name}", out.view(world, size), every)
            parts = [torch.empty(size, dtype=dtype, device=here()) for _ in range(world)]
            dist.all_gather(parts, mine)
            check.equal(f"all_gather {name}", torch.stack(parts), every)
            dist.gather(mine, parts if rank == 0 else None, 0)
            check.equal(f"gather {name}", torch.stack(parts), every)
            t = torch.empty(size, dtype=dtype, device=here())
            dist.scatter(t, [values(r, size, dtype, 1).to(here()) for r in range(world)] if rank == 0 else None, 0)
            check.equal(f"scatter {name}", t, values(rank, size, dtype, 1))
            sent = torch.cat([values(rank, size, dtype, k) for k in range(world)]).to(here())
            wanted = torch.cat([values(r, size, dtype, rank) for r in range(world)])
            out = torch.empty_like(sent)
            dist.all_to_all_single(out, sent)
            check.equal(f"all_to_all_single {name}", out, wanted)
            pieces = list(torch.empty_like(sent).chunk(world))
            dist.all_to_all(pieces, list(sent.chunk(world)))
            check.equal(f"all_to_all {name}", torch.cat(pieces), wanted)
            got = torch.empty(size, dtype=dtype, device=here())
            pair = [dist.P2POp(dist.isend, mine, (rank + 1) % world), dist.P2POp(dist.irecv, got, (rank - 1) % world)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
            check.equal(f"batch_isend_irecv {name}", got, every[rank - 1])
    return check.wrong


def uneven() -> list[str]:
    """Pieces of different lengths: rank r has r + 1 elements, rank 0 of an all-to-all row none."""
    rank, world, check = dist.get_rank(), dist.get_world_size(), Check()
    lengths = [r + 1 for r in range(world)]
    mine = torch.full((rank + 1,), float(rank), device=here())
    parts = [torch.empty(n, device=here()) for n in lengths]
    dist.all_gather(parts, mine)
    check.equal("all_gather", torch.cat(parts), torch.cat([torch.full((n,), float(r)) for r, n in enumerate(lengths)]))
    pieces = [torch.arange(float(n), device=here()) + rank for n in lengths]
    out = torch.empty(rank + 1, device=here())
    dist.reduce_scatter(out, pieces)
    check.equal("reduce_scatter", out, torch.arange(rank + 1.0) * world + sum(range(world)))
    sends = [(rank + k) % 3 for k in range(world)]
    receives = [(r + rank) % 3 for r in range(world)]
    out = torch.empty(sum(receives), device=here())
    dist.all_to_all_single(out, torch.full((sum(sends),), float(rank), device=here()), receives, sends)
    check.equal("all_to_all_single", out, torch.cat([torch.full((n,), float(r)) for r, n in enumerate(receives)]))
    return check.wrong


def ways() -> list[str]:
    """Other ways in: lists, coalescing, functional collectives, subgroups, isend and irecv, objects, streams."""
    import torch.distributed._functional_collectives as functional

    rank, world, check = dist.get_rank(), dist.get_world_size(), Check()
    tensors = [torch.full((n,), float(rank), device=here()) for n in (3, 70_000)]
    with dist._coalescing_manager(device=here()):
        for t in tensors:
            dist.all_reduce(t)
    for t in tensors:
        check.equal("coalesced all_reduce", t, torch.full(t.shape, sum(range(world))))
    outs = [torch.empty(world * 3, device=here()) for _ in range(2)]
    with dist._coalescing_manager(device=here(), async_ops=True) as manager:
        for k, out in enumerate(outs):
            dist.all_gather_into_tensor(out, torch.full((3,), float(10 * k + rank), device=here()))
    manager.wait()
    for k, out in enumerate(outs):
        check.equal("coalesced all_gather", out.view(world, 3), (10 * k + torch.arange(world))[:, None].expand(world, 3))
    x = torch.arange(4.0 * world, device=here())
    check.equal("functional all_reduce", functional.all_reduce(x, "sum", list(range(world))), x.cpu() * world)
    gathered = functional.all_gather_tensor(x[:2] + rank, 0, list(range(world)))
    check.equal("functional all_gather", gathered, torch.cat([torch.arange(2.0) + r for r in range(world)]))
    scattered = functional.reduce_scatter_tensor(x, "sum", 0, list(range(world)))
    check.equal("functional reduce_scatter", scattered, torch.arange(4.0 * rank, 4.0 * rank + 4) * world)
    groups = [dist.new_group(list(range(world))[k::2]) for k in range(2)]
    t = torch.full((5,), float(rank), device=here())
    dist.all_reduce(t, group=groups[rank % 2])
    check.equal("subgroup", t, torch.full((5,), sum(range(rank % 2, world, 2))))
    if rank < 2:
        out = torch.empty(200_000, device=here())
        work = dist.isend(torch.arange(200_000.0, device=here()), 1) if rank == 0 else dist.irecv(out, 0)
        work.wait()
        if rank == 1:
            check.equal("isend irecv", out, torch.arange(200_000.0))
    box: list[Any] = [{"rank": rank}]
    dist.broadcast_object_list(box, 0)
    if box != [{"rank": 0}]:
        check.wrong.append("broadcast_object_list")
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = torch.ones(50_000, device=here())
        dist.all_reduce(y)
        z = y * 2  # ordered after the collective on this stream
    torch.npu.current_stream().wait_stream(side)
    check.equal("on another stream", z, torch.full((50_000,), 2.0 * world))
    works = [dist.all_reduce(torch.full((9,), float(k), device=here()), async_op=True) for k in range(20)]
    for work in works:
        work.wait()
    check.equal("many at once", works[-1].result()[0], torch.full((9,), 19.0 * world))
    return check.wrong


def integer_average() -> str:
    """AVG of integers: torch_npu's answer, or its error."""
    t = torch.tensor([1, 2], device=here())
    try:
        dist.all_reduce(t, OPS.AVG)
        return str(t.tolist())
    except RuntimeError as error:
        return "refused: " + str(error).splitlines()[0]
