"""A bounded part of the conformance suite over PyTorch's operator database; the whole of it is `make conformance`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conformance import moments, subset
from conformance.gaps import Gap, judge, load
from conformance.table import gap_section
from npu_pool import NpuPool

DOCUMENT = Path(__file__).parent.parent / "docs/conformance.md"


def test_the_training_path(npu_pool: NpuPool) -> None:
    """The first samples of its operators: forward, backward, in place, out=, views, errors."""
    (records,) = npu_pool.run(1, subset.run, deadline_s=240)
    unexplained, _ = judge(load(), records)
    assert unexplained == []
    assert {r["operator"] for r in records} == set(subset.TRAINING_PATH)
    assert all(r["checks"].get("forward", {}).get("equal") for r in records), "nothing was compared"
    assert sum(r["checks"].get("backward", {}).get("equal", 0) for r in records) > 150


def test_random_operators_have_the_right_moments(npu_pool: NpuPool) -> None:
    assert npu_pool.run(1, moments.wrong_moments, "npu") == [[]]


def test_the_document_lists_the_known_gaps() -> None:
    """docs/conformance.md was written with the list as it is."""
    assert gap_section(load()) in DOCUMENT.read_text()


def test_the_list_is_strict() -> None:
    """A failure that is not listed, one that is larger than listed, and a listed one that is none are told."""
    gaps = [Gap(("a", "b"), ("forward",), "values differ", "rounding", within=1e-6), Gap(("c",), ("forward",), "raises", "why")]
    near, far = (
        ("forward", 0, "result: values differ by up to 1e-07 of the largest"),
        ("forward", 0, "values differ by up to 1e-03 of the largest"),
    )

    def record(name: str, *failures: tuple[str, int, str]) -> dict[str, object]:
        return json.loads(json.dumps({"operator": name, "dtype": "float32", "checks": {"forward": {}}, "failures": failures}))

    assert judge(gaps, [record("a", near), record("b", near)]) == ([], [])
    unexplained, stale = judge(gaps, [record("a", far), record("b", near), record("c"), record("d", near)])
    assert [u.split(" ")[0] for u in unexplained] == ["a", "d"]
    assert stale == ["a, forward: values differ", "c, forward: raises"]
    assert judge(gaps, [record("a", near), record("b", near)], whole=True) == ([], ["c, forward: raises"])


def test_the_list_names_each_gap_once(tmp_path: Path) -> None:
    text = '[[gap]]\noperators = ["a"]\nchecks = ["forward"]\ntext = "x"\nreason = "y"\n'
    (tmp_path / "once.toml").write_text(text)
    assert load(tmp_path / "once.toml")[0].operators == ("a",)
    (tmp_path / "twice.toml").write_text(text * 2)
    with pytest.raises(ValueError, match="twice"):
        load(tmp_path / "twice.toml")
