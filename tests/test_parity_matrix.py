"""A part of the parity matrix, in which each value of each axis meets those of the others; and the page about the whole."""

from __future__ import annotations

import parity_matrix
import pytest
from parity_matrix import Cell
from rank_pool import RankPool

from ascend_core import HybridConfig
from ascend_core.errors import ConfigError

BOUNDED = [c for c in parity_matrix.bounded() if not c.refused_by]


@pytest.mark.parametrize("cell", BOUNDED, ids=lambda c: c.name)
def test_cell_is_exact(pool: RankPool, cell: Cell) -> None:
    worst = parity_matrix.run(pool, cell)
    assert max(worst.values()) < parity_matrix.TOLERANCE, worst


def test_what_is_refused_is_refused_when_it_is_built() -> None:
    refused = [c for c in parity_matrix.cells() if c.refused_by]
    assert refused
    for cell in refused:
        with pytest.raises(ConfigError, match="zero_stage=3 with a pipeline"):
            HybridConfig(**cell.config)


def test_the_page_has_every_cell_and_none_differs() -> None:
    lines = [r for r in parity_matrix.PAGE.read_text().splitlines() if r.startswith("|")][2:]
    cells = parity_matrix.cells()
    assert len(cells) >= 120 and len(lines) == len(cells)
    for cell, line in zip(cells, lines, strict=True):
        values = [v.strip() for v in line.strip("|").split("|")]
        assert values[:8] == cell.row
        if cell.refused_by:
            assert values[8:] == ["refused", "", "", ""]
        else:
            assert all(float(v) < parity_matrix.TOLERANCE for v in values[8:]), cell.name
