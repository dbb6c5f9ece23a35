"""The README is true: its commands run, its example trains, its tables say what the code does, in both languages."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ascend_core import HybridConfig
from ascend_core.errors import NotAvailableError
from ascend_core.parallel.tensor import STYLES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def tables(text: str) -> list[list[list[str]]]:
    found = re.findall(r"((?:^\|.*\|\n)+)", text, re.MULTILINE)
    return [[[c.strip() for c in row.strip("|").split("|")] for row in t.strip().splitlines()[2:]] for t in found]


def test_set_up_commands() -> None:
    """They give an environment that imports us; a second call installs nothing."""
    (commands,) = blocks(README, "bash")
    assert len(commands.strip().splitlines()) == 2
    script = f"set -e\n{commands}\npython -c 'import lightning_ascend, ascend_core; print(lightning_ascend.AscendHybridStrategy.__name__)'"
    times = []
    for _ in range(2):
        done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        assert "AscendHybridStrategy" in done.stdout
        times.append((ROOT / ".venv/.ready").stat().st_mtime)
    assert times[0] == times[1]


def test_first_example(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(blocks(README, "python")[0])
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (loss,) = re.findall(r"final loss ([\d.]+)", done.stdout)
    assert float(loss) < 1.0


@pytest.mark.parametrize("row", tables(README)[0], ids=lambda r: f"{r[0]}={r[1]}".replace("`", ""))
def test_support_table(row: list[str]) -> None:
    field, text, state = row[0].strip("`"), row[1], row[2]
    value = {"true": True}.get(text, int(text) if text.isdigit() else text)
    others = {"schedule": {"pipeline_parallel_size": 2}, "sequence_parallel": {"tensor_parallel_size": 2}}.get(field, {})
    if state == "yes":
        assert getattr(HybridConfig(**others, **{field: value}), field) == value
    else:
        with pytest.raises(NotAvailableError):
            HybridConfig(**others, **{field: value})


def test_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["npu"], *extras["lightning"], *extras["dev"]]
    for name, requirement in tables(README)[1]:
        assert f"{name}{requirement.strip('`')}" in requirements


def test_both_languages_say_the_same() -> None:
    for language in ("bash", "python", "yaml"):
        assert blocks(README, language) == blocks(CHINESE, language)
    assert tables(README) == tables(CHINESE)
    assert len(re.findall("^## ", README, re.MULTILINE)) == len(re.findall("^## ", CHINESE, re.MULTILINE))


def test_links_and_style_table() -> None:
    for link in re.findall(r"\]\((docs/[^)]+)\)", README + CHINESE):
        assert (ROOT / link).is_file()
    documented = {row[0].strip("`") for row in tables((ROOT / "docs/tensor_parallel.md").read_text())[0]}
    assert documented == set(STYLES)
