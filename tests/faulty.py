"""Rank functions about faults, links, ports and time limits of the emulated HCCL."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from emulated import here


def _ready() -> torch.Tensor:
    """Join once, so that later operations find the communicator there."""
    t = torch.ones(1000, device=here())
    dist.all_reduce(t.clone())
    torch.npu.synchronize()
    return t


def late(seconds: float) -> list[float]:
    """Rank 1 is late in its second all-reduce from now; seconds of each of three."""
    from ascend_emulator import faults

    t, times = _ready(), []
    faults.inject("delay", rank=1, op="AllReduce", call=2, seconds=seconds)
    for _ in range(3):
        start = time.monotonic()
        dist.all_reduce(t)
        torch.npu.synchronize()
        times.append(time.monotonic() - start)
    faults.clear()
    return times


def killed() -> None:
    """Rank 1 is killed in its third all-reduce; the others wait at most 8 s."""
    from ascend_emulator import faults

    os.environ["HCCL_EXEC_TIMEOUT"] = "8"
    t = _ready()
    faults.inject("kill", rank=1, op="AllReduce", call=3)
    for _ in range(3):
        dist.all_reduce(t)
        torch.npu.synchronize()
    t.cpu()


def corrupted() -> dict[str, Any]:
    """One element of one result on one rank is wrong, once."""
    from ascend_emulator import faults

    faults.inject("corrupt", rank=1, op="AllReduce", element=3)
    faults.inject("corrupt", rank=0, op="AllGather", element=2, bit=31, call=2)
    results: dict[str, Any] = {"all_reduce": [], "all_gather": []}
    for _ in range(2):
        dist.all_reduce(t := torch.ones(5, device=here()))
        results["all_reduce"].append(t.tolist())
    for _ in range(2):
        dist.all_gather_into_tensor(out := torch.empty(4, device=here()), torch.ones(2, device=here()))
        results["all_gather"].append(out.tolist())
    faults.clear()
    return results


def error_code(code: int) -> str:
    """A call that returns an HCCL error code."""
    from ascend_emulator import faults

    t = _ready()
    faults.inject("error", op="AllReduce", code=code)
    try:
        dist.all_reduce(t)
        torch.npu.synchronize()
        return "accepted"
    except RuntimeError as error:
        return str(error)
    finally:
        faults.clear()


def wrong_fault(kind: str, settings: dict[str, Any]) -> str:
    from ascend_emulator import faults

    try:
        faults.inject(kind, **settings)
        return "accepted"
    except RuntimeError as error:
        return str(error)
    finally:
        faults.clear()


def nodes(mbps: int) -> dict[str, Any]:
    """Four ranks on two nodes: bytes on the links, and the time of an all-reduce within and across."""
    from ascend_emulator import traffic as links

    rank = dist.get_rank()
    os.environ["ASCEND_EMULATOR_NODE"] = str(rank // 2)
    inner = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    t = torch.ones(250_000, device=here())  # 1 MB
    seen: dict[str, Any] = {}
    for name, group in (("within", inner), ("across", dist.group.WORLD)):
        dist.all_reduce(t.clone(), group=group)
        torch.npu.synchronize()
        _module().reset()
        os.environ["ASCEND_EMULATOR_CROSS_MBPS"] = str(mbps)
        start = time.monotonic()
        dist.all_reduce(t, group=group)
        torch.npu.synchronize()
        seen[name] = (*links(), time.monotonic() - start)
        os.environ["ASCEND_EMULATOR_CROSS_MBPS"] = "0"
    _module().reset()
    if rank in (0, 2):
        (dist.send if rank == 0 else dist.recv)(t, 2 - rank)
    torch.npu.synchronize()
    seen["send"] = tuple(links())
    seen["sum"] = t[0].item()
    return seen


def _module() -> Any:
    import importlib

    return importlib.import_module("ascend_emulator.traffic")


def ports() -> dict[str, Any]:
    """Which host port HCCL took; then two ranks that share one device."""
    from ascend_emulator.load import hccl

    _ready()
    return {"port": hccl().emu_port(torch.npu.current_device())}


def same_device() -> str:
    """Both ranks on device 0."""
    os.environ["HCCL_CONNECT_TIMEOUT"] = "3"
    torch.npu.set_device(0)
    try:
        dist.all_reduce(torch.ones(1, device="npu:0"))
        torch.npu.synchronize()
        return "accepted"
    except RuntimeError as error:
        return str(error)


def never_comes(variable: str, seconds: str, prepared: bool) -> float:
    """Rank 1 stays away; seconds until rank 0 has its error. Rank 0 is ended by it, or raises."""
    os.environ[variable] = seconds
    if prepared:
        _ready()
    if dist.get_rank() == 1:
        time.sleep(float(seconds) + 6)
        return 0.0
    start = time.monotonic()
    try:
        dist.all_reduce(t := torch.ones(4, device=here()))
        t.cpu()
    except RuntimeError as error:
        raise RuntimeError(f"after {time.monotonic() - start:.1f} s: {error}") from error
    return time.monotonic() - start
