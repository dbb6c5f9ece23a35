"""Rank functions around Hugging Face models in a pipeline: whose loss it is, what is refused, and Lightning."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import hf_models
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ascend_core import HybridConfig, ParallelModel, build_mesh, parallelize
from ascend_core.parallel import state
from lightning_ascend import AscendHybridStrategy

PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 4}


def spread(model: torch.nn.Module) -> ParallelModel:
    c = HybridConfig(**PP2)
    return parallelize(model, c, build_mesh(c, "cpu"))


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def refused(case: str) -> tuple[str, bool]:
    """What a case raises on this rank, and whether the model still evaluates afterwards like the unsplit one."""
    if case == "encoder-decoder":
        return error_of(lambda: spread(hf_models.t5()[0])), True
    reference, _ = hf_models.FAMILIES["Llama"]()
    model, inputs = hf_models.FAMILIES["Llama"]()
    if case == "config":
        model.config.output_hidden_states = True
        return error_of(lambda: spread(model)), True
    ours = spread(model)

    def own_loss(batch: Any, number: int) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def train(options: dict[str, Any]) -> str:
        return error_of(lambda: ours.forward_backward(lambda b, i: model(**b, **options).loss, inputs))

    if case == "own-loss":
        text = error_of(lambda: ours.forward_backward(own_loss, inputs))
    elif case == "num-items":
        batch = {**inputs, "num_items_in_batch": torch.tensor(50)}
        text = error_of(lambda: ours.forward_backward(lambda b, i: model(**b).loss, batch))
    elif case == "evaluation-cache":
        with torch.no_grad():
            text = error_of(lambda: model(**inputs, use_cache=True))
    else:
        text = train({case: True})
    with torch.no_grad():
        return text, bool(torch.allclose(model(**inputs).logits, reference(**inputs).logits, atol=1e-5))


def losses_of_all_kinds() -> dict[str, float]:
    """Largest gradient gap by kind of loss: own weights, a sum over the batch, and a microbatch without valid labels."""
    gaps: dict[str, float] = {}
    for kind in ("weights", "sum", "empty"):
        reference, inputs = hf_models.FAMILIES["Qwen3"]()
        model, _ = hf_models.FAMILIES["Qwen3"]()
        if kind == "empty":
            inputs["labels"][2:4] = -100
        count = int((inputs["labels"][:, 1:] != -100).sum())
        plain = reference(**inputs).loss
        plain.backward()
        ours = spread(model)
        if kind == "sum":
            loss, _ = ours.forward_backward(
                lambda b, i, m=model, n=count: m(**b, num_items_in_batch=n).loss, inputs, reduction="sum"
            )
        elif kind == "weights":
            loss, _ = ours.forward_backward(
                lambda b, i, m=model: own_loss(m, b), inputs, weight_fn=lambda b: int((b["labels"][:, 1:] != -100).sum())
            )
        else:
            loss, _ = ours.forward_backward(lambda b, i, m=model: m(**b).loss, inputs)
        grads = {n: p.grad for n, p in reference.named_parameters()}
        ours_grads = [(n, p.grad) for n, p in ours.named.items() if p.grad is not None]
        gaps[kind] = max(abs(float(loss) - plain.item()), *(float((g - grads[n]).abs().max()) for n, g in ours_grads))
    return gaps


def own_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def generated() -> tuple[list[list[int]], list[list[int]]]:
    """Greedy tokens of the split model and of the unsplit one."""
    reference, inputs = hf_models.FAMILIES["Llama, tied"]()
    model, _ = hf_models.FAMILIES["Llama, tied"]()
    spread(model)
    options = {"input_ids": inputs["input_ids"][:1, :4], "max_new_tokens": 5, "do_sample": False, "use_cache": False}
    model.eval()
    return model.generate(**options).tolist(), reference.eval().generate(**options).tolist()


def tied(config: dict[str, Any]) -> dict[str, Any]:
    """D25: five AdamW steps of a tied model, each of two accumulated batches, clipped to norm 1.

    Returns:
        Whether all copies of the tied weight were bit-equal after each step, the largest difference to one process in
        losses and norms (all ranks) and parameters (rank 0), and whether the checkpoint stores the weight once.
    """
    reference, inputs = hf_models.FAMILIES["Llama, tied"]()
    inputs["labels"] = inputs["input_ids"]  # every token counts, so that replicas weigh alike
    model, _ = hf_models.FAMILIES["Llama, tied"]()
    c = HybridConfig(**config)
    mesh = build_mesh(c, "cpu")
    ours = parallelize(model, c, mesh)
    name = next(n for n, p in reference.named_parameters() if p is reference.lm_head.weight)
    part = {k: v.chunk(mesh.size("dp"))[mesh.rank("dp")] for k, v in inputs.items()}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3, eps=1e-4) for m in (reference, ours)]
    result: dict[str, Any] = {"equal": True, "gap": 0.0}
    for _ in range(5):
        for micro in range(2):
            (reference(**inputs).loss / 2).backward()
            with contextlib.nullcontext() if micro else ours.no_sync():
                ours.forward_backward(lambda b, i: model(**b).loss, part, scale=0.5)
        ours.finish_gradients()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        result["gap"] = max(result["gap"], abs(float(norm) - float(ours.clip_grad_norm_(1.0))))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        copy = state.full_tensor(ours.named[name]) if name in ours.named else None
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, copy)
        assert all(c is not None for c in everyone), "both end stages hold the tied weight"
        result["equal"] &= all(torch.equal(everyone[0], c) for c in everyone)
    whole = ours.state_dict()
    if dist.get_rank() == 0:
        result["gap"] = max(result["gap"], *(float((whole[n] - t).abs().max()) for n, t in reference.state_dict().items()))
        result["once"] = whole["lm_head.weight"].data_ptr() == whole[name].data_ptr()
    return result


class LitLlama(pl.LightningModule):
    """What users write around a Hugging Face model."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.inputs = hf_models.FAMILIES["Llama, tied"]()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader:
        samples = [{k: v[i] for k, v in self.inputs.items()} for i in range(hf_models.BATCH)]
        return DataLoader(samples * 3, batch_size=hf_models.BATCH)

    val_dataloader = train_dataloader


def lightning(strategy: dict[str, Any] | None) -> dict[str, Any]:
    """Fit one epoch of three equal batches."""
    return fit(LitLlama(), strategy)


def fit(module: Any, strategy: dict[str, Any] | None) -> dict[str, Any]:
    """Fit one epoch; logged losses, validation loss, and whole parameters on rank 0."""
    chosen: Any = "auto" if strategy is None else AscendHybridStrategy(**strategy)
    devices = int(os.environ["WORLD_SIZE"])
    if strategy is None:
        for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
            os.environ.pop(key, None)
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=chosen, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module)
    whole = trainer.strategy.lightning_module_state_dict()
    val = float(trainer.callback_metrics["val_loss"])
    return {"losses": module.losses, "val": val, "state": {n: t.clone() for n, t in whole.items()}}
