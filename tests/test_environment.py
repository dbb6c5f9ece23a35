"""Every environment variable goes through one table, and private names of other packages through one file each."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from ascend_core import _shim, env
from ascend_core.errors import ConfigError
from ascend_emulator import _torch
from lightning_ascend import _lightning

ROOT = Path(__file__).parent.parent
PACKAGES = ("ascend_core", "lightning_ascend", "ascend_emulator")


def sources() -> list[Path]:
    return [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]


def test_only_the_table_reads_the_environment() -> None:
    allowed = {ROOT / "ascend_core/env.py", ROOT / "lightning_ascend/_boot.py"}
    ours = [p for p in sources() if "ascend_emulator" not in p.parts]  # the emulator stands alone and is set up by variables
    assert [p for p in ours if p not in allowed and re.search(r"os\.(environ|getenv)", p.read_text())] == []


def test_variables_have_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LIGHTNING_ASCEND_AUTOLOAD", "off")
    assert env.read("RANK") == 3
    assert env.read("LIGHTNING_ASCEND_AUTOLOAD") is False
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(ConfigError, match="RANK='three' is not an integer"):
        env.read("RANK")


def test_files_are_short() -> None:
    for path in [*sources(), *sorted((ROOT / "tests").glob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]:
        lines = len(path.read_text().splitlines())
        assert lines <= 320, f"{path.relative_to(ROOT)} has {lines} lines; split it by idea"


@pytest.mark.parametrize("row", [*_shim.ROWS, *_torch.ROWS], ids=lambda r: r.name)
def test_private_torch_names_still_exist(row: _shim.Row | _torch.Row) -> None:
    assert _resolve(row.name) is not None
    assert row.why and row.upstream and row.remove_when


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("row", _lightning.ROWS, ids=lambda r: r.name)
def test_private_lightning_names_still_exist(row: _lightning.Row, namespace: str) -> None:
    module, _, attribute = row.name.rpartition(".")
    owner = _resolve(f"{namespace}.{module}")
    source = Path(importlib.import_module(owner.__module__).__file__ or "").read_text()
    assert hasattr(owner, attribute) or f"self.{attribute}" in source


@pytest.mark.parametrize("namespace", ["lightning.fabric", "lightning_fabric"])
@pytest.mark.parametrize("row", _lightning.FABRIC_ROWS, ids=lambda r: r.name)
def test_private_fabric_names_still_exist(row: _lightning.Row, namespace: str) -> None:
    assert callable(_resolve(f"{namespace}.{row.name}"))


def _resolve(name: str) -> object:
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def test_auto_still_ignores_the_npu_upstream() -> None:
    """The patches of _lightning.py are needed as long as Lightning's own functions do not know the NPU."""
    connector = importlib.import_module("lightning.pytorch.trainer.connectors.accelerator_connector")
    fabric = importlib.import_module("lightning.fabric.utilities.device_parser")
    for module in (connector, fabric):
        assert not re.search(r"\bnpu\b", Path(module.__file__ or "").read_text(), re.IGNORECASE)
