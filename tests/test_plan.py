"""``python -m ascend_core plan``: its tables are those of the docs, its page draws every action, its errors say what to do."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ascend_core.__main__ import main
from ascend_core.schedule import simulate
from ascend_core.schedule_rules import SCHEDULES
from ascend_core.timeline_view import chrome_trace

DOCS = (Path(__file__).parent.parent / "docs/schedules.md").read_text()
COMMANDS = re.findall(r"```bash\npython -m ascend_core (plan.*)\n```\n\n((?:\|.*\n)+)", DOCS)


@pytest.mark.parametrize(("command", "table"), COMMANDS, ids=range(len(COMMANDS)))
def test_tables_in_the_docs_are_what_the_command_prints(command: str, table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == table


def test_the_docs_have_tables_for_eight_and_sixteen_microbatches_and_for_heads() -> None:
    commands = "\n".join(c for c, _ in COMMANDS)
    assert len(COMMANDS) == DOCS.count("```bash") and len(COMMANDS) >= 4
    for option in ("--num-microbatches 8", "--num-microbatches 16", "--p2p-ms", "--cut equal", "--head-cost"):
        assert option in commands
    assert all(all(s in table for s in SCHEDULES) for _, table in COMMANDS)


def test_a_configuration_file_and_options_that_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("pipeline_parallel_size: 4\nschedule: ZBVZeroBubble\nnum_microbatches: 8\n")
    assert main(["plan", "--config", str(file), "--forward-ms", "2"]) == 0
    row = capsys.readouterr().out.splitlines()[2]
    assert row.split("|")[1].strip() == "ZBVZeroBubble" and "51.00" in row and "5.9 %" in row
    assert main(["plan", "--config", str(file), "--schedule", "1F1B", "--num-microbatches", "16"]) == 0
    assert "15.8 %" in capsys.readouterr().out


def test_of_all_schedules_those_that_cannot_run_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--pipeline-parallel-size", "4", "--num-microbatches", "6"]) == 0
    rows = {line.split("|")[1].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert "cannot run: DualPipeV needs at least as many microbatches as stages (6 < 8)" in rows["DualPipeV"]
    assert "33.3 %" in rows["GPipe"]


def test_the_page_draws_every_action(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    assert main(["plan", "--pipeline-parallel-size", "2", "--num-microbatches", "4", "--timeline", str(page)]) == 0
    text = page.read_text()
    assert not re.search(r"(src|href)=", text) and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    charts = [ElementTree.fromstring(s) for s in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(charts) == len(SCHEDULES)
    space = "{http://www.w3.org/2000/svg}"
    for name, chart in zip(SCHEDULES, charts, strict=True):
        drawn = sorted(t.text.partition(":")[0] for t in chart.iter(f"{space}title") if t.text)
        assert drawn == sorted(str(a.action) for a in simulate(name, 2, 4).actions)
    boxes = {g.find(f"{space}title").text: g.find(f"{space}rect") for g in charts[1].iter(f"{space}g")}  # type: ignore[union-attr]
    first = boxes["0F0: forward, stage 0, microbatch 0, 0 to 1 ms"]
    last = next(b for t, b in boxes.items() if t and t.startswith("0B3: backward, stage 0, microbatch 3, 13 to 15 ms"))
    assert first is not None and last is not None
    assert float(last.get("width", 0)) == pytest.approx(2 * float(first.get("width", 0)), rel=1e-3)


def test_a_trace_has_ranks_as_processes_and_stages_as_threads() -> None:
    run = simulate("Interleaved1F1B", 2, 4, forward_s=1e-3)
    events = [e for e in chrome_trace(run.actions)["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(run.actions) == 4 * 4 * 2
    assert events[0] == {
        "name": "0F0", "cat": "forward", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 1000.0, "args": {"stage": 0, "microbatch": 0}
    }  # fmt: skip
    assert {(e["pid"], e["tid"]) for e in events} == {(0, 0), (0, 2), (1, 1), (1, 3)}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--pipeline-parallel-size 4 --schedule 1f1b", "did you mean '1F1B'"),
        ("--pipeline-parallel-size 4 --schedule 1F1B --num-microbatches 3", "at least as many microbatches"),
        ("--num-microbatches 3", "Give --pipeline-parallel-size"),
        ("--pipeline-parallel-size 4 --head-cost 2", "Give --num-blocks"),
        ("--pipeline-parallel-size 2 --num-blocks 8 --head-cost -1", "no cost is negative"),
        ("--pipeline-parallel-size 4 --schedule GPipe --num-blocks 3", "Each stage needs a block"),
        ("--pipeline-parallel-size 4 --schedule GPipe --stages-per-rank 2", "run one stage per rank"),
        ("--pipeline-parallel-size 2 --forward-ms 0", "must be above 0"),
        ("--pipeline-parallel-size 2 --backward-input-ms -1", "none is negative"),
        ("--pipeline-parallel-size 2 --timeline /nowhere/at/all.html", "Cannot write"),
        ("--config /nowhere.yaml", "Cannot read the configuration file"),
    ],
)
def test_errors_end_with_status_two(options: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *shlex.split(options)]) == 2
    assert text in capsys.readouterr().err


def test_the_command_runs_as_a_program() -> None:
    run = [sys.executable, "-m", "ascend_core", "plan", "--schedule", "zbv", "--pipeline-parallel-size", "2"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "is not known" in done.stderr and "Traceback" not in done.stderr
