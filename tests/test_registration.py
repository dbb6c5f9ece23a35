"""Scripts that never import us find the strategy; both namespaces, YAML and command line, and the file in ASCEND_CONFIG."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import {namespace} as pl
from {namespace}.demos.boring_classes import BoringModel
import torch

class Model(BoringModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

assert "ascend_core" not in sys.modules and "torch" in sys.modules
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ascend_hybrid", max_steps=2, limit_val_batches=1, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Model())
if trainer.is_global_zero:
    print("STRATEGY", type(trainer.strategy).__module__, trainer.strategy.layout)
"""


def run(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "ASCEND_DEVICE"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("namespace", "module"),
    [("lightning.pytorch", "lightning_ascend.pytorch"), ("pytorch_lightning", "lightning_ascend.pytorch_lightning")],
)
def test_a_script_without_our_import(tmp_path: Path, namespace: str, module: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(namespace=namespace))
    (tmp_path / "layout.yaml").write_text("pipeline_parallel_size: 2\nnum_microbatches: 1\nschedule: GPipe\n")
    done = run(["train.py"], tmp_path, ASCEND_CONFIG="layout.yaml")
    assert done.returncode == 0, done.stderr
    assert f"STRATEGY {module} pp=2 x dp=1" in done.stdout
    assert "pp=2 x dp=1 (1 replicas x 1 shards) x tp=1 over gloo, on the CPU" in done.stderr


CLI = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
LightningCLI(BoringModel, BoringDataModule, run=False, save_config_callback=None)
"""
CLI_CHECK = (
    CLI + "print('SEEN', LightningCLI(BoringModel, run=False, save_config_callback=None).trainer.strategy.config.to_dict())"
)


@pytest.mark.parametrize("form", ["string", "class"])
def test_lightning_cli(tmp_path: Path, form: str) -> None:
    (tmp_path / "cli.py").write_text(CLI_CHECK)
    if form == "string":
        text = "trainer:\n  accelerator: cpu\n  strategy: ascend_hybrid\n"
    else:
        text = (
            "trainer:\n  accelerator: cpu\n  devices: 2\n  strategy:\n    class_path: lightning_ascend.AscendHybridStrategy\n"
            "    init_args:\n      pipeline_parallel_size: 2\n"
        )
    (tmp_path / "config.yaml").write_text(text)
    done = run(["cli.py", "--config", "config.yaml"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"'pipeline_parallel_size': {1 if form == 'string' else 2}" in done.stdout


PROBE = """
import sys, torch
import lightning.pytorch as pl
from lightning.pytorch.strategies import StrategyRegistry
assert "ascend_core" not in sys.modules
print("REGISTERED", "ascend_hybrid" in StrategyRegistry)
try:
    pl.Trainer(strategy="ascend_hybrid", accelerator=sys.argv[1], logger=False)
except Exception as error:
    print("ERROR", type(error).__name__, error)
"""


def test_no_silent_cpu(tmp_path: Path) -> None:
    """D17: without an NPU, accelerator='auto' and 'npu' are errors that say what to do."""
    (tmp_path / "probe.py").write_text(PROBE)
    auto = run(["probe.py", "auto"], tmp_path)
    assert "REGISTERED True" in auto.stdout, auto.stderr
    assert "ERROR DeviceError No NPU" in auto.stdout and "accelerator='cpu'" in auto.stdout
    npu = run(["probe.py", "npu"], tmp_path)
    assert "ERROR" in npu.stdout and "NPUAccelerator" in npu.stdout


def test_registration_can_be_switched_off(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    done = run(["probe.py", "cpu"], tmp_path, LIGHTNING_ASCEND_AUTOLOAD="0")
    assert "REGISTERED False" in done.stdout, done.stderr


def test_import_is_cheap_and_pure(tmp_path: Path) -> None:
    """The hook imports nothing but the standard library."""
    code = "import sys; before = set(sys.modules); import lightning_ascend._boot; new = set(sys.modules) - before\nprint(sorted(new))"
    done = run(["-c", code], tmp_path)
    loaded = {name.split(".")[0] for name in eval(done.stdout)}
    assert not loaded & {"torch", "lightning", "numpy", "ascend_core"}, loaded


def test_parse_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    from ascend_core.errors import ConfigError
    from lightning_ascend.accelerator import NPUAcceleratorMixin

    monkeypatch.setattr(NPUAcceleratorMixin, "auto_device_count", staticmethod(lambda: 4))
    parse = NPUAcceleratorMixin.parse_devices
    assert parse(2) == [0, 1] and parse(-1) == [0, 1, 2, 3] and parse("0,2") == [0, 2] and parse("3") == [0, 1, 2]
    for wrong in (5, [4], [1, 1], [], "0,9"):
        with pytest.raises(ConfigError, match="4 visible NPUs"):
            parse(wrong)
