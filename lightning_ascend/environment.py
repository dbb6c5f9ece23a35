"""The hybrid strategy's processes: checks before launch, process group, mesh, seeds, and who reads which data."""

from __future__ import annotations

import atexit
import importlib
import random
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ascend_core import binding, env
from ascend_core.config import HybridConfig
from ascend_core.device import BACKENDS, saturates
from ascend_core.errors import ConfigError
from ascend_core.mesh import HybridMesh, Layout, build_mesh
from lightning_ascend import checks, data, workers
from lightning_ascend._lightning import start_process_group, uses_distributed_sampler
from lightning_ascend.lengths import lengths_differ

_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


class EnvironmentMixin:
    """Starts the ranks and tells each what it reads."""

    config: HybridConfig
    _uneven: set[str]
    mesh: HybridMesh | None
    pipeline_module: str
    strategy_name: str
    _planned: Layout | None
    precision_plugin: Any

    @property
    def _namespace(self) -> str:
        """``lightning.pytorch`` or ``pytorch_lightning``."""
        base = next(c for c in type(self).__mro__ if c.__name__ == "DDPStrategy")
        return base.__module__.partition(".strategies")[0]

    @property
    def layout(self) -> Layout:
        """Axis sizes, once the processes have met."""
        assert self.mesh is not None
        return self.mesh.layout

    def _info(self, text: str) -> None:
        rank_zero = importlib.import_module(f"{self._namespace}.utilities.rank_zero")
        rank_zero.rank_zero_info(f"{self.strategy_name}: {text}")

    # ---- before and at the start

    def _configure_launcher(self) -> None:
        """Let the launcher check everything that one process can know, before it starts the others."""
        self._find_local_rank()
        super()._configure_launcher()  # type: ignore[misc]
        launcher: Any = self._launcher  # type: ignore[attr-defined]
        launch = launcher.launch

        def checked_launch(function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            self._check(trainer)
            return launch(function, *args, trainer=trainer, **kwargs)

        launcher.launch = checked_launch

    def _find_local_rank(self) -> None:
        """A foreign launcher may set RANK only; Lightning would take this process for the one that starts the others."""
        nodes, per_node = int(self.num_nodes), int(self.num_processes)  # type: ignore[attr-defined]
        world = env.read("WORLD_SIZE")
        started = env.read("RANK") is not None and world is not None and int(world) > 1
        if started and env.read("LOCAL_RANK") is None and not self.cluster_environment.creates_processes_externally:  # type: ignore[attr-defined]
            if world != nodes * per_node:
                raise ConfigError(
                    f"WORLD_SIZE={world}, but devices={per_node} x num_nodes={nodes} is {nodes * per_node}.",
                    "RANK and WORLD_SIZE say that a launcher started this process as one of several.",
                    "Set devices to the processes per node and num_nodes to the number of nodes.",
                )
            env.write("LOCAL_RANK", binding.local_rank(nodes))
        binding.check_local_rank(self.local_rank, per_node)  # type: ignore[attr-defined]

    def _check(self, trainer: Any) -> None:
        world_size = self.num_nodes * self.num_processes  # type: ignore[attr-defined]
        checks.check_precision(str(self.precision_plugin.precision), self.root_device.type)  # type: ignore[attr-defined]
        module = self.lightning_module  # type: ignore[attr-defined]
        if module is not None and not self._is_spread(module):  # type: ignore[attr-defined]
            self._planned = checks.check_module(module, self.config, world_size, self.pipeline_module)
            if trainer is not None:
                checks.check_trainer(trainer, self._planned, self._layer_sync)  # type: ignore[attr-defined]

    def _get_process_group_backend(self) -> str:
        given: str | None = self._process_group_backend  # type: ignore[attr-defined]
        return given or BACKENDS[self.root_device.type]  # type: ignore[attr-defined]

    def setup_distributed(self) -> None:
        """Start the process group, without binding it to a device: HCCL cannot split bound groups into mesh axes."""
        importlib.import_module(f"{_FABRIC[self._namespace]}.utilities.seed").reset_seed()
        self.set_world_ranks()  # type: ignore[attr-defined]
        backend = self._get_process_group_backend()
        vars(self)["_process_group_backend"] = backend
        start_process_group(_FABRIC[self._namespace], self.cluster_environment, backend, timeout=self._timeout)  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Start the process group and build the mesh."""
        super().setup_environment()  # type: ignore[misc]
        device = self.root_device  # type: ignore[attr-defined]
        if device.type != "cpu":
            atexit.register(_destroy_process_group)
        self._use_autocast_of(device)
        if self.mesh is None:
            layout = self._planned
            config = self.config.to_dict()
            if layout is not None:
                config["pipeline_parallel_size"] = layout.pp
            self.mesh = build_mesh(
                HybridConfig(**config),
                device.type,
                devices_per_node=self.num_processes,  # type: ignore[attr-defined]
            )
            self._agree_on_seed()
            overflow = "saturates" if saturates(device) else "gives infinities"
            where = f"HCCL; overflow {overflow}" if device.type == "npu" else "gloo, on the CPU"
            self._info(f"{self.mesh.layout} over {where}")
            self._warn_of_saturation(device)

    def _warn_of_saturation(self, device: torch.device) -> None:
        """Checks for infinite gradients, values and losses see nothing in that mode."""
        if saturates(device) and self.global_rank == 0:  # type: ignore[attr-defined]
            warnings.warn(
                f"{device} is in saturation mode: values that overflow become the largest number instead of infinity, NaN "
                "becomes 0, and checks of losses and gradients see neither. Gradient scalers read the device's overflow "
                "flag instead: torch.amp.GradScaler on each rank by itself, and torch_npu's from scale(loss) on, not in the "
                "forward pass. Set INF_NAN_MODE_ENABLE=1 and unset INF_NAN_MODE_FORCE_DISABLE; SoCs before Ascend910B1 have "
                "this mode only.",
                stacklevel=2,
            )

    def _use_autocast_of(self, device: torch.device) -> None:
        """Lightning builds mixed precision for cuda when it does not know the device; autocast would be off."""
        plugin = self.precision_plugin  # type: ignore[has-type]
        if getattr(plugin, "device", device.type) != device.type:
            self.precision_plugin = type(plugin)(precision=plugin.precision, device=device.type)

    def _agree_on_seed(self) -> None:
        """Without ``seed_everything`` each process has its own seed, and samplers of a replica would disagree."""
        assert self.mesh is not None
        if self.layout.pp == 1 and self.layout.tp == 1:
            return
        seed = [torch.initial_seed() % 2**32]
        dist.broadcast_object_list(seed, src=0)
        if seed[0] != torch.initial_seed() % 2**32:
            torch.manual_seed(seed[0])
            random.seed(seed[0])
            np.random.seed(seed[0])

    # ---- data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Ranks of one replica read the same samples."""
        if self.mesh is None:
            return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}  # type: ignore[attr-defined]
        return {"num_replicas": self.layout.dp, "rank": self.mesh.rank("dp")}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Check the loader's workers; with pipeline or tensor parallel, deal iterable datasets and seed workers by replica."""
        assert self.mesh is not None
        workers.check_workers(dataloader, self.root_device)  # type: ignore[attr-defined]
        trainer = self.lightning_module.trainer  # type: ignore[attr-defined]
        if self.layout.pp == 1 and self.layout.tp == 1:
            self._compare_lengths(dataloader, trainer)
            return dataloader
        if uses_distributed_sampler(trainer) and data.deal_iterable(dataloader, self.mesh):
            self._info(
                f"samples of the iterable dataset are dealt to {self.layout.dp} replicas in turn; "
                "use_distributed_sampler=False leaves them alone."
            )
        if env.read("PL_SEED_WORKERS"):
            seed = importlib.import_module(f"{_FABRIC[self._namespace]}.utilities.seed")
            data.seed_workers_by_replica(dataloader, seed.pl_worker_init_function, self.mesh)
        self._compare_lengths(dataloader, trainer)
        return dataloader

    def _compare_lengths(self, dataloader: Any, trainer: Any) -> None:
        """Agree on numbers of batches before the loop; ranks that end an evaluation early must not be needed by others."""
        assert self.mesh is not None
        kind = {"train": "training", "val": "validation"}.get(prefix := str(trainer.state.stage.dataloader_prefix), prefix)
        if lengths_differ(
            dataloader, self.mesh, training=prefix == "train", kind=kind, joint=self.config.expert_parallel_size > 1
        ):
            self._uneven.add(kind)


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
