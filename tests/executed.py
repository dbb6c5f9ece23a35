"""Rank functions of the tests of executed timelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sleepy
import torch

from ascend_core.errors import ConfigError
from ascend_core.schedule import Action, TimedAction


def orders(schedules: tuple[str, ...], path: Path, device_type: str = "cpu") -> dict[str, dict[str, Any]]:
    """By schedule, two steps with and one without recording: the actions of the first and of all ranks; they are saved too."""
    found = {}
    for schedule in schedules:
        config = {"pipeline_parallel_size": 4, "num_microbatches": 8, "schedule": schedule}
        model = sleepy.spread(device_type=device_type, **config)
        x = torch.zeros(8, 4, device=device_type)
        model.train_step(x, x)
        with model.record_timeline() as timeline:
            model.train_step(x, x)
            mine = [e.action for e in timeline.events]
            model.train_step(x, x)
        recorded = len(timeline.events)
        model.train_step(x, x)
        found[schedule] = {
            "mine": mine, "recorded": recorded, "after": len(timeline.events), "everyone": timeline.gather()
        }  # fmt: skip
        for ending in ("json", "html"):
            timeline.save(path / f"{schedule}.{ending}")
    return found


def gaps(events: list[TimedAction], num_stages: int) -> list[float]:
    """Seconds from the end of what an action needs from another stage to its start."""
    ends = {e.action: e.end_s for e in events}
    back = {(a.stage, a.microbatch): a for a in ends if a.kind in "BI"}
    found = []
    for event in events:
        a = event.action
        if a.kind == "F" and a.stage > 0:
            found.append(event.start_s - ends[Action(a.stage - 1, "F", a.microbatch)])
        if a.kind in "BI" and a.stage < num_stages - 1:
            found.append(event.start_s - ends[back[a.stage + 1, a.microbatch]])
    return found


def refusals(path: Path) -> list[str]:
    """A timeline of a model without a pipeline, and one saved under a name that says no format."""
    texts = []
    for config in ({}, {"pipeline_parallel_size": 2, "num_microbatches": 2}):
        model = sleepy.spread(**config)
        try:
            with model.record_timeline() as timeline:
                pass
            timeline.save(path / "step.txt")
        except ConfigError as error:
            texts.append(str(error))
    return texts
