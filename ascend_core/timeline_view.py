"""Show timed actions, simulated or executed: as a web page, or as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from ascend_core.schedule import KINDS, TimedAction

_COLOURS = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#eeca3b"}
_LANE, _GAP, _LEFT, _WIDTH, _TICKS = 30, 6, 70, 1400, 10  # pixels, and number of time marks

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font:14px sans-serif;margin:1.5em}} svg text{{font:11px sans-serif}}
.key{{padding:0 .6em;margin-right:1em}}</style>
</head><body><h1>{title}</h1><p>{legend}</p>
{charts}
</body></html>
"""


def page(title: str, charts: Mapping[str, Sequence[TimedAction]]) -> str:
    """Draw timelines, one below the other and in one scale, as a page that needs nothing from outside.

    Args:
        title: Heading of the page.
        charts: Heading and actions of each timeline.

    Returns:
        The HTML. Hovering over an action says what it is and when it ran.
    """
    legend = "".join(
        f'<span class="key" style="background:{_COLOURS[k]}">{k}</span>{html.escape(text)} &nbsp; ' for k, text in KINDS.items()
    )
    until = max((a.end_s for actions in charts.values() for a in actions), default=0.0) or 1.0
    drawn = "\n".join(f"<h2>{html.escape(name)}</h2>\n{_chart(actions, until)}" for name, actions in charts.items())
    return _PAGE.format(title=html.escape(title), legend=legend, charts=drawn)


def _chart(actions: Sequence[TimedAction], until_s: float) -> str:
    ranks = sorted({a.rank for a in actions})
    stages = {r: sorted({a.action.stage for a in actions if a.rank == r}) for r in ranks}
    height = len(ranks) * (_LANE + _GAP) + 20
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 40}" height="{height}">']
    for number, rank in enumerate(ranks):
        y = number * (_LANE + _GAP)
        parts.append(f'<text x="0" y="{y + 20}">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_LANE}" fill="#f2f2f2"/>')
        parts += [_box(a, y, until_s, stages[rank].index(a.action.stage)) for a in actions if a.rank == rank]
    for i in range(_TICKS + 1):
        x = _LEFT + _WIDTH * i / _TICKS
        parts.append(f'<text x="{x:.1f}" y="{height - 4}" text-anchor="middle">{1e3 * until_s * i / _TICKS:.4g} ms</text>')
    return "\n".join([*parts, "</svg>"])


def _box(timed: TimedAction, y: int, until_s: float, local_stage: int) -> str:
    """One action; later stages of a rank are paler."""
    action, scale = timed.action, _WIDTH / until_s
    x, width = _LEFT + timed.start_s * scale, max((timed.end_s - timed.start_s) * scale, 0.5)
    text = (
        f"{action}: {KINDS[action.kind]}, stage {action.stage}, microbatch {action.microbatch}, "
        f"{1e3 * timed.start_s:.4g} to {1e3 * timed.end_s:.4g} ms"
    )
    label = f'<text x="{x + 2:.2f}" y="{y + 19}">{action.microbatch}</text>' if width > 14 else ""
    return (
        f'<g><title>{html.escape(text)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE}" '
        f'fill="{_COLOURS[action.kind]}" fill-opacity="{max(0.4, 1 - 0.3 * local_stage):.1f}" stroke="white"/>{label}</g>'
    )


def chrome_trace(actions: Sequence[TimedAction]) -> dict[str, Any]:
    """Turn actions into the JSON that Perfetto and chrome://tracing read.

    Args:
        actions: The actions.

    Returns:
        ``traceEvents`` with one complete event per action: pid is the rank, tid the stage, times in microseconds.
    """
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"pipeline rank {rank}"}}
        for rank in sorted({a.rank for a in actions})
    ]
    events = [
        {
            "name": str(a.action),
            "cat": KINDS[a.action.kind],
            "ph": "X",
            "pid": a.rank,
            "tid": a.action.stage,
            "ts": 1e6 * a.start_s,
            "dur": 1e6 * (a.end_s - a.start_s),
            "args": {"stage": a.action.stage, "microbatch": a.action.microbatch},
        }
        for a in actions
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}
