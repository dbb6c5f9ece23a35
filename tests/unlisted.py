"""Models whose blocks are not the elements of one list, and rank functions that train them split and whole."""

from __future__ import annotations

from typing import Any

import hf_cases
import lightning.pytorch as pl
import tiny
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ascend_core import HybridConfig, build_mesh, parallelize

D = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class TwoTowers(nn.Module):
    """Attributes and two lists, with a module between the towers that several stages keep."""

    def __init__(self, configured: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.configured = configured
        self.embed = nn.Embedding(20, D)
        self.block1 = Layer()
        self.encoder = nn.ModuleList(Layer() for _ in range(2))
        self.bridge = nn.LayerNorm(D)
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(2))})
        self.block6 = Layer()
        self.head = nn.Linear(D, 20)

    def configure_pipeline(self) -> Any:
        if self.configured is not None:
            return self.configured(self)
        return [self.block1, *self.encoder, "decoder.layers.0", "decoder.layers.1", self.block6]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.block1(self.embed(ids))
        for layer in self.encoder:
            x = layer(x)
        x = self.bridge(x)
        for layer in self.decoder["layers"]:
            x = layer(x)
        return self.head(self.block6(x))


class Wrapped(nn.Module):
    """Holds a model with a hook: it is found inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TwoTowers()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(ids)


class Pair(nn.Module):
    """Blocks that take their activation by name, after a mask, and return a tuple."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, D)
        self.layers = nn.ModuleList(PairLayer() for _ in range(layers))
        self.head = nn.Linear(D, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, extras = self.embed(ids), []
        mask = torch.ones(ids.shape[0], 1, D)
        for layer in self.layers:
            x, extra, number = layer(mask=mask, hidden=x)
            extras.append((extra, number))
        return self.head(x)


class PairLayer(Layer):
    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        x = super().forward(hidden) * mask
        return x, {"mean": x.mean(), "ids": torch.arange(3)}, 3


class Recomputed(nn.Module):
    """Layers that checkpoint around their own call, as those of some model libraries do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, D)
        self.layers = nn.ModuleList(RecomputedLayer() for _ in range(4))
        self.head = nn.Linear(D, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class RecomputedLayer(Layer):
    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs) if self.training else super().__call__(*args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def batch(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 20, (size, 6), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def gap(kind: str, schedule: str = "1F1B") -> tuple[float, list[str]]:
    """Train two SGD steps both ways; the largest difference in gradients, losses and outputs, and this rank's parameters."""
    x, y = batch()
    reference, ours = globals()[kind](), globals()[kind]()
    c = HybridConfig(pipeline_parallel_size=2, num_microbatches=4, schedule=schedule)
    model = parallelize(ours, c, build_mesh(c, "cpu"), loss_fn=tiny.token_loss)
    worst = 0.0
    for step in range(2):
        if step == 0:  # an evaluation before any training step knows nothing of the blocks' outputs yet
            worst = max(worst, _outputs(model, reference, x))
        for module in (reference, ours):
            module.zero_grad()
        loss = tiny.token_loss(reference(x), y)
        loss.backward()
        worst = max(worst, abs(float(model.train_step(x, y)) - loss.item()))
        plain = dict(reference.named_parameters())
        worst = max(worst, *(float((p.grad - plain[n].grad).abs().max()) for n, p in model.named.items() if p.grad is not None))
        for parameters in (reference.parameters(), model.parameters()):
            torch.optim.SGD(parameters, lr=0.1).step()
    if kind == "Recomputed":
        assert max(m.calls for m in ours.layers) > 8 + 1 + 2, "eight microbatches, one to measure, two evaluations"
    return max(worst, _outputs(model, reference, x)), list(model.named)


def _outputs(model: Any, reference: nn.Module, x: torch.Tensor) -> float:
    worst = 0.0
    for training in (True, False):
        model.module.train(training)
        with torch.no_grad():
            worst = max(worst, float((model(x) - reference(x)).abs().max()))
    model.module.train()
    return worst


def stages(points: list[str]) -> list[str]:
    """Names of this rank's blocks with the hook's own split points."""
    c = HybridConfig(pipeline_parallel_size=2)
    net = TwoTowers(
        lambda m: {
            "blocks": [m.block1, *m.encoder, *m.decoder["layers"], m.block6], "pipeline_module": m, "split_points": points
        }
    )  # fmt: skip
    model = parallelize(net, c, build_mesh(c, "cpu"))
    return sorted({n.rpartition(".linear")[0] for n in model.named if ".linear" in n})


class FailsOnce(Recomputed):
    """Raises before its layers, on one rank and in one evaluation only."""

    rank = -1

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.rank == torch.distributed.get_rank():
            self.rank = -1
            raise ValueError("only here")
        return super().forward(ids)


def failing_alone(rank: int) -> tuple[str, float]:
    """An evaluation that one rank cannot begin: the error here, and the largest gap of the next evaluation."""
    net = FailsOnce()
    c = HybridConfig(pipeline_parallel_size=2)
    model = parallelize(net, c, build_mesh(c, "cpu"))
    net.rank = rank
    with torch.no_grad():
        text = hf_cases.error_of(lambda: model(batch()[0]))
        return text, float((model(batch()[0]) - Recomputed()(batch()[0])).abs().max())


class LitBlocks(pl.LightningModule):
    """Runs blocks of its own, one after the other, in its steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.second, self.third = nn.Embedding(20, D), Layer(), Layer(), Layer()
        self.head = nn.Linear(D, 20)
        self.losses: list[float] = []

    def configure_pipeline(self) -> list[str]:
        return ["first", "second", "third"]

    def loss(self, batch: Any) -> torch.Tensor:
        x = self.third(self.second(self.first(self.embed(batch[0]))))
        return tiny.token_loss(self.head(x), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(24)), batch_size=8)

    val_dataloader = train_dataloader


class LitSum(LitBlocks):
    """Its loss is a sum over tokens, divided by a number that belongs to the whole batch of 8 x 5."""

    microbatch_reduction = "sum"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * batch[0].numel() / 40

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def lightning(strategy: dict[str, Any] | None, kind: str = "LitBlocks") -> dict[str, Any]:
    """Fit one epoch of three batches."""
    return hf_cases.fit(globals()[kind](), strategy)
