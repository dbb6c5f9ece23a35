"""Find a tensor-parallel plan by running the blocks, and prove each split before it is used.

A dry run of a block shows in which order it calls its projections. Projections followed by another are a candidate
region; it is split (columns stay on their rank between them) only if a second dry run shows that the pieces put together
are exactly the unsplit values (:mod:`ascend_core.parallel.tp_proof`). Projections that are in no such region, but are
known by name or by the model's own plan, are sharded with their activations gathered, which is right for any code and
saves the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.parallel.block_inputs import BlockInput, plain_input
from ascend_core.parallel.dry_run import signature
from ascend_core.parallel.hf_plans import declared_styles
from ascend_core.parallel.projections import as_projection
from ascend_core.parallel.tp_proof import Proof, called_projections, prove_split
from ascend_core.parallel.tp_styles import SplitRegion, TensorPlan

_COLUMNS = frozenset(
    "q_proj k_proj v_proj wq wk wv query key value to_q to_k to_v q k v gate_proj up_proj w1 w3 wi wi_0 wi_1 up c_fc fc1 fc_in "
    "linear1 dense_h_to_4h qkv c_attn wqkv Wqkv query_key_value qkv_proj in_proj gate_up_proj".split()
)
_ROWS = frozenset(
    "o_proj out_proj wo c_proj proj to_out dense o out down_proj down w2 fc2 fc_out linear2 dense_4h_to_h".split()
)
_ATTENTION = frozenset("q_proj wq query to_q q qkv c_attn wqkv Wqkv query_key_value qkv_proj in_proj".split())
_LONGEST_REGION = 4


@dataclass(frozen=True)
class _BlockPlan:
    plan: TensorPlan
    proofs: tuple[tuple[str, Proof], ...]
    gathered: tuple[str, ...]


def auto_plan(
    root: nn.Module,
    block_names: list[str],
    tp_size: int,
    *,
    qkv_split: str = "column",
    inputs: Mapping[str, BlockInput] | None = None,
) -> TensorPlan:
    """Plan every block of a model, and its embedding and head if the model's own plan names them.

    Args:
        root: The model; blocks of other stages may be hollow and are passed over.
        block_names: Names of the local blocks.
        tp_size: Tensor-parallel ranks.
        qkv_split: ``"heads"`` refuses attention that can only be gathered.
        inputs: What the blocks are called with, from :func:`record_block_inputs`.

    Returns:
        The plan. Head counts and widths are divided on the modules that are split by heads.

    Raises:
        ConfigError: A block in which nothing can be split, or attention that only gathers under ``"heads"``.
    """
    declared = declared_styles(root)
    plan = TensorPlan()
    known: dict[Any, _BlockPlan] = {}
    for name in block_names:
        block = root.get_submodule(name)
        if not any(True for _ in block.parameters()):
            continue
        kind = signature(block)
        if kind not in known:
            known[kind] = _plan_block(block, (inputs or {}).get(name), tp_size, _below(declared, name))
        found = known[kind]
        _check(found, block, name, tp_size, qkv_split)
        for scope, proof in found.proofs:
            for attribute, value in proof.attributes.items():
                setattr(block.get_submodule(scope), attribute, value)
        plan.add(found.plan, name)
    if not plan.styles:
        raise ConfigError(
            f"tensor_parallel_size={tp_size}, but no block has anything to split.",
            "Running it would repeat the same work on every tensor-parallel rank.",
            "Give a tensor_parallel_plan, or set tensor_parallel_size=1.",
        )
    plan.styles.update(_around(root, block_names, declared, tp_size))
    return plan


def _check(found: _BlockPlan, block: nn.Module, name: str, tp_size: int, qkv_split: str) -> None:
    plain = not any(True for _ in block.children())  # a lone Linear or activation (a child of an nn.Sequential)
    if not found.plan.styles and not plain and any(as_projection(m) is not None for m in block.modules()):
        raise ConfigError(
            f"No tensor-parallel plan was found for block {name!r} ({type(block).__name__}).",
            "None of its projections has a name or a shape that is known.",
            "Give tensor_parallel_plan={'*.my_linear': 'colwise', ...}; see docs/tensor_parallel.md.",
        )
    if qkv_split == "heads" and any(g.rpartition(".")[2] in _ATTENTION for g in found.gathered):
        raise ConfigError(
            f"qkv_split='heads': the attention of block {name!r} cannot be split by heads over {tp_size} ranks.",
            "Its heads do not divide, or its code depends on the full width.",
            "Use qkv_split='column', which shards the weights and gathers the activations.",
        )


def _known_layer(block: nn.Module) -> TensorPlan | None:
    attention = ["self_attn"] if isinstance(block, nn.TransformerEncoderLayer) else []
    if isinstance(block, nn.TransformerDecoderLayer):
        attention = ["self_attn", "multihead_attn"]
    if not attention:
        return None
    styles = {**dict.fromkeys(attention, "attention"), "linear1": "colwise", "linear2": "rowwise"}
    return TensorPlan(dict(styles), [SplitRegion(("linear1",), "linear2", "")])


def _plan_block(block: nn.Module, given: BlockInput | None, tp_size: int, declared: Mapping[str, str]) -> _BlockPlan:
    known = _known_layer(block)
    if known is not None:
        return _BlockPlan(known, (), ())
    plan, proofs = TensorPlan(), []
    given = given or plain_input(block)
    device = next(block.parameters()).device
    given = given.to(device) if given is not None else None
    called = called_projections(block, given) if given is not None else None
    first = 0
    while given is not None and called is not None and first < len(called) - 1:
        found = _region_at(block, given, called, first, tp_size)
        if found is None:
            first += 1
            continue
        last, proof = found
        columns, row = tuple(called[first:last]), called[last]
        scope = columns[0].rpartition(".")[0]
        plan.styles.update({**proof.styles, row: "rowwise"})
        plan.regions.append(SplitRegion(columns, row, scope))
        plan.summed += proof.summed
        proofs.append((scope, proof))
        first = last + 1
    gathered = _gathered(block, plan, declared)
    plan.styles.update(gathered)
    return _BlockPlan(plan, tuple(proofs), tuple(n for n, s in gathered.items() if s == "colwise_gather"))


def _region_at(block: nn.Module, given: BlockInput, called: list[str], first: int, size: int) -> tuple[int, Proof] | None:
    for last in range(first + 1, min(first + _LONGEST_REGION, len(called))):
        proof = prove_split(block, given, tuple(called[first:last]), called[last], size)
        if proof is not None:
            return last, proof
    return None


def _gathered(block: nn.Module, plan: TensorPlan, declared: Mapping[str, str]) -> dict[str, str]:
    styles: dict[str, str] = {}
    for name, module in block.named_modules():
        if as_projection(module) is None or name in plan.styles:
            continue
        leaf, style = name.rpartition(".")[2], declared.get(name, "")
        if leaf in _COLUMNS or "col" in style:
            styles[name] = "colwise_gather"
        elif leaf in _ROWS or "row" in style:
            styles[name] = "rowwise_split"
    for name, module in block.named_modules():
        if isinstance(module, nn.Sequential) and not styles and not plan.styles:
            linears = [f"{name}.{n}" if name else n for n, m in module.named_children() if as_projection(m) is not None]
            if len(linears) == 2:
                styles.update({linears[0]: "colwise_gather", linears[1]: "rowwise_split"})
    return styles


def _around(root: nn.Module, block_names: list[str], declared: Mapping[str, str], size: int) -> dict[str, str]:
    """Styles of embedding and head that the model's own plan names and that fit."""
    styles = {}
    for name, style in declared.items():
        if style not in ("embedding", "colwise_gather") or any(name.startswith(f"{b}.") for b in block_names):
            continue
        module = root.get_submodule(name)
        if style == "embedding":
            fits = type(module).forward is nn.Embedding.forward and module.num_embeddings % size == 0  # type: ignore[operator]
        else:
            projection = as_projection(module)
            fits = projection is not None and projection.out_features % size == 0
        if fits:
            styles[name] = style
    return _without_half_ties(root, styles)


def _without_half_ties(root: nn.Module, styles: dict[str, str]) -> dict[str, str]:
    """Drop modules that share a weight with one that is not split."""
    holders: dict[int, list[str]] = {}
    for name, module in root.named_modules():
        for p in module.parameters(recurse=False):
            holders.setdefault(id(p), []).append(name)
    halves = {n for names in holders.values() if len(names) > 1 and not all(n in styles for n in names) for n in names}
    return {n: s for n, s in styles.items() if n not in halves}


def _below(styles: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {n[len(prefix) + 1 :]: s for n, s in styles.items() if n.startswith(f"{prefix}.")}
