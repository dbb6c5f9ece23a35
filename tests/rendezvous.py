"""Rank functions of D62: sends that block until the other side receives, and exchanges that can never finish."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import tiny
import torch
import torch.distributed as dist

from ascend_core import HybridConfig, build_mesh, parallelize


class _Done:
    """The handle of an operation that is over."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def blocking_sends() -> Iterator[list[tuple[str, int]]]:
    """Real process groups whose sends return when the message has been received; gives what was exchanged with whom.

    Operations of one batch are started together, as the groups of NCCL and HCCL do, and all are over when it returns.
    """
    send, recv, batch = dist.ProcessGroup.send, dist.ProcessGroup.recv, dist.batch_isend_irecv
    kept = {name: dist.ProcessGroup.__dict__[name] for name in ("send", "recv")}  # as they are bound to groups
    log: list[tuple[str, int]] = []
    inside = False

    def blocking_send(group: Any, tensors: Any, peer: int, tag: int) -> Any:
        log.append(("send", peer))
        work = send(group, tensors, peer, tag)
        if inside:
            return work
        work.wait()
        return _Done()

    def noted_recv(group: Any, tensors: Any, peer: int, tag: int) -> Any:
        log.append(("recv", peer))
        return recv(group, tensors, peer, tag)

    def together(operations: Any) -> list[Any]:
        nonlocal inside
        inside = True
        try:
            for work in batch(operations):
                work.wait()
        finally:
            inside = False
        return []

    dist.ProcessGroup.send, dist.ProcessGroup.recv = blocking_send, noted_recv  # type: ignore[method-assign]
    dist.batch_isend_irecv = together
    try:
        yield log
    finally:
        dist.ProcessGroup.send, dist.ProcessGroup.recv = kept["send"], kept["recv"]  # type: ignore[method-assign]
        dist.batch_isend_irecv = batch


def both_send_first() -> tuple[str, list[tuple[str, int]]]:
    """The mistake of the report, to see that these sends do block: both ranks send, then receive."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    peer = 1 - dist.get_rank()
    tensor = torch.ones(4)
    with blocking_sends() as log:
        try:
            sent = dist.isend(tensor, peer, group)
            dist.recv(torch.empty(4), peer, group)
            assert sent is not None
            sent.wait()
        except RuntimeError as error:
            return str(error), log
    return "", log


def train(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """One step of 8 microbatches with blocking sends: seconds, largest gap to one process, what was exchanged with whom."""
    c = HybridConfig(**config, num_microbatches=8)
    model = parallelize(tiny.build(layers=layers), c, build_mesh(c, "cpu"), loss_fn=tiny.token_loss)
    x, y = tiny.batch(0)
    plain = tiny.build(layers=layers)
    loss = tiny.token_loss(plain(x), y)
    loss.backward()
    reference = dict(plain.named_parameters())
    start = time.monotonic()
    with blocking_sends() as log:
        ours = model.train_step(x, y)
    seconds = time.monotonic() - start
    gaps = [float((p.grad - reference[n].grad).abs().max()) for n, p in model.named.items() if p.grad is not None]
    return {"seconds": seconds, "gap": max(*gaps, abs(float(ours) - float(loss))), "log": log}


def unmatched() -> str:
    """GPipe with 4 microbatches on rank 0 and 2 on rank 1: each waits for the other to receive. What this rank reports."""
    c = HybridConfig(pipeline_parallel_size=2, schedule="GPipe", num_microbatches=2)
    mesh = build_mesh(c, "cpu")
    model = parallelize(tiny.build(), c, mesh, loss_fn=tiny.token_loss)
    model.train_step(*tiny.batch(0))
    assert model.runner is not None
    built = dict(model.runner._schedules)
    model.runner.config = HybridConfig(pipeline_parallel_size=2, schedule="GPipe", num_microbatches=4)
    model.train_step(*tiny.batch(0, size=32))  # the same shape per microbatch
    if dist.get_rank() == 1:  # now it takes the schedule for two where rank 0 takes the one for four
        four = next(k for k in model.runner._schedules if k not in built)
        model.runner._schedules[four] = next(iter(built.values()))
        model.runner.config = c
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), mesh.group("pp"))
    try:
        model.train_step(*tiny.batch(0, size=32 if dist.get_rank() == 0 else 16))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""
