"""Rank functions of the tests that come from user reports (named by their number)."""

from __future__ import annotations

import time
from typing import Any

import tiny
import torch
import torch.nn.functional as F
from torch import nn

from ascend_core import HybridConfig, ParallelModel, build_mesh, parallelize


class Add(nn.Module):
    """Adds a scalar weight times a factor: the gradient of a mean loss is the factor."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.factor * self.weight


def spread(model: nn.Module, loss_fn: Any, **config: Any) -> ParallelModel:
    c = HybridConfig(**config)
    return parallelize(model, c, build_mesh(c, "cpu"), loss_fn=loss_fn)


def accumulated_gradients(schedule: str) -> list[float]:
    """D05: the gradient after one, two and three accumulating calls, every true gradient being 1."""
    model = spread(
        nn.Sequential(*[Add() for _ in range(4)]),
        lambda y, _: y.mean(),
        pipeline_parallel_size=2,
        num_microbatches=4,
        schedule=schedule,
    )
    seen = []
    for _ in range(3):
        model.train_step(torch.zeros(4, 1), torch.zeros(4, 1))
        seen.append(float(next(model.parameters()).grad))
    return seen


def token_mean(weighted: bool) -> float:
    """D05: a mean over 7 valid tokens, 5 of them in the first microbatch; largest gradient difference."""

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)

    x, y = tiny.batch(0, size=2, seq=6)
    y[0, 5:], y[1, 2:] = -100, -100
    plain = tiny.build()
    loss(plain(x), y).backward()
    reference = {n: p.grad for n, p in plain.named_parameters()}
    model = spread(tiny.build(), loss, pipeline_parallel_size=2, num_microbatches=2)
    model.train_step(x, y, weight_fn=(lambda mb: int((mb[1] != -100).sum())) if weighted else None)
    return max(float((p.grad - reference[n]).abs().max()) for n, p in model.named.items() if p.grad is not None)


def clipped(tied: bool) -> tuple[float, list[float]]:
    """D07: gradients 3 and 4 on two stages (or one tied weight with gradient 3 + 4), clipped to norm 1."""
    blocks = nn.Sequential(Add(3.0), Add(4.0))
    if tied:
        blocks[1].weight = blocks[0].weight
    model = spread(blocks, lambda y, _: y.mean(), pipeline_parallel_size=2, num_microbatches=2)
    model.train_step(torch.zeros(2, 1), torch.zeros(2, 1))
    norm = float(model.clip_grad_norm_(1.0))
    return norm, [float(p.grad) for p in model.parameters()]


def index_loss(schedule: str) -> float:
    """D60: every sample carries its index as input and label; identity layers give loss 0."""
    model = spread(
        nn.Sequential(*[Add() for _ in range(4)]), lambda y, t: (y - t).abs().sum(), pipeline_parallel_size=2, num_microbatches=4, schedule=schedule
    )  # fmt: skip
    worst = 0.0
    for step in range(3):
        ids = torch.arange(8.0).unsqueeze(1) + 8 * step
        worst = max(worst, abs(float(model.train_step(ids, ids.clone()))))
    return worst


def changing_lengths(schedule: str, size: int) -> float:
    """D61: sequence length changes from batch to batch; buffers are poisoned in between. Largest loss or gradient gap."""
    reference, ours = tiny.build(), tiny.build()
    model = spread(ours, tiny.token_loss, pipeline_parallel_size=2, num_microbatches=4, schedule=schedule)
    worst = 0.0
    for step, seq in enumerate((8, 12, 9, 3, 12, 8)):
        x, y = tiny.batch(step, size=size - step % 2 if size > 1 else 1, seq=seq)
        assert model.runner is not None
        for _, stages in model.runner._schedules.values():
            for stage in stages:
                for infos in stage.args_recv_info.values():
                    for info in infos:
                        info.buffer.detach().fill_(float("nan"))
        reference.zero_grad()
        loss = tiny.token_loss(reference(x), y)
        loss.backward()
        for p in model.parameters():
            p.grad = None
        worst = max(worst, abs(float(model.train_step(x, y)) - float(loss)))
        plain = dict(reference.named_parameters())
        worst = max(worst, *(float((p.grad - plain[n].grad).abs().max()) for n, p in model.named.items() if p.grad is not None))
    return worst


def unused_branch() -> dict[str, Any]:
    """A parameter that no rank uses keeps ``grad=None``; one that only some replicas use gets the mean with zeros."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.sometimes, self.never = (nn.Parameter(torch.ones(())) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.used
            return y * self.sometimes if torch.distributed.get_rank() == 1 else y

    model = spread(Branches(), lambda y, _: y.mean())
    model.train_step(torch.ones(2), torch.ones(2))
    return {n: None if p.grad is None else float(p.grad) for n, p in model.named.items()}


class Noisy(nn.Module):
    """User code that draws noise for input and target, blocks that drop out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def random_numbers() -> list[Any]:
    """What each rank drew: noise of the user's code per microbatch and step, and the blocks' dropout masks."""
    drawn: list[Any] = []
    noisy = Noisy()
    model = spread(noisy, None, pipeline_parallel_size=2, num_microbatches=2)
    masks: list[torch.Tensor] = []
    for layer in noisy.layers:
        layer[1].register_forward_hook(lambda m, args, out: masks.append((out != 0).float().flatten()))

    def step(x: torch.Tensor, number: int) -> torch.Tensor:
        noise = torch.randn_like(x)
        drawn.append((number, noise.sum().item()))
        return (model.module(x + noise) - noise).pow(2).mean()

    torch.manual_seed(torch.distributed.get_rank())
    before = torch.get_rng_state()
    for i in range(2):
        model.rng.step = i
        model.forward_backward(step, torch.ones(4, 8))
    restored = bool(torch.equal(before, torch.get_rng_state()))
    return [sorted(set(drawn)), [m.tolist() for m in masks], restored]


class Sharing(nn.Module):
    """Blocks that share a table of angles (a module with a buffer) and a module with parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

        class Table(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("angles", torch.linspace(0, 1, 8), persistent=False)
                self.mix = nn.Linear(8, 8)

        class Layer(nn.Module):
            def __init__(self, table: nn.Module) -> None:
                super().__init__()
                self.table, self.linear = table, nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.linear(torch.tanh(self.table.mix(x)) + self.table.angles)

        table = Table()
        self.layers = nn.ModuleList(Layer(table) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def shared_modules() -> float:
    """Largest gap in gradients of a model whose blocks share a module, on two stages."""
    plain, ours = Sharing(), Sharing()
    model = spread(ours, F.mse_loss, pipeline_parallel_size=2, num_microbatches=2)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    F.mse_loss(plain(x), x).backward()
    model.train_step(x, x)
    reference = dict(plain.named_parameters())
    gaps = {n: float((p.grad - reference[n].grad).abs().max()) for n, p in model.named.items()}
    assert any("table.mix" in n for n in gaps)
    return max(gaps.values())


class Failing(nn.Module):
    """A layer that raises in evaluation."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails, self.linear = fails, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails and not self.training:
            raise ValueError("this layer fails")
        return self.linear(x)


def failing_evaluation(where: int) -> tuple[str, float]:
    """Evaluate a four-layer model on two stages whose layer ``where`` raises; error and seconds on this rank."""
    model = spread(nn.Sequential(*[Failing(i == where) for i in range(4)]), F.mse_loss, pipeline_parallel_size=2)
    model.module.eval()
    start = time.monotonic()
    try:
        with torch.no_grad():
            model(torch.ones(2, 4))
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "none", time.monotonic() - start


def failing_payload(kind: str) -> tuple[str, float]:
    """A step whose results cannot be combined or sent to other ranks; only the last stage meets that."""
    model = spread(nn.Sequential(*[Add() for _ in range(2)]), None, pipeline_parallel_size=2, num_microbatches=2)

    def payload() -> Any:
        if kind == "raises":
            raise KeyError("no such reduction")
        return lambda: None  # cannot be pickled

    start = time.monotonic()
    try:
        model.forward_backward(lambda x, n: model.module(x).mean(), torch.zeros(2, 1), payload=payload)
    except Exception as error:
        return type(error).__name__, time.monotonic() - start
    return "none", time.monotonic() - start
