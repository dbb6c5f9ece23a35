"""Whole state from a spread model, and back: what one process would have saved, in every layout.

Names, shapes and the order of parameters are those of the unsplit model. This is the form for single-file checkpoints;
sharded checkpoints have their own package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from ascend_core.errors import ModelError
from ascend_core.mesh import HybridMesh
from ascend_core.parallel.moe import ExpertList


def describe(model: nn.Module) -> tuple[list[str], list[str], dict[str, str]]:
    """State dict names, parameter names and ties of an unsplit model, for :class:`Names`."""
    entries = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    first: dict[int, str] = {}
    ties = {n: first[id(t)] for n, t in entries.items() if first.setdefault(id(t), n) != n}
    return list(entries), [n for n, _ in model.named_parameters()], ties


class Names:
    """Local parameter names to the unsplit model's names, in its order.

    Args:
        full: State dict names of the unsplit model, in order (tied names included).
        parameters: Its parameter names, in order (tied names once).
        ties: Further names of a tied tensor to its first name.
        root: The spread model.
    """

    def __init__(self, full: list[str], parameters: list[str], ties: Mapping[str, str], root: nn.Module) -> None:
        self.full, self.parameters, self.ties = full, parameters, ties
        self.parts: dict[str, tuple[str, int]] = {}
        self.fused: dict[str, tuple[str, ...]] = {}
        self.fused_dims: dict[str, int] = {}
        for prefix, module in root.named_modules():
            dot = f"{prefix}." if prefix else ""
            for name, parts in getattr(module, "fused_parameters", {}).items():
                self.fused[dot + name] = tuple(dot + p for p in parts)
                self.fused_dims[dot + name] = getattr(module, "fused_dims", {}).get(name, 0)
                self.parts.update({dot + p: (dot + name, i) for i, p in enumerate(parts)})
        self.expert_lists = tuple(f"{n}." for n, m in root.named_modules() if isinstance(m, ExpertList))

    def original(self, name: str) -> str:
        """The unsplit name of a local name."""
        return self.parts[name][0] if name in self.parts else name

    def merge(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Join the parts of fused tensors."""
        merged = {n: t for n, t in state.items() if n not in self.parts}
        for name, parts in self.fused.items():
            if parts[0] in state:
                merged[name] = torch.cat([state[p] for p in parts], dim=self.fused_dims[name])
        return merged

    def split(self, name: str, tensor: torch.Tensor, local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Cut a fused tensor into its parts; any other goes through."""
        if name not in self.fused:
            return {name: tensor}
        parts, dim = self.fused[name], self.fused_dims[name]
        return dict(zip(parts, tensor.split([local[p].shape[dim] for p in parts], dim=dim), strict=True))

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Sort names in the unsplit model's order."""
        position = {n: i for i, n in enumerate(self.full)}
        return sorted(names, key=lambda n: position.get(n, len(position)))


def reshard(root: nn.Module) -> None:
    """Make FSDP2 modules show their sharded parameters, whatever ran last."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor on the CPU. Communication: an all-gather for DTensors; all ranks of its mesh must call."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to("cpu", copy=True)


def gather_model(root: nn.Module, names: Names, mesh: HybridMesh) -> dict[str, torch.Tensor]:
    """Collect the unsplit model's state dict.

    Returns:
        On global rank 0 the whole state dict on the CPU; elsewhere an empty dict.

    Communication:
        All-gathers over ``tp``, ``dp_shard`` and ``ep``; one object gather to the first stage over ``pp``, and one over
        ``ep`` for experts in a list.
    """
    reshard(root)
    state = names.merge({n: full_tensor(t) for n, t in root.state_dict().items() if isinstance(t, torch.Tensor)})
    merged = _gather_stages(_with_expert_lists(state, names, mesh), mesh)
    merged.update({again: merged[first] for again, first in names.ties.items() if first in merged})  # stored once
    return {n: merged[n] for n in names.ordered(merged)} if dist.get_rank() == 0 else {}


def _with_expert_lists(tensors: dict[str, torch.Tensor], names: Names, mesh: HybridMesh) -> dict[str, torch.Tensor]:
    """Add the other ranks' experts of lists."""
    for part in _gather_expert_lists({n: t for n, t in tensors.items() if n.startswith(names.expert_lists)}, names, mesh):
        tensors = {**tensors, **part}
    return tensors


def _gather_expert_lists(mine: Any, names: Names, mesh: HybridMesh) -> list[Any]:
    """What the expert-parallel ranks of the first replicas have, on the first of them; nothing elsewhere."""
    if mesh.size("ep") == 1 or not names.expert_lists or mesh.rank("edp") or mesh.rank("tp"):
        return []
    first = mesh.rank("ep") == 0
    parts: list[Any] | None = [None] * mesh.size("ep") if first else None
    group = mesh.group("ep")
    dist.gather_object(mine, parts, dst=dist.get_process_group_ranks(group)[0], group=group)
    return parts or []


def gather_gradients(gradients: Mapping[str, torch.Tensor | None], names: Names, mesh: HybridMesh) -> dict[str, torch.Tensor]:
    """Collect finished gradients by the unsplit model's names; on global rank 0, those of this stage elsewhere.

    Communication:
        As :func:`gather_model`.
    """
    local = {n: full_tensor(g) for n, g in gradients.items() if g is not None}
    whole = _with_expert_lists(names.merge(local), names, mesh)
    return _gather_stages(whole, mesh)


def _gather_stages(state: dict[str, Any], mesh: HybridMesh) -> dict[str, Any]:
    if mesh.size("pp") == 1 or mesh.rank("dp") or mesh.rank("tp"):
        return state
    first = mesh.rank("pp") == 0
    parts: list[Any] | None = [None] * mesh.size("pp") if first else None
    dist.gather_object(state, parts, dst=mesh.pipeline_ranks()[0], group=mesh.group("pp"))
    merged: dict[str, Any] = {}
    for part in reversed(parts or []):
        merged.update(part)
    return merged


def load_model(root: nn.Module, names: Names, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Load an unsplit state dict into this rank's part.

    Args:
        root: The spread model.
        names: Its names.
        state: The whole state dict, on every rank.
        strict: Missing and unexpected names, judged against the unsplit model, are errors.

    Raises:
        ModelError: Names or shapes do not match.
    """
    reshard(root)
    missing, unexpected = set(names.full) - set(state), set(state) - set(names.full)
    if strict and (missing or unexpected):
        raise ModelError(
            f"The checkpoint does not match the model: missing {sorted(missing)[:5]}, unexpected {sorted(unexpected)[:5]}.",
            "Names are compared with those of the whole model.",
            "Load with strict=False, or use the model the checkpoint was saved from.",
        )
    local = {n: t for n, t in root.state_dict().items() if isinstance(t, torch.Tensor)}
    for name in dict.fromkeys(names.original(n) for n in local):
        if name in state:
            for part, value in names.split(name, state[name], local).items():
                _copy(part, local[part], value)


def _copy(name: str, target: torch.Tensor, value: torch.Tensor) -> None:
    if target.shape != value.shape:
        raise ModelError(f"{name}: the checkpoint has shape {tuple(value.shape)}, the model {tuple(target.shape)}.")
    with torch.no_grad():
        target.copy_(place_like(value, target))


def place_like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Shard a whole tensor like ``target``; without communication, since every rank has the whole value."""
    if not isinstance(target, DTensor):
        return value.to(target.device)
    device = target.to_local().device
    return distribute_tensor(
        value.to(device=device, dtype=target.dtype), target.device_mesh, target.placements, src_data_rank=None
    )


def gather_optimizer(
    optimizer: torch.optim.Optimizer, root: nn.Module, names: Names, mesh: HybridMesh, parameter_names: Mapping[int, str]
) -> dict[str, Any]:
    """Collect the unsplit optimizer's state dict, keyed by parameter name.

    torch's ``load_state_dict`` of one process reads it too: parameters are listed in the model's order.

    Args:
        optimizer: This rank's optimizer.
        root: The spread model.
        names: Its names.
        mesh: The mesh.
        parameter_names: ``id(parameter)`` to local name.

    Returns:
        On global rank 0 ``{"state": {name: {...}}, "param_groups": [...]}``; elsewhere empty containers.
    """
    reshard(root)
    state: dict[str, dict[str, torch.Tensor]] = {}
    groups = []
    for group in optimizer.param_groups:
        local = [parameter_names[id(p)] for p in group["params"]]
        fields: dict[str, dict[str, Any]] = {}
        for name, p in zip(local, group["params"], strict=True):
            for key, value in optimizer.state.get(p, {}).items():
                whole = full_tensor(value) if isinstance(value, torch.Tensor) else value
                fields.setdefault(key, {})[name] = whole
        for key, values in fields.items():
            per_tensor = {n: v for n, v in values.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
            rest = {names.original(n): v for n, v in values.items() if n not in per_tensor}
            for name, value in {**names.merge(per_tensor), **rest}.items():
                state.setdefault(name, {})[key] = value
        originals = list(dict.fromkeys(names.original(n) for n in local))
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": originals})
    experts = {n: s for n, s in state.items() if n.startswith(names.expert_lists)}
    others = _gather_expert_lists((experts, groups), names, mesh)[1:]
    whole = _merge([(state, groups), *others])
    parts = _gather_stages({f"{mesh.rank('pp')}": whole}, mesh)
    merged = _merge([(parts[k]["state"], parts[k]["param_groups"]) for k in sorted(parts, key=int)])
    if dist.get_rank() != 0:
        return {"state": {}, "param_groups": []}
    for group in merged["param_groups"]:
        group["params"] = names.ordered(group["params"])
    return merged


def _merge(parts: Iterable[tuple[dict[str, Any], list[dict[str, Any]]]]) -> dict[str, Any]:
    """Join states and parameter groups of several ranks."""
    merged_state: dict[str, Any] = {}
    merged_groups: list[dict[str, Any]] = []
    for part_state, part_groups in parts:
        for name, value in part_state.items():
            merged_state.setdefault(name, value)
        for i, group in enumerate(part_groups):
            if i == len(merged_groups):
                merged_groups.append(dict(group))
            else:
                known = merged_groups[i]["params"]
                merged_groups[i]["params"] = known + [p for p in group["params"] if p not in known]
    return {"state": merged_state, "param_groups": merged_groups}


def load_optimizer(
    optimizer: torch.optim.Optimizer, names: Names, state: Mapping[str, Any], parameter_names: Mapping[int, str]
) -> None:
    """Load a whole optimizer state dict into this rank's optimizer.

    Args:
        optimizer: This rank's optimizer.
        names: Names of the model.
        state: From :func:`gather_optimizer`, or a plain one-process state dict whose single group lists all parameters.
        parameter_names: ``id(parameter)`` to local name.

    Raises:
        ModelError: The groups do not match.
    """
    saved = _by_name(state, names)
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        raise ModelError(
            f"The checkpoint has {len(saved['param_groups'])} parameter groups, the optimizer {len(optimizer.param_groups)}.",
            "",
            "Build the optimizer as it was when the checkpoint was saved.",
        )
    for group, old in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({k: v for k, v in old.items() if k != "params"})
        locals_ = {parameter_names[id(p)]: p for p in group["params"]}
        for name, p in locals_.items():
            original = names.original(name)
            if original not in saved["state"]:
                continue
            entry = {}
            for key, value in saved["state"][original].items():
                entry[key] = _state_part(value, name, original, names, locals_, p)
            optimizer.state[p] = entry


def _state_part(
    value: Any, name: str, original: str, names: Names, locals_: Mapping[str, torch.Tensor], p: torch.Tensor
) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value.clone() if isinstance(value, torch.Tensor) else value
    part = names.split(original, value, locals_)[name]
    return place_like(part, p) if part.shape == p.shape else part.to(p.device)


def _by_name(state: Mapping[str, Any], names: Names) -> Mapping[str, Any]:
    keys = [k for g in state["param_groups"] for k in g["params"]]
    if not keys or isinstance(keys[0], str):
        return state
    parameters = names.parameters
    if len(state["param_groups"]) != 1 or len(keys) != len(parameters):
        raise ModelError(
            f"An optimizer checkpoint keyed by number, with {len(state['param_groups'])} groups and {len(keys)} parameters, "
            f"cannot be matched to the model's {len(parameters)} parameters.",
            "Numbers can be turned into names only for one group over all parameters.",
            "Resume it once with the layout it was saved from and save again.",
        )
    by_number = dict(zip(keys, parameters, strict=True))
    groups = [{**g, "params": [by_number[k] for k in g["params"]]} for g in state["param_groups"]]
    return {"state": {by_number[k]: v for k, v in state["state"].items()}, "param_groups": groups}
