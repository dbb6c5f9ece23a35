"""Rank functions for evaluation, other models, and the pieces of the engine."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import tiny
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ascend_core import HybridConfig, ParallelModel, build_mesh, parallelize
from lightning_ascend import AscendHybridStrategy


class Classifier(pl.LightningModule):
    """Logs metric objects, returns predictions, keeps loss and extra outputs; runs the same in every layout."""

    def __init__(self) -> None:
        super().__init__()
        import torchmetrics

        torch.manual_seed(3)
        self.model = tiny.TinyGPT()
        self.accuracy = torchmetrics.SumMetric()
        self.extra: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.model(x)
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("count", float(x.shape[0]), reduce_fx="sum")
        return {"loss": tiny.token_loss(logits, y), "first": logits[:, 0, 0].detach(), "mean": logits.mean().detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.extra.append([*outputs["first"].tolist(), float(outputs["mean"])])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.model(x)
        self.accuracy.update((logits.argmax(-1) == y).sum().float())
        self.log("correct", self.accuracy)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        first = self.model(batch[0]).argmax(-1)  # the pipelined model may be called several times here
        return self.model(first).argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def loader(self) -> DataLoader:
        return DataLoader(TensorDataset(*tiny.batch(0, 16)), batch_size=8)

    train_dataloader = test_dataloader = predict_dataloader = loader


def evaluate(strategy: dict[str, Any] | None, precision: str = "32-true") -> dict[str, Any]:
    """Fit, test and predict with one Trainer."""
    chosen: Any = "auto" if strategy is None else AscendHybridStrategy(**strategy)
    devices = int(os.environ["WORLD_SIZE"])
    if strategy is None:
        for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
            os.environ.pop(key, None)
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=chosen, max_epochs=2, logger=False, enable_checkpointing=False, precision=precision,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    module = Classifier()
    trainer.fit(module)
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    tested = trainer.test(module, verbose=False)[0]
    predicted = [p.tolist() for p in trainer.predict(module)]
    return {"metrics": metrics, "test": tested, "predicted": predicted, "extra": module.extra}


class Encoder(nn.Module):
    """torch's own encoder and decoder layers, with masks."""

    def __init__(self, batch_first: bool, decoder: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        options = {"d_model": 16, "nhead": 4, "dim_feedforward": 32, "dropout": 0.0, "batch_first": batch_first}
        self.inp = nn.Linear(6, 16)
        self.memory = nn.Linear(6, 16)
        self.batch_first, self.decoder = batch_first, decoder
        kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
        stack = nn.TransformerDecoder if decoder else nn.TransformerEncoder
        self.stack = stack(kind(**options), num_layers=4)
        for p in self.stack.parameters():
            nn.init.normal_(p, std=0.2)
        self.out = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        h, m = self.inp(x), self.memory(x)
        if not self.batch_first:
            h, m = h.transpose(0, 1), m.transpose(0, 1)
        if self.decoder:
            h = self.stack(h, m, tgt_mask=causal, memory_key_padding_mask=padding)
        else:
            h = self.stack(h, mask=causal, src_key_padding_mask=padding.float().masked_fill(padding, float("-inf")))
        return self.out(h if self.batch_first else h.transpose(0, 1))


def transformer_layers(config: dict[str, Any], batch_first: bool, decoder: bool) -> float:
    """Largest gap in output, loss, gradients and parameters over three steps, against one process."""
    plain, ours = Encoder(batch_first, decoder), Encoder(batch_first, decoder)
    c = HybridConfig(**config)
    model = parallelize(ours, c, build_mesh(c, "cpu"), loss_fn=F.mse_loss)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    worst = 0.0
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(4, 5, 6, generator=generator), torch.randn(4, 5, 3, generator=generator)
        loss = F.mse_loss(plain(x), y)
        loss.backward()
        worst = max(worst, abs(float(model.train_step(x, y)) - float(loss)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        ours.eval(), plain.eval()
        worst = max(worst, float((model(x) - plain(x)).abs().max()))
    return max(worst, gap(model, plain))


def gap(model: ParallelModel, plain: nn.Module) -> float:
    state = model.state_dict()
    return max((float((state[n] - p).abs().max()) for n, p in plain.state_dict().items()), default=0.0) if state else 0.0


class Odd(nn.Module):
    """Attention that cannot be split by heads: six heads over four ranks, or code that needs the full width."""

    def __init__(self, heads: int, full_width: bool) -> None:
        super().__init__()
        self.num_heads, self.full_width = heads, full_width
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(48, 48) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.shape
        q, k, v = (p(x).view(b, t, self.num_heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1)
        return self.o_proj(y[..., torch.arange(width) % y.shape[-1]] if self.full_width else y)


def odd_attention(heads: int, full_width: bool, split: str = "column") -> dict[str, Any]:
    """Train one step; say which styles were chosen, which shapes the shards have, and the largest gap."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[Odd(heads, full_width) for _ in range(2)])
    torch.manual_seed(0)
    ours = nn.Sequential(*[Odd(heads, full_width) for _ in range(2)])
    c = HybridConfig(tensor_parallel_size=4, qkv_split=split)
    model = parallelize(ours, c, build_mesh(c, "cpu"), loss_fn=F.mse_loss)
    x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(1))
    F.mse_loss(plain(x), x).backward()
    model.train_step(x, x)
    reference = dict(plain.named_parameters())
    worst = max(
        float((p.grad.full_tensor() - reference[n].grad).abs().max())
        for n, p in model.named.items()
        if hasattr(p, "full_tensor")
    )
    shard = model.named["0.q_proj.weight"].to_local().shape
    return {"gap": worst, "shard": tuple(shard), "heads": ours[0].num_heads}


def norms() -> dict[str, float]:
    """Norms of several kinds on tensor-parallel parameters with frozen ones between, against torch's."""
    plain, ours = tiny.build(), tiny.build()
    for m in (plain, ours):
        m.pos.requires_grad_(False)
        m.blocks[1].attn.qkv.weight.requires_grad_(False)
    c = HybridConfig(pipeline_parallel_size=2, tensor_parallel_size=2, num_microbatches=2)
    model = parallelize(ours, c, build_mesh(c, "cpu"), loss_fn=tiny.token_loss)
    x, y = tiny.batch(0)
    tiny.token_loss(plain(x), y).backward()
    model.train_step(x, y)
    grads = [p.grad for p in plain.parameters() if p.grad is not None]
    gaps = {
        str(kind): abs(float(model.grad_norm(norm_type=kind)) / float(nn.utils.get_total_norm(grads, kind)) - 1) for kind in (1.0, 2.0, float("inf"))
    }  # fmt: skip
    model.clip_grad_value_(0.01)
    gaps["value"] = max(
        float(g.abs().max()) for g in (p.grad for p in model.parameters()) if g is not None and not hasattr(g, "to_local")
    )
    return gaps


def user_plan() -> float:
    """A user's own plan, with the embedding split by vocabulary and untied head gathered."""
    plain, ours = tiny.build(tied=False, fused=False), tiny.build(tied=False, fused=False)
    plan = {
        "tok": "embedding", "head": "colwise_gather", "blocks.*.attn.[qkv]_proj": "colwise", "blocks.*.attn.proj": "rowwise",
        "*.mlp.0": "colwise", "*.mlp.2": "rowwise",
    }  # fmt: skip
    c = HybridConfig(tensor_parallel_size=2, tensor_parallel_plan=plan, pipeline_parallel_size=2, num_microbatches=2)
    model = parallelize(ours, c, build_mesh(c, "cpu"), loss_fn=tiny.token_loss)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        x, y = tiny.batch(step)
        tiny.token_loss(plain(x), y).backward()
        model.train_step(x, y)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return gap(model, plain)


class Buffers(nn.Module):
    """Batch norm, a bool mask, and a buffer that is an expanded view."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("positions", torch.arange(3.0)[:1].expand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def buffers(config: dict[str, Any]) -> dict[str, Any]:
    """Buffers before and after a step on different data, and after sharing them."""
    torch.manual_seed(torch.distributed.get_rank())
    module = Buffers()
    module.mask ^= bool(torch.distributed.get_rank())
    c = HybridConfig(**config)
    mesh = build_mesh(c, "cpu")
    model = parallelize(module, c, mesh, loss_fn=F.mse_loss)
    first = {n: b.clone() for n, b in module.named_buffers()}
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(mesh.rank("dp")))
    model.train_step(x, x)
    model.train_step(x, x)
    model.share_buffers()
    counts = {int(b) for n, b in module.named_buffers() if n.endswith("num_batches_tracked")}
    return {
        "mask": first["mask"].tolist(),
        "positions": first["positions"].tolist(),
        "counts": counts,
        "last": dict(module.named_buffers()),
    }


def sharded_without_blocks(empty: bool) -> float:
    """zero_stage=3 for a model without a list of layers."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(4, 6)
            self.b = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).relu())

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w

    c = HybridConfig(zero_stage=3)
    mesh = build_mesh(c, "cpu")
    ours, plain = (Bare(), Bare()) if empty else (Two(), Two())
    model = parallelize(ours, c, mesh, loss_fn=F.mse_loss, root_is_boundary=False)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    F.mse_loss(plain(x), x).backward()
    part = x.chunk(2)[mesh.rank("dp")]
    model.train_step(part, part)
    reference = dict(plain.named_parameters())
    assert any(p.to_local().numel() < p.numel() for p in model.parameters() if hasattr(p, "to_local"))
    return max(float((p.grad.full_tensor() - reference[n].grad).abs().max()) for n, p in model.named.items())
