"""Rank functions for ZeRO-1 and for gradients kept in buckets."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ascend_core import HybridConfig, build_mesh, parallelize
from ascend_core.parallel import ParallelModel
from ascend_core.parallel.data import local


def spread(config: dict[str, Any], net: nn.Module | None = None) -> ParallelModel:
    c = HybridConfig(**config)
    return parallelize(net or tiny.build(), c, build_mesh(c, "cpu"), loss_fn=tiny.token_loss)


@contextmanager
def counted() -> Any:
    """Elements that this rank hands to each kind of collective over buckets."""
    seen: Counter[str] = Counter()
    names = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
    real = {n: getattr(dist, n) for n in names}

    def wrap(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += (args[0] if name == "all_reduce" else args[1]).numel()
            return real[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, wrap(name))
    try:
        yield seen
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def held(config: dict[str, Any]) -> dict[str, Any]:
    """Optimizer elements on this rank, elements of the model, and what one step sends."""
    model = spread(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model.setup_optimizer(optimizer)
    x, y = tiny.local_batch(0, model.mesh.rank("dp"), model.mesh.size("dp"))
    with counted() as seen:
        model.train_step(x, y)
        gradients = sum(local(p.grad).numel() for p in model.parameters() if p.grad is not None)
        optimizer.step()
    state = sum(local(v).numel() for s in optimizer.state.values() for v in s.values() if v.dim())
    return {
        "state": state,
        "model": sum(p.numel() for p in model.parameters()),
        "gradients": gradients,
        "sent": dict(seen),
    }


def unset() -> None:
    model = spread({"zero_stage": 1})
    model.train_step(*tiny.local_batch(0, model.mesh.rank("dp"), 2))


def late_setup() -> None:
    model = spread({"zero_stage": 1})
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    model.setup_optimizer(optimizer)


def moved_memory() -> None:
    model = spread({"zero_stage": 1})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.setup_optimizer(optimizer)
    next(iter(model.parameters())).data = next(iter(model.parameters())).data.clone()
    model.train_step(*tiny.local_batch(0, model.mesh.rank("dp"), 2))
    optimizer.step()


class Uneven(nn.Module):
    """Dimensions that no number of ranks divides, a scalar, and a parameter that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1, bias=False)
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Linear(2, 2)
        self.sometimes = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(torch.tanh(self.first(x))) * self.scale
        return y * self.sometimes if bool(x[0, 0] > 0) else y


def square(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


class NormScaled(torch.optim.Optimizer):
    """Steps by the gradient over its norm: right on shards only if the norm is the whole parameter's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    norm = p.grad.norm()
                    p.sub_(p.grad / (norm.full_tensor() if isinstance(norm, DTensor) else norm), alpha=group["lr"])


def uneven(config: dict[str, Any], kind: str, freeze: bool = False) -> dict[str, float]:
    """Five steps with an optimizer kind on the uneven model against one process; with ``freeze``, one layer joins later."""

    def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
        if kind == "norm":
            return NormScaled(net.parameters(), 0.05)
        if kind == "adafactor":
            return torch.optim.Adafactor(net.parameters(), lr=0.05)
        return torch.optim.AdamW(net.parameters(), lr=0.05, eps=1e-4)

    plain = Uneven()
    c = HybridConfig(**config)
    net = Uneven()
    for m in (plain, net):
        m.first.requires_grad_(not freeze)
    model = parallelize(net, c, build_mesh(c, "cpu"), loss_fn=square)
    optimizer, reference = optimizer_of(net), optimizer_of(plain)
    model.setup_optimizer(optimizer)
    rank, ranks = model.mesh.rank("dp"), model.mesh.size("dp")
    worst = 0.0
    for step in range(5):
        if step == 2:
            net.first.requires_grad_(True)
            plain.first.requires_grad_(True)
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
        x[:, 0] = 1.0 if step % 2 else -1.0
        y = x.sum(1, keepdim=True)
        loss = model.train_step(x.chunk(ranks)[rank], y.chunk(ranks)[rank])
        norm = model.clip_grad_norm_(0.3)
        expected = square(plain(x), y)
        expected.backward()
        expected_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
        dist.all_reduce(loss)
        worst = max(worst, abs(float(loss) / ranks - float(expected)), abs(float(norm) - float(expected_norm)))
        assert all(p.grad is None for p in net.parameters())
    differences = {n: float((p - plain.get_parameter(n)).detach().abs().max()) for n, p in net.named_parameters()}
    return {"loss and norm": worst, **differences}


def in_buckets() -> dict[str, bool]:
    """With ``contiguous_gradients`` every gradient is a view of a bucket: after backward, accumulation and reduction."""
    model = spread({"contiguous_gradients": True})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (bucket,) = model._finisher._kept[0].buckets
    assert bucket.buffer is not None
    memory = bucket.buffer.untyped_storage().data_ptr()

    def inside() -> bool:
        return all(p.grad is not None and p.grad.untyped_storage().data_ptr() == memory for p in model.parameters())

    seen = {}
    x, y = tiny.local_batch(0, model.mesh.rank("dp"), 2)
    with model.no_sync():
        model.train_step(x, y)
        seen["backward"] = inside()
        once = [p.grad.clone() for p in model.parameters()]
        model.train_step(x, y)
        seen["accumulation"] = inside() and all(
            torch.allclose(p.grad, 2 * g, atol=1e-6) for p, g in zip(model.parameters(), once, strict=True)
        )
    model.train_step(x, y)
    seen["reduction"] = inside()
    optimizer.step()
    optimizer.zero_grad()
    with model.gradients_aside() as stash:
        model.train_step(x, y)
    model.add_gradients(stash)
    seen["stash"] = inside()
    return seen


def overlapped(config: dict[str, Any]) -> dict[str, Any]:
    """Gradients of two steps with two batches each, with and without overlap; and what was sent when, with it."""
    from ascend_core.parallel import buckets

    before, buckets.BUCKET_BYTES = buckets.BUCKET_BYTES, 20_000
    try:
        found = {}
        for overlap in (False, True):
            model = spread({**config, "overlap_gradients": overlap})
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model.setup_optimizer(optimizer)
            rank, ranks = model.mesh.rank("dp"), model.mesh.size("dp")
            sent = {"accumulating": 0, "backward": 0, "after": 0}
            finish, group = model.finish_gradients, model.mesh.group("dp")
            real, phase = dist.all_reduce, ["accumulating"]

            def count(*args: Any, **kwargs: Any) -> Any:
                sent[phase[0]] += kwargs.get("group") is group
                return real(*args, **kwargs)

            def finishing() -> None:
                phase[0] = "after"
                finish()

            model.finish_gradients = finishing  # type: ignore[method-assign]
            dist.all_reduce = count
            grads = []
            try:
                for step in range(2):
                    phase[0] = "accumulating"
                    with model.no_sync():
                        model.train_step(*tiny.local_batch(2 * step, rank, ranks))
                    phase[0] = "backward"
                    model.train_step(*tiny.local_batch(2 * step + 1, rank, ranks))
                    grads.append([local(g).clone() for g in model.gradients().values() if g is not None])
                    optimizer.step()
                    optimizer.zero_grad()
            finally:
                dist.all_reduce = real
            found[overlap] = grads, sent
    finally:
        buckets.BUCKET_BYTES = before
    same = all(
        torch.equal(a, b) for x, y in zip(found[True][0], found[False][0], strict=True) for a, b in zip(x, y, strict=True)
    )
    return {"same": same, "plain": found[False][1], "overlapped": found[True][1]}


class Reentrant(nn.Module):
    """One layer in two reentrant checkpoints: its gradient comes twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = x.requires_grad_()
        return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True)


def twice(overlap: bool) -> float:
    """Largest gap to one process."""
    c = HybridConfig(overlap_gradients=overlap)
    torch.manual_seed(3)
    net, plain = Reentrant(), Reentrant()
    plain.load_state_dict(net.state_dict())
    model = parallelize(net, c, build_mesh(c, "cpu"), loss_fn=square)
    plain.load_state_dict(model.state_dict() or plain.state_dict())
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    rank = model.mesh.rank("dp")
    model.train_step(x.chunk(2)[rank], x.chunk(2)[rank])
    square(plain(x.clone()), x).backward()
    if rank:
        return 0.0
    return max(float((p.grad - plain.get_parameter(n).grad).abs().max()) for n, p in net.named_parameters())
