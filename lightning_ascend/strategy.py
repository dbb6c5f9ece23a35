"""The hybrid strategy, free of any Lightning namespace: its arguments, and setting up model and optimizers.

Processes and data are in :mod:`lightning_ascend.environment`, steps in :mod:`lightning_ascend.steps`. The thin classes
per namespace put this mixin in front of that namespace's ``DDPStrategy``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ascend_core.config import HybridConfig, resolve
from ascend_core.device import check_recomputation
from ascend_core.errors import ModelError
from ascend_core.mesh import HybridMesh, Layout
from ascend_core.parallel import ParallelModel, parallelize
from ascend_core.parallel.failures import gather_errors
from lightning_ascend import checks
from lightning_ascend.environment import EnvironmentMixin
from lightning_ascend.reduce import ReduceMixin
from lightning_ascend.state import StateMixin
from lightning_ascend.steps import StepMixin

_MARK = "_ascend_spread_by"


class HybridStrategyMixin(EnvironmentMixin, StepMixin, ReduceMixin, StateMixin):
    """Trains a LightningModule with pipeline x tensor x data parallel, its code unchanged.

    Args:
        config: A :class:`HybridConfig`, a mapping, or a YAML/JSON file; default: the file named by ``ASCEND_CONFIG``.
            A field given as an argument beats it.
        pipeline_module: Name of the submodule whose call is pipelined, e.g. ``"model"``; default: the one that holds
            the blocks.
        pipeline_parallel_size: See :class:`HybridConfig` for this and the following fields; None means not given.
        tensor_parallel_size: Ranks that share each layer's matrices.
        data_parallel_size: Replicas x shards.
        zero_stage: 0, 1, 2 or 3.
        data_parallel_shard_size: Shards per replica group.
        partition_gradients: Reduce gradients onto the rank that needs them only.
        contiguous_gradients: Keep gradients in flat buckets.
        overlap_gradients: Average gradients while backward runs.
        expert_parallel_size: Data-parallel ranks that share the experts of each MoE layer.
        schedule: Pipeline schedule, torch's spelling.
        stages_per_rank: Stages each pipeline rank owns.
        num_microbatches: Microbatches of a local batch.
        sequence_parallel: Spread activations between split regions over the sequence (tensor-parallel ranks).
        tensor_parallel_plan: ``"auto"`` or ``{module glob: style}``.
        qkv_split: ``"column"`` or ``"heads"``.
        activation_checkpoint_blocks: Blocks that are recomputed together; 0 for none.
        compression: Not available yet.
        max_staleness: Not available yet.
        self_check: ``"auto"``, ``"first_batch"`` or ``"off"``.
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
        partition_gradients: bool | str | None = None,
        contiguous_gradients: bool | str | None = None,
        overlap_gradients: bool | str | None = None,
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
        self_check: str | None = None,
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
            "partition_gradients": partition_gradients,
            "contiguous_gradients": contiguous_gradients,
            "overlap_gradients": overlap_gradients,
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
            "self_check": self_check,
            "fused_kernels": fused_kernels,
            "compile": compile,
        }
        self.config = resolve(config, {k: v for k, v in given.items() if v is not None})
        self.pipeline_module = pipeline_module
        self.mesh: HybridMesh | None = None
        self.parallel: ParallelModel | None = None
        self._planned: Layout | None = None
        self._uneven: set[str] = set()
        super().__init__(  # type: ignore[call-arg]
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

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
        elif self._is_plain:
            module.to(self.root_device)  # type: ignore[attr-defined]  # teardown moved it to the CPU
        if fitting and self.root_device.type == "npu":  # type: ignore[attr-defined]
            check_recomputation(self.root_device)  # type: ignore[attr-defined]
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
        return self.layout.pp == self.layout.tp == self.layout.ep == 1 and self.config.zero_stage == 0

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
                self.parallel.setup_optimizer(optimizer)
            setattr(self, "optimizers", list(self.optimizers))  # type: ignore[attr-defined]  # noqa: B010 - wrappers copy them
        except Exception as caught:  # noqa: BLE001 - raised again below, once every rank knows
            error = caught
        everyone = gather_errors(error)
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
