"""The table of torch_npu's own tests agrees with the list of reasons. Nothing is run and nothing is fetched."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.upstream_npu import reasons, selection, table

PAGE = table.FILE.read_text()
LISTED = reasons.load()


def section(title: str) -> list[list[str]]:
    """Rows of the first table under a heading, without its head."""
    rows = [line for line in PAGE.partition(f"## {title}\n")[2].split("\n## ")[0].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows[1:]]


def number(cell: str) -> int:
    return int(cell) if cell else 0


def test_every_reason_is_in_the_table_and_no_other() -> None:
    shown = {(f"test/{file}", name, kind, why) for file, names, kind, why in section("Reasons") for name in names.split(", ")}
    listed = {
        (r.file, "the whole file" if t == "*" else f"`{t.partition('::')[2]}`", r.kind, r.why) for r in LISTED for t in r.tests
    }
    assert shown == listed


def test_no_test_is_listed_twice() -> None:
    twice = [t for t, n in Counter((r.file, t) for r in LISTED for t in r.tests).items() if n > 1]
    assert twice == []


def test_the_counts_agree() -> None:
    files = section("Files")
    for file, _, not_applicable, explained, _ in files:
        here = [r for r in LISTED if r.file == f"test/{file}" for _ in r.tests]
        assert number(not_applicable) == sum(r.kind in reasons.NOT_APPLICABLE for r in here), file
        assert number(explained) == sum(r.kind in reasons.EXPLAINED for r in here), file
    totals = {row[0]: number(row[1]) for row in section("Summary") if len(row) == 2}
    run = [row for row in files if row[1] != "not run"]
    for place, column in enumerate(table.COLUMNS, 1):
        assert totals[column] == sum(number(row[place]) for row in run), column
    assert f"{len(run)} of {len(files)} files were run." in PAGE
    assert "without a reason" not in PAGE.partition("## Summary")[2]
    assert selection.COMMIT in PAGE


def test_a_run_is_judged_in_both_directions(tmp_path: Path) -> None:
    """A new failure, a listed test that passes, one that fails differently, and one that is gone are problems."""
    (tmp_path / "reasons.toml").write_text(
        '[[reason]]\nfile = "f"\ntests = ["a", "b", "c", "d"]\nkind = "kernel"\nwhy = "no graph"\nsays = "capture"\n'
    )
    outcomes = {"a": ("failed", "no capture"), "b": ("passed", ""), "c": ("failed", "other"), "e": ("failed", "new")}
    results = {"f": {"tests": {k: {"outcome": o, "why": w} for k, (o, w) in outcomes.items()}}}
    judged = reasons.judge(results, reasons.load(tmp_path / "reasons.toml"))
    assert [test for _, test in judged.reason_of] == ["a"]
    found = [problem.partition("f::")[0].strip(" :") for problem in judged.problems]
    listed = "but listed as failing"
    assert found == [f"PASSED, {listed}", "FAILED", "FAILED", f"NOT THERE, {listed}"]
    (tmp_path / "reasons.toml").write_text('[[reason]]\nfile = "f"\ntests = ["a"]\nkind = "mood"\nwhy = "?"\n')
    with pytest.raises(ValueError, match="no such kind"):
        reasons.load(tmp_path / "reasons.toml")
