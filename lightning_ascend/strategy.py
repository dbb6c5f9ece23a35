"""The hybrid strategy, free of any Lightning namespace: environment, set-up, and the hooks Lightning calls.

What happens inside a step is in :mod:`lightning_ascend.steps`. The thin classes per namespace put this mixin in front
of that namespace's ``DDPStrategy``.
"""

from __future__ import annotations

import atexit
import importlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ascend_core.config import HybridConfig
from ascend_core.config_file import resolve
from ascend_core.device import BACKENDS
from ascend_core.errors import ModelError
from ascend_core.mesh import HybridMesh, Layout, build_mesh
from ascend_core.parallel import ParallelModel, parallelize
from lightning_ascend import checks, data
from lightning_ascend._lightning import uses_distributed_sampler
from lightning_ascend.reduce import ReduceMixin
from lightning_ascend.state import StateMixin
from lightning_ascend.steps import StepMixin

_MARK = "_ascend_spread_by"


class HybridStrategyMixin(StepMixin, ReduceMixin, StateMixin):
    """Trains a LightningModule with pipeline x tensor x data parallel, its code unchanged.

    Args:
        config: A :class:`HybridConfig`, a mapping, or a YAML/JSON file; default: the file named by ``ASCEND_CONFIG``.
            A field given as an argument beats it.
        pipeline_module: Name of the submodule whose call is pipelined, e.g. ``"model"``; default: the one that holds
            the blocks.
        pipeline_parallel_size: See :class:`HybridConfig` for this and the following fields; None means not given.
        tensor_parallel_size: Ranks that share each layer's matrices.
        data_parallel_size: Replicas x shards.
        zero_stage: 0, 2 or 3.
        data_parallel_shard_size: Shards per replica group.
        expert_parallel_size: Not available yet.
        schedule: Pipeline schedule, torch's spelling.
        stages_per_rank: Stages each pipeline rank owns.
        num_microbatches: Microbatches of a local batch.
        sequence_parallel: Not available yet.
        tensor_parallel_plan: ``"auto"`` or ``{module glob: style}``.
        qkv_split: ``"column"`` or ``"heads"``.
        activation_checkpoint_blocks: Not available yet.
        compression: Not available yet.
        max_staleness: Not available yet.
        fused_kernels: ``"auto"`` or False.
        compile: Not available yet.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Set by the Trainer.
        precision_plugin: Set by the Trainer.
        process_group_backend: Default: ``cpu:gloo,npu:hccl`` on NPUs, ``gloo`` on CPUs.
        timeout: Of collectives.

    Raises:
        ConfigError: The configuration is wrong by itself.
    """

    strategy_name = "ascend_hybrid"

    def __init__(
        self,
        config: HybridConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        pipeline_module: str = "auto",
        pipeline_parallel_size: int | str | None = None,
        tensor_parallel_size: int | None = None,
        data_parallel_size: int | str | None = None,
        zero_stage: int | None = None,
        data_parallel_shard_size: int | str | None = None,
        expert_parallel_size: int | None = None,
        schedule: str | None = None,
        stages_per_rank: int | str | None = None,
        num_microbatches: int | str | None = None,
        sequence_parallel: bool | None = None,
        tensor_parallel_plan: str | Mapping[str, Any] | None = None,
        qkv_split: str | None = None,
        activation_checkpoint_blocks: int | None = None,
        compression: Any = None,
        max_staleness: int | None = None,
        fused_kernels: bool | str | None = None,
        compile: bool | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        given = {
            "pipeline_parallel_size": pipeline_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
            "data_parallel_size": data_parallel_size,
            "zero_stage": zero_stage,
            "data_parallel_shard_size": data_parallel_shard_size,
            "expert_parallel_size": expert_parallel_size,
            "schedule": schedule,
            "stages_per_rank": stages_per_rank,
            "num_microbatches": num_microbatches,
            "sequence_parallel": sequence_parallel,
            "tensor_parallel_plan": tensor_parallel_plan,
            "qkv_split": qkv_split,
            "activation_checkpoint_blocks": activation_checkpoint_blocks,
            "compression": compression,
            "max_staleness": max_staleness,
            "fused_kernels": fused_kernels,
            "compile": compile,
        }
        self.config = resolve(config, {k: v for k, v in given.items() if v is not None})
        self.pipeline_module = pipeline_module
        self.mesh: HybridMesh | None = None
        self.parallel: ParallelModel | None = None
        self._planned: Layout | None = None
        super().__init__(  # type: ignore[call-arg]
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

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

    # ---- environment

    def _configure_launcher(self) -> None:
        """Let the launcher check everything that one process can know, before it starts the others."""
        super()._configure_launcher()  # type: ignore[misc]
        launcher: Any = self._launcher  # type: ignore[has-type]
        launch = launcher.launch

        def checked_launch(function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            self._check(trainer)
            return launch(function, *args, trainer=trainer, **kwargs)

        launcher.launch = checked_launch

    def _check(self, trainer: Any) -> None:
        world_size = self.num_nodes * self.num_processes  # type: ignore[attr-defined]
        checks.check_precision(str(self.precision_plugin.precision))  # type: ignore[attr-defined]
        module = self.lightning_module  # type: ignore[attr-defined]
        if module is not None and not self._is_spread(module):
            self._planned = checks.check_module(module, self.config, world_size, self.pipeline_module)
            if trainer is not None:
                checks.check_trainer(trainer, self._planned, self._layer_sync)  # type: ignore[attr-defined]

    def _get_process_group_backend(self) -> str:
        given: str | None = self._process_group_backend  # type: ignore[attr-defined]
        return given or BACKENDS[self.root_device.type]  # type: ignore[attr-defined]

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
                HybridConfig(**config), device.type, devices_per_node=self.num_processes  # type: ignore[attr-defined]
            )
            self._agree_on_seed()
            rank_zero = importlib.import_module(f"{self._namespace}.utilities.rank_zero")
            backend = "HCCL" if device.type == "npu" else "gloo, on the CPU"
            rank_zero.rank_zero_info(f"{self.strategy_name}: {self.mesh.layout} over {backend}")

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

    # ---- model and optimizers

    def setup(self, trainer: Any) -> None:
        """Spread the module, then build optimizers over this rank's parameters."""
        self.accelerator.setup(trainer)  # type: ignore[attr-defined]
        fitting = str(trainer.state.fn.value) == "fit"
        module = self.lightning_module  # type: ignore[attr-defined]
        assert self.mesh is not None
        if not self._is_spread(module):
            checks.check_module(module, self.config, self.mesh.layout.world_size, self.pipeline_module)
            self._refuse_foreign(module)
            if self._layer_sync is not None and fitting:  # type: ignore[attr-defined]
                self.model = self._layer_sync.apply(module)  # type: ignore[attr-defined]
            self.precision_plugin.convert_module(module)
            self.parallel = parallelize(
                module,
                self.config,
                self.mesh,
                device=self.root_device,  # type: ignore[attr-defined]
                pipeline_module=self.pipeline_module,
                root_is_boundary=False,
            )
            if not self._is_plain:
                module.__dict__[_MARK] = self
        self._no_inference_mode(trainer)
        self._group_metrics(module)
        if fitting:
            self._setup_optimizers_together(trainer)
        self.setup_precision_plugin()  # type: ignore[attr-defined]
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm
        self.precision_plugin.clip_grad_by_value = self._clip_by_value
        self._checked_batch = False

    @property
    def _is_plain(self) -> bool:
        """Every rank holds the whole model (pure data parallel without sharding)."""
        return self.layout.pp == 1 and self.layout.tp == 1 and self.config.zero_stage == 0

    def _is_spread(self, module: Any) -> bool:
        return self.parallel is not None and self.parallel.module is module

    def _refuse_foreign(self, module: Any) -> None:
        if module.__dict__.get(_MARK) not in (None, self):
            raise ModelError(
                f"This {type(module).__name__} was already split by another Trainer's strategy.",
                "Each rank holds only its part of it.",
                "Reuse that Trainer, or build the module anew and load its checkpoint.",
            )

    def _setup_optimizers_together(self, trainer: Any) -> None:
        """Run ``configure_optimizers``; an error on one stage (an empty parameter list) is raised on all ranks."""
        error: Exception | None = None
        try:
            self.setup_optimizers(trainer)  # type: ignore[attr-defined]
            checks.check_optimizers(self.optimizers, self.layout)  # type: ignore[attr-defined]
            for optimizer in self.optimizers:  # type: ignore[attr-defined]
                assert self.parallel is not None
                self.parallel.check_optimizer(optimizer)
        except Exception as caught:  # raised again below, once every rank knows
            error = caught
        everyone: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(everyone, None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [f"rank {r}: {e}" for r, e in enumerate(everyone) if e is not None]
        if failed:
            raise ModelError(
                f"configure_optimizers failed on another rank ({failed[0]}).",
                "Each rank sees only the parameters of its pipeline stage.",
                "Give the optimizer parameters that exist on every stage, for example all of self.parameters().",
            )

    def _no_inference_mode(self, trainer: Any) -> None:
        """FSDP2 and DTensor parameters must not be touched in inference mode, or training breaks after validation."""
        loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
        for loop in loops:
            loop.inference_mode = False

    def _group_metrics(self, module: Any) -> None:
        """Metrics are equal on pipeline and tensor ranks; reduce them over replicas only."""
        if self.layout.pp == 1 and self.layout.tp == 1:
            return
        torchmetrics = importlib.import_module("torchmetrics")
        for child in module.modules():
            if isinstance(child, torchmetrics.Metric):
                child.process_group = self.mesh.group("dp") if self.mesh else None

    def model_to_device(self) -> None:
        """Nothing: the spread model is on its device."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build modules on the CPU: the whole model need not fit one NPU."""
        with self.precision_plugin.tensor_init_context():
            yield

    # ---- data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Ranks of one replica read the same samples."""
        if self.mesh is None:
            return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}  # type: ignore[attr-defined]
        return {"num_replicas": self.layout.dp, "rank": self.mesh.rank("dp")}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Deal iterable datasets and seed workers by replica, when pipeline or tensor parallel is on."""
        assert self.mesh is not None
        if self.layout.pp == 1 and self.layout.tp == 1:
            return dataloader
        trainer = self.lightning_module.trainer  # type: ignore[attr-defined]
        if uses_distributed_sampler(trainer) and data.deal_iterable(dataloader, self.mesh):
            rank_zero = importlib.import_module(f"{self._namespace}.utilities.rank_zero")
            rank_zero.rank_zero_info(
                f"{self.strategy_name}: samples of the iterable dataset are dealt to {self.layout.dp} replicas in turn; "
                "use_distributed_sampler=False leaves them alone."
            )
        from ascend_core import env

        if env.read("PL_SEED_WORKERS"):
            seed = importlib.import_module(f"{self._fabric_namespace}.utilities.seed")
            data.seed_workers_by_replica(dataloader, seed.pl_worker_init_function, self.mesh)
        return dataloader

    @property
    def _fabric_namespace(self) -> str:
        return {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}[self._namespace]

    def teardown(self) -> None:
        """Keep a split model where it is: moving parts of it to the CPU would leave it useless."""
        if self.parallel is None or self._is_plain:
            super().teardown()  # type: ignore[misc]
            return
        self.cluster_environment.teardown()  # type: ignore[attr-defined]
        self.precision_plugin.teardown()
        self.accelerator.teardown()  # type: ignore[attr-defined]
        self.checkpoint_io.teardown()  # type: ignore[attr-defined]

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: :mod:`lightning_ascend._boot` registers the name."""


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
