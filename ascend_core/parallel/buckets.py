"""Gradients in flat buckets: summed over a process group, and on wish kept in the buckets from the start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ascend_core.errors import ModelError
from ascend_core.parallel.data import local

BUCKET_BYTES = 64 * 2**20


def make_buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters of one dtype into buckets of up to 64 MiB, in the same way on every rank."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for p in sorted(parameters, key=lambda p: str(p.dtype)):
        nbytes = local(p).numel() * p.element_size()
        if not buckets or buckets[-1][0].dtype != p.dtype or size + nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += nbytes
    return buckets


def like(p: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """A local value as a gradient of ``p``: a DTensor where ``p`` is one."""
    if not isinstance(p, DTensor):
        return value
    return DTensor.from_local(value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


@dataclass
class _Bucket:
    """Parameters, and one flat tensor: the elements of each, then one flag each for whether it has a gradient."""

    parameters: list[nn.Parameter]
    offsets: list[int] = field(default_factory=list)
    flags_at: int = 0
    buffer: torch.Tensor | None = None
    arrived: set[int] = field(default_factory=set)
    flying: torch.Tensor | None = None
    work: dist.Work | None = None

    def __post_init__(self) -> None:
        at = 0
        for p in self.parameters:
            self.offsets.append(at)
            at += local(p).numel()
        self.flags_at = at

    def new_buffer(self) -> torch.Tensor:
        first = self.parameters[0]
        return torch.zeros(self.flags_at + len(self.parameters), dtype=first.dtype, device=local(first).device)

    def slot(self, buffer: torch.Tensor, number: int) -> torch.Tensor:
        p = local(self.parameters[number])
        return buffer[self.offsets[number] : self.offsets[number] + p.numel()].view(p.shape)


class GradientReducer:
    """Sums gradients over a process group in flat buckets.

    A gradient that is None on some ranks counts as zero there; one that is None on all ranks stays None, so that an
    optimizer skips the parameter as it would in one process.

    Args:
        parameters: The parameters, in the same order on all ranks of the group.
        group: The group; None when the reducer only keeps gradients.
        divisor: Divide the sums by it; the group size gives the mean.
        contiguous: Keep gradients in the buckets from the moment they are made, so that nothing is copied or allocated
            when they are reduced.
        overlap: Let buckets travel while the backward that :meth:`arm` announced still runs. Buckets are sent in one
            fixed order, that of backward, so the sums are the same to the bit.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None,
        divisor: int = 1,
        *,
        contiguous: bool = False,
        overlap: bool = False,
    ) -> None:
        self.group, self.divisor, self.contiguous, self.overlap = group, divisor, contiguous, overlap
        self.buckets = [_Bucket(members) for members in make_buckets(parameters)][::-1]
        self.paused = self._armed = False
        self._hooks = []
        for bucket in self.buckets if contiguous or overlap else ():
            bucket.buffer = bucket.new_buffer() if contiguous else None
            for number, p in enumerate(bucket.parameters):
                self._hooks.append(p.register_post_accumulate_grad_hook(self._hook(bucket, number)))

    def close(self) -> None:
        """Stop watching gradients."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, bucket: _Bucket, number: int):  # type: ignore[no-untyped-def]
        def made(p: torch.Tensor) -> None:
            if self.paused:
                return
            if self._armed and bucket.work is not None:
                raise ModelError(
                    f"A parameter of shape {tuple(p.shape)} got a gradient twice in one backward.",
                    "Its first gradient was already on its way to the other replicas; reentrant checkpointing does this.",
                    "Use checkpoint(..., use_reentrant=False), or set overlap_gradients=False.",
                )
            self._keep(bucket, number)
            if self._armed and _in_place(bucket.parameters[number]):
                bucket.arrived.add(number)
                self._send_ready()

        return made

    def arm(self) -> None:
        """Announce that gradients are finished after the next backward."""
        for bucket in self.buckets:
            if bucket.work is not None:  # sent by a backward that failed
                bucket.work.wait()
            bucket.arrived, bucket.flying, bucket.work = set(), None, None
        self._armed = self.overlap

    def _send_ready(self) -> None:
        for bucket in self.buckets:
            if bucket.work is None:
                if len(bucket.arrived) < len(bucket.parameters):
                    return
                self._send(bucket)

    def keep(self) -> None:
        """Move all gradients into the buckets."""
        for bucket in self.buckets:
            for number in range(len(bucket.parameters)):
                self._keep(bucket, number)

    def _keep(self, bucket: _Bucket, number: int) -> None:
        p = bucket.parameters[number]
        grad = p.grad
        if grad is None or bucket.buffer is None or not _in_place(p):
            return
        slot, value = bucket.slot(bucket.buffer, number), local(grad)
        if value.data_ptr() != slot.data_ptr() or value.numel() == 0:
            slot.copy_(value)
            p.grad = like(p, slot)

    def __call__(self) -> None:
        """Reduce all gradients.

        Communication: one all-reduce per bucket over the group: the bytes of its gradients plus one element each.
        """
        for bucket in self.buckets:
            if bucket.work is None:
                self._send(bucket)
            self._take(bucket)
        self._armed = False

    def _send(self, bucket: _Bucket) -> None:
        buffer = bucket.buffer if bucket.buffer is not None else bucket.new_buffer()
        present = []
        for number, p in enumerate(bucket.parameters):
            slot = bucket.slot(buffer, number)
            present.append(float(p.grad is not None))
            if p.grad is None:
                slot.zero_()
            elif local(p.grad).data_ptr() != slot.data_ptr():
                slot.copy_(local(p.grad))
        flags = buffer[bucket.flags_at :]
        flags.copy_(torch.tensor(present))
        bucket.flying, bucket.work = buffer, dist.all_reduce(buffer, group=self.group, async_op=True)

    def _take(self, bucket: _Bucket) -> None:
        assert bucket.work is not None and bucket.flying is not None
        bucket.work.wait()
        buffer = bucket.flying
        bucket.arrived, bucket.flying, bucket.work = set(), None, None
        held = (buffer[bucket.flags_at :] > 0).tolist()
        if self.divisor != 1:
            buffer.div_(self.divisor)
        for number, (p, somewhere) in enumerate(zip(bucket.parameters, held, strict=True)):
            if somewhere:
                self._store(p, bucket.slot(buffer, number), keep=bucket.buffer is not None)

    @staticmethod
    def _store(p: nn.Parameter, value: torch.Tensor, *, keep: bool) -> None:
        if p.grad is None or keep:
            p.grad = like(p, value if keep else value.clone())
        else:
            local(p.grad).copy_(value)


def _in_place(p: nn.Parameter) -> bool:
    """Whether a gradient has its parameter's placement; else it gets it when gradients are finished."""
    return not isinstance(p, DTensor) or (isinstance(p.grad, DTensor) and p.grad.placements == p.placements)


def reduce_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum row ``r`` of every rank's ``(ranks, n)`` tensor onto rank ``r``. Communication: one reduce-scatter."""
    own = torch.empty_like(rows[0])
    dist.reduce_scatter_tensor(own, rows.view(-1), group=group)
    return own


def gather_rows(own: torch.Tensor, ranks: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's ``(n,)`` tensor as rows of one ``(ranks, n)``. Communication: one all-gather."""
    rows = own.new_empty(ranks, *own.shape)
    dist.all_gather_into_tensor(rows.view(-1), own, group=group)
    return rows


def split_evenly(size: int, ranks: int) -> Sequence[tuple[int, int]]:
    """Start and length of each rank's piece of a dimension, as DTensor's ``Shard`` cuts it: like ``torch.chunk``."""
    step = -(-size // ranks) if size else 0
    starts = [min(size, r * step) for r in range(ranks)]
    return [(s, min(size, s + step) - s) for s in starts]
