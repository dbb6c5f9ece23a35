"""Train a character-level GPT on the text of Python's own help topics, as a plain LightningModule.

Nothing here knows how it is run. One process:

    python examples/train_gpt_lightning.py --accelerator cpu --devices 1 --strategy auto

Eight processes, pipeline 2 x tensor 2 x data 2, the sizes in a file:

    ASCEND_CONFIG=examples/hybrid_2x2x2.yaml python examples/train_gpt_lightning.py --accelerator cpu --devices 8
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def load_text() -> str:
    """About 700 kB of English that every Python installation has."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


class CharDataset(Dataset):
    """Windows of ``length`` characters and the same windows shifted by one."""

    def __init__(self, ids: torch.Tensor, length: int, stride: int) -> None:
        self.ids, self.length = ids, length
        self.starts = range(0, len(ids) - length - 1, stride)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.starts[index]
        window = self.ids[start : start + self.length + 1]
        return window[:-1], window[1:]


class Text(L.LightningDataModule):
    """Loaders whose global batch is the same however many replicas share it."""

    def __init__(self, train: Dataset, val: Dataset, batch_size: int) -> None:
        super().__init__()
        self.sets, self.batch_size = {"train": train, "val": val}, batch_size

    def loader(self, name: str, shuffle: bool) -> DataLoader:
        share = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        sampler = DistributedSampler(self.sets[name], **share, shuffle=shuffle, drop_last=True)
        return DataLoader(self.sets[name], self.batch_size // share["num_replicas"], sampler=sampler, drop_last=True)

    def train_dataloader(self) -> DataLoader:
        return self.loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self.loader("val", shuffle=False)


class Attention(nn.Module):
    """Causal self-attention with one fused projection."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small GPT; the embedding and the output head are one matrix."""

    def __init__(self, vocab: int, length: int, layers: int, dim: int, heads: int) -> None:
        super().__init__()
        self.length = length
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if "proj" in name or "mlp.2" in name else 0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LitGPT(L.LightningModule):
    """The usual LightningModule: loss, validation loss, AdamW with a cosine schedule, samples at the end."""

    def __init__(self, characters: str, length: int, layers: int, dim: int, heads: int, lr: float, steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(len(characters), length, layers, dim, heads)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids, target = batch
        return F.cross_entropy(self.model(ids).flatten(0, 1), target.flatten())

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, total_iters=20)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams.steps - 20, eta_min=self.hparams.lr / 20)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[20])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str, count: int) -> str:
        """Continue a prompt by ``count`` characters, sampled at temperature 0.7."""
        characters: str = self.hparams.characters
        generator = torch.Generator().manual_seed(0)
        ids = [characters.index(c) for c in prompt]
        for _ in range(count):
            window = torch.tensor([ids[-self.hparams.length :]], device=self.device)
            logits = self.model(window)[0, -1].float().cpu()
            ids.append(int(torch.multinomial((logits / 0.7).softmax(0), 1, generator=generator)))
        return "".join(characters[i] for i in ids)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--strategy", default="ascend_hybrid")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64, help="of all replicas together")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=160)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--samples", type=int, default=120, help="characters per generated sample; 0 for none")
    parser.add_argument("--out", type=Path, default=Path("out/gpt"), help="folder for the checkpoint and losses.json")
    return parser.parse_args()


def main() -> None:
    args = parse()
    L.seed_everything(7, verbose=False)
    text = load_text()
    characters = "".join(sorted(set(text)))
    lookup = {c: i for i, c in enumerate(characters)}
    ids = torch.tensor([lookup[c] for c in text])
    pages = ids.split(2000)  # every twentieth page is held out
    held_out = torch.cat(pages[10::20])
    seen = torch.cat([page for i, page in enumerate(pages) if i % 20 != 10])
    train = CharDataset(seen, args.length, stride=args.length // 2)
    val = CharDataset(held_out, args.length, stride=args.length)

    checkpoint = ModelCheckpoint(dirpath=args.out, filename="best", monitor="val_loss", enable_version_counter=False)
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=args.strategy,
        max_steps=args.steps,
        val_check_interval=max(1, args.steps // 2),
        check_val_every_n_epoch=None,
        limit_val_batches=8,
        gradient_clip_val=1.0,
        callbacks=[checkpoint, TQDMProgressBar(refresh_rate=10)],
        logger=False,
        enable_model_summary=False,
    )
    module = LitGPT(characters, args.length, args.layers, args.dim, args.heads, args.lr, args.steps)
    trainer.fit(module, Text(train, val, args.batch_size))

    val_loss = float(trainer.callback_metrics["val_loss"])
    samples = [module.generate(prompt, args.samples) for prompt in ("The ", "A class ")] if args.samples else []
    if trainer.is_global_zero:
        args.out.mkdir(parents=True, exist_ok=True)
        report = {"losses": module.losses, "val_loss": val_loss, "samples": samples}
        (args.out / "losses.json").write_text(json.dumps(report))
        print(f"validation loss {val_loss:.4f} nats per character after {trainer.global_step} steps")
        for sample in samples:
            print(f"--- {sample}")


if __name__ == "__main__":
    main()
