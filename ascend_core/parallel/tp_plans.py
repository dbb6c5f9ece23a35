"""Find a tensor-parallel plan by looking at the blocks, and prove each split before it is used.

Candidates come from the names that model families use for their projections. A candidate is split (columns stay on
their rank between the two projections) only if a dry run of the block shows that the pieces put together are exactly
the unsplit values; otherwise the same weights are sharded but the activations in between are gathered, which is right
for any code and saves the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ascend_core.errors import ConfigError

_COLUMNS = tuple(
    tuple(names.split())
    for names in (
        "q_proj k_proj v_proj",
        "wq wk wv",
        "query key value",
        "to_q to_k to_v",
        "q k v",
        "gate_proj up_proj",
        "w1 w3",
        *"up_proj up c_fc fc1 fc_in linear1 wi dense_h_to_4h".split(),
    )
)
_FUSED = ("qkv", "c_attn", "wqkv", "Wqkv", "query_key_value", "qkv_proj", "in_proj")
_ROWS = tuple("o_proj out_proj wo c_proj proj to_out dense o out down_proj down w2 fc2 fc_out linear2 dense_4h_to_h".split())
_HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads", "num_key_value_heads", "n_kv_heads")


@dataclass(frozen=True)
class Candidate:
    """Projections into and out of one region of a block.

    Attributes:
        parent: Name of the module that holds them, relative to the block.
        columns: Their names, relative to the parent.
        row: Name of the projection out.
        fused: The column projection holds q, k and v.
    """

    parent: str
    columns: tuple[str, ...]
    row: str
    fused: bool


def auto_plan(root: nn.Module, block_names: list[str], tp_size: int, *, qkv_split: str = "column") -> dict[str, Any]:
    """Plan every block of a model.

    Args:
        root: The model; blocks of other stages may be hollow and are passed over.
        block_names: Names of the local blocks.
        tp_size: Tensor-parallel ranks.
        qkv_split: ``"heads"`` refuses attention that can only be gathered.

    Returns:
        Module name to style. Attributes that count heads are divided on the modules that are split by heads.

    Raises:
        ConfigError: A block in which nothing can be split, or attention that only gathers under ``"heads"``.
    """
    plan: dict[str, Any] = {}
    for name in block_names:
        block = root.get_submodule(name)
        if not any(True for _ in block.parameters()):
            continue
        found = _known_layer(block) or _plan_block(block, tp_size, qkv_split, name)
        if not found and any(isinstance(m, nn.Linear) for m in block.modules()) and not _is_plain(block):
            raise ConfigError(
                f"No tensor-parallel plan was found for block {name!r} ({type(block).__name__}).",
                "None of its projections has a name or a shape that is known.",
                "Give tensor_parallel_plan={'*.my_linear': 'colwise', ...}; see docs/tensor_parallel.md.",
            )
        plan.update({f"{name}.{k}" if k else name: v for k, v in found.items()})
    if not plan:
        raise ConfigError(
            f"tensor_parallel_size={tp_size}, but no block has anything to split.",
            "Running it would repeat the same work on every tensor-parallel rank.",
            "Give a tensor_parallel_plan, or set tensor_parallel_size=1.",
        )
    return plan


def _is_plain(block: nn.Module) -> bool:
    """A lone Linear or activation (a child of an nn.Sequential) is no region that could be split."""
    return not any(True for _ in block.children())


def _known_layer(block: nn.Module) -> dict[str, Any]:
    if isinstance(block, nn.TransformerEncoderLayer):
        return {"self_attn": "attention", "linear1": "colwise", "linear2": "rowwise"}
    if isinstance(block, nn.TransformerDecoderLayer):
        return {"self_attn": "attention", "multihead_attn": "attention", "linear1": "colwise", "linear2": "rowwise"}
    return {}


def _plan_block(block: nn.Module, tp_size: int, qkv_split: str, block_name: str) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for candidate in _candidates(block):
        prefix = f"{candidate.parent}." if candidate.parent else ""
        split = _split_works(block, candidate, tp_size)
        if not split and qkv_split == "heads" and (candidate.fused or len(candidate.columns) == 3):
            raise ConfigError(
                f"qkv_split='heads': the attention of block {block_name!r} cannot be split by heads over {tp_size} ranks.",
                "Its heads do not divide, or its code depends on the full width.",
                "Use qkv_split='column', which shards the weights and gathers the activations.",
            )
        for column in candidate.columns:
            plan[prefix + column] = ("fused_colwise" if candidate.fused else "colwise") if split else "colwise_gather"
        plan[prefix + candidate.row] = "rowwise" if split else "rowwise_split"
    return plan


def _candidates(block: nn.Module) -> Iterator[Candidate]:
    for parent_name, parent in block.named_modules():
        linears = {n: m for n, m in parent.named_children() if isinstance(m, nn.Linear)}
        if isinstance(parent, nn.Sequential):
            if len(linears) == 2:
                first, second = linears
                if linears[first].out_features == linears[second].in_features:
                    yield Candidate(parent_name, (first,), second, fused=False)
            continue
        row = next((n for n in _ROWS if n in linears), None)
        if row is None:
            continue
        fused = next((n for n in _FUSED if n in linears and linears[n].out_features == 3 * linears[row].in_features), None)
        columns = next((c for c in _COLUMNS if all(n in linears for n in c) and row not in c), None)
        if fused is not None:
            yield Candidate(parent_name, (fused,), row, fused=True)
        elif columns is not None:
            yield Candidate(parent_name, columns, row, fused=False)


class _SeenError(Exception):
    """Carries the row projection's input out of a dry run."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value


def _split_works(block: nn.Module, candidate: Candidate, tp_size: int) -> bool:
    """Dry-run the block whole and in pieces; leave head counts divided if that is what makes the pieces right."""
    parent = block.get_submodule(candidate.parent)
    columns = [parent.get_submodule(n) for n in candidate.columns]
    row = parent.get_submodule(candidate.row)
    parts = 3 if candidate.fused else 1
    if any(int(c.out_features) % (parts * tp_size) for c in columns) or int(row.in_features) % tp_size:  # type: ignore[arg-type]
        return False
    if any(True for _ in parent.parameters(recurse=False)):
        return False  # a bare parameter between the projections would get a partial gradient
    weight: Any = columns[0].weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, weight.shape[1], generator=generator).to(weight)
    outputs = [torch.randn(2, 6, int(c.out_features), generator=generator).to(x) for c in columns]  # type: ignore[arg-type]
    counts = {n: v for n in _HEAD_COUNTS if isinstance(v := getattr(parent, n, None), int)}
    whole = _row_input(block, parent, columns, row, x, outputs)
    if whole is None:
        return False
    for divided in [{}, {n: v // tp_size for n, v in counts.items() if v % tp_size == 0}] if counts else [{}]:
        pieces = []
        for rank in range(tp_size):
            local = [_columns_of(o, rank, tp_size, parts) for o in outputs]
            with _attributes(parent, divided):
                pieces.append(_row_input(block, parent, columns, row, x, local))
        if all(p is not None for p in pieces):
            joined = torch.cat([p for p in pieces if p is not None], dim=-1)
            if joined.shape == whole.shape and torch.allclose(joined, whole, rtol=1e-4, atol=1e-5):
                for name, value in divided.items():
                    setattr(parent, name, value)
                return True
    return False


def _columns_of(output: torch.Tensor, rank: int, tp_size: int, parts: int) -> torch.Tensor:
    return torch.cat([part.chunk(tp_size, dim=-1)[rank] for part in output.chunk(parts, dim=-1)], dim=-1)


def _row_input(
    block: nn.Module, parent: nn.Module, columns: list[nn.Module], row: nn.Module, x: torch.Tensor, outputs: list[torch.Tensor]
) -> torch.Tensor | None:
    """Run a block with the columns' outputs replaced; return what reaches the row projection, None if it cannot be told."""
    started = [False]
    between: list[nn.Module] = []

    def replace(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> torch.Tensor:
            started[0] = True
            return outputs[index]

        return hook

    def stop(module: nn.Module, args: Any) -> None:
        raise _SeenError(args[0])

    def watch(module: nn.Module, args: Any) -> None:
        if started[0] and any(True for _ in module.parameters(recurse=False)):
            between.append(module)

    hooks = [c.register_forward_hook(replace(i)) for i, c in enumerate(columns)]
    hooks += [row.register_forward_pre_hook(stop)]
    inside = [m for m in block.modules() if m is not row and m not in columns]
    hooks += [m.register_forward_pre_hook(watch) for m in inside]
    modes = {m: m.training for m in block.modules()}
    block.eval()
    try:
        with torch.no_grad():
            block(x)
    except _SeenError as seen:
        return None if between else seen.value
    except Exception:  # noqa: BLE001 - any failure of the dry run means: not proven, so the split is not used
        return None
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return None


@contextmanager
def _attributes(module: nn.Module, values: dict[str, int]) -> Iterator[None]:
    saved = {n: getattr(module, n) for n in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)
