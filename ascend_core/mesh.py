"""From sizes to ranks: the layout of a world, and its DeviceMesh.

Axes, outermost first: ``pp``, ``dp_replicate``, ``dp_shard``, ``tp``. Tensor parallel is innermost, so that its ranks
are neighbours on one node; pipeline stages are outermost, so that they spread over nodes. The axis ``ep`` of expert
parallel is borrowed from data parallel: neighbours on ``dp`` share the experts, and ``edp`` counts the copies of each
expert. *Axis* always means a mesh axis here, *dim* a tensor dimension.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ascend_core import _shim, binding
from ascend_core.config import HybridConfig
from ascend_core.device import current_device
from ascend_core.errors import ConfigError
from ascend_core.schedule_rules import check_microbatches

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class Layout:
    """Sizes of the four axes, whose product is the world size, and of the expert-parallel axis inside ``dp``."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    ep: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel size: replicas x shards, the number of different batches per step."""
        return self.dp_replicate * self.dp_shard

    @property
    def edp(self) -> int:
        """Copies of each expert: the data-parallel size of expert parameters."""
        return self.dp // self.ep

    def __str__(self) -> str:
        """One line for logs."""
        experts = f", experts over {self.ep}" if self.ep > 1 else ""
        return f"pp={self.pp} x dp={self.dp} ({self.dp_replicate} replicas x {self.dp_shard} shards{experts}) x tp={self.tp}"


def resolve_layout(config: HybridConfig, world_size: int, num_blocks: int | None = None) -> Layout:
    """Find the axis sizes for a world.

    Args:
        config: The configuration, which may say ``"auto"``.
        world_size: Number of ranks.
        num_blocks: Blocks of the model, needed for ``pipeline_parallel_size="auto"``.

    Returns:
        The layout.

    Raises:
        ConfigError: The sizes do not multiply to the world size.
    """
    tp = config.tensor_parallel_size
    pp = config.pipeline_parallel_size
    if pp == "auto":
        pp = _auto_pipeline(config, world_size, num_blocks)
    model_size = int(pp) * tp
    if world_size % model_size:
        raise ConfigError(
            f"World size {world_size} does not factor into pipeline_parallel_size {pp} x tensor_parallel_size {tp}.",
            f"pp x tp is {model_size}, and {world_size} is not a multiple of it.",
            f"Start a multiple of {model_size} processes, or change the sizes.",
        )
    dp = world_size // model_size
    if config.data_parallel_size != "auto" and config.data_parallel_size != dp:
        raise ConfigError(
            f"data_parallel_size {config.data_parallel_size} x pp {pp} x tp {tp} = "
            f"{int(config.data_parallel_size) * model_size}, but the world size is {world_size}.",
            "The sizes of all axes multiply to the number of processes.",
            f"Set data_parallel_size to {dp} or 'auto', or start another number of processes.",
        )
    shard = config.data_parallel_shard_size
    shard = (dp if config.zero_stage else 1) if shard == "auto" else int(shard)
    if dp % shard:
        raise ConfigError(
            f"data_parallel_shard_size {shard} does not divide the data-parallel size {dp}.", "", "Choose a divisor of it."
        )
    ep = config.expert_parallel_size
    if dp % ep:
        raise ConfigError(
            f"expert_parallel_size {ep} does not divide the data-parallel size {dp}.",
            "Experts are spread over ranks of the data-parallel axis.",
            "Choose a divisor of it, or start another number of processes.",
        )
    return Layout(pp=int(pp), dp_replicate=dp // shard, dp_shard=shard, tp=tp, ep=ep)


def _auto_pipeline(config: HybridConfig, world_size: int, num_blocks: int | None) -> int:
    if num_blocks is None:
        raise ConfigError(
            "pipeline_parallel_size='auto' needs the model's blocks before the processes meet.",
            "The model is only built later (configure_model), so its blocks cannot be counted yet.",
            "Give a number.",
        )
    most = num_blocks // config.num_stages_per_rank
    ranks = world_size // config.tensor_parallel_size
    pp = max((p for p in range(1, most + 1) if ranks % p == 0), default=1)
    if config.num_microbatches != "auto":
        check_microbatches(config.schedule, pp, int(config.num_microbatches))
    return pp


@dataclass(frozen=True)
class HybridMesh:
    """The DeviceMesh of a layout, and this rank's place in it.

    Attributes:
        layout: Axis sizes.
        device_mesh: Four axes, for tensor parallel and FSDP2.
        merged: Three axes ``pp``, ``dp``, ``tp``: the same ranks with replicas and shards as one axis.
        experts: Four axes ``pp``, ``edp``, ``ep``, ``tp``: the same ranks as expert parameters see them; None without
            expert parallel.
    """

    layout: Layout
    device_mesh: DeviceMesh
    merged: DeviceMesh
    experts: DeviceMesh | None = None

    @property
    def device_type(self) -> str:
        """``npu`` or ``cpu``."""
        return self.device_mesh.device_type

    def rank(self, axis: str) -> int:
        """This rank's coordinate on an axis (``pp``, ``dp``, ``dp_replicate``, ``dp_shard``, ``ep``, ``edp``, ``tp``)."""
        return self._mesh_of(axis).get_local_rank(axis)

    def size(self, axis: str) -> int:
        """Number of ranks on an axis."""
        return int(getattr(self.layout, axis))

    def group(self, axis: str) -> dist.ProcessGroup:
        """Process group of the ranks that differ from this one on ``axis`` only."""
        return self._mesh_of(axis).get_group(axis)

    def _mesh_of(self, axis: str) -> DeviceMesh:
        if axis in ("ep", "edp"):
            assert self.experts is not None, "no expert parallel"
            return self.experts
        return self.merged if axis == "dp" else self.device_mesh

    def pipeline_ranks(self) -> list[int]:
        """Global ranks of this rank's pipeline, first stage first."""
        return dist.get_process_group_ranks(self.group("pp"))

    def data_mesh(self) -> DeviceMesh:
        """The mesh FSDP2 shards over: one axis, or replicas x shards for HSDP."""
        if self.layout.dp_replicate > 1:
            return self.device_mesh["dp_replicate", "dp_shard"]
        return self.device_mesh["dp_shard"]


def build_mesh(
    config: HybridConfig,
    device_type: str,
    *,
    world_size: int | None = None,
    devices_per_node: int | None = None,
    num_blocks: int | None = None,
) -> HybridMesh:
    """Create the mesh of the running process group.

    Args:
        config: The configuration.
        device_type: ``npu`` or ``cpu``.
        world_size: Ranks; default: those of the process group.
        devices_per_node: Ranks on one node, to check that tensor-parallel groups stay inside nodes.
        num_blocks: Blocks of the model, for ``pipeline_parallel_size="auto"``.

    Returns:
        The mesh.

    Raises:
        ConfigError: The sizes do not multiply to the world size.
        DeviceError: Two ranks are bound to one NPU.

    Communication:
        On NPUs, one object all-gather over the world. Creates process groups; every rank must call it.
    """
    world_size = dist.get_world_size() if world_size is None else world_size
    layout = resolve_layout(config, world_size, num_blocks)
    warn_across_nodes(layout, devices_per_node)
    if device_type == "npu":
        binding.check_distinct(current_device("npu"))
    _shim.forget_meshes()
    shape = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
    device_mesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    merged = init_device_mesh(device_type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))
    experts = None
    if layout.ep > 1:
        shape = (layout.pp, layout.edp, layout.ep, layout.tp)
        experts = init_device_mesh(device_type, shape, mesh_dim_names=("pp", "edp", "ep", "tp"))
    return HybridMesh(layout, device_mesh, merged, experts)


def warn_across_nodes(layout: Layout, devices_per_node: int | None) -> None:
    """Warn when a tensor-parallel group spans nodes: it works, but every layer then waits for the slow links."""
    if devices_per_node and layout.tp > 1 and devices_per_node % layout.tp:
        warnings.warn(
            f"tensor_parallel_size {layout.tp} does not divide the {devices_per_node} devices of a node: some "
            "tensor-parallel groups span nodes, and every layer then communicates over the slow links. "
            "Choose a size that divides the devices of a node.",
            stacklevel=3,
        )
