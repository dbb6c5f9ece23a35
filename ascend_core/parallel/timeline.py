"""Record when each action of a pipeline really ran, on every rank, on one clock.

Nothing is recorded, and nothing costs time, until :meth:`ParallelModel.record_timeline` switches it on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ascend_core import timeline_view
from ascend_core.errors import ConfigError
from ascend_core.schedule import Action, TimedAction

_EXCHANGES = 8  # the fastest of so many round trips tells how two clocks differ


class Timeline:
    """Actions that ran while it was recording.

    Args:
        group: The pipeline group.
        device: This rank's device; on an accelerator each action waits for it before it starts and before it ends.

    Attributes:
        events: This rank's actions in the order they ran; seconds since recording began on pipeline rank 0's clock.

    Communication:
        Creating one exchanges times between pipeline rank 0 and each other rank, point to point.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.events: list[TimedAction] = []
        self._rank = dist.get_rank(group)
        self._zero_s = _common_zero(group, device)

    @contextmanager
    def span(self, kind: str, stage: int, microbatch: int) -> Iterator[None]:
        """Record what runs inside as one action."""
        start = self._now()
        try:
            yield
        finally:
            self.events.append(TimedAction(self._rank, Action(stage, kind, microbatch), start, self._now()))

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)
        return time.perf_counter() - self._zero_s

    def gather(self) -> list[TimedAction]:
        """Collect the actions of all ranks, by rank and time.

        Communication:
            One object all-gather over the pipeline group.
        """
        everyone: list[list[TimedAction]] = [[] for _ in range(dist.get_world_size(self.group))]
        dist.all_gather_object(everyone, self.events, group=self.group)
        return [event for rank in everyone for event in rank]

    def save(self, path: str | Path) -> None:
        """Write the actions of all ranks, on global rank 0: a trace for Perfetto (``.json``) or a page (``.html``).

        Raises:
            ConfigError: The name ends in something else.

        Communication:
            See :meth:`gather`; every rank of the pipeline must call it.
        """
        path = Path(path)
        if path.suffix not in (".json", ".html"):
            raise ConfigError(f"A timeline in {path.name!r}.", "The ending tells the format.", "Use .json or .html.")
        events = self.gather()
        if dist.get_rank() == 0:
            as_json = path.suffix == ".json"
            page = "" if as_json else timeline_view.page("Executed pipeline", {"as executed": events})
            text = json.dumps(timeline_view.chrome_trace(events)) if as_json else page
            path.write_text(text, encoding="utf-8")


def _common_zero(group: dist.ProcessGroup, device: torch.device) -> float:
    """This rank's clock at the moment that pipeline rank 0 calls zero.

    As in Cristian's algorithm: rank 0 answers each question with its time, which was right at half of the round trip;
    the error is at most half of the fastest one.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    message = torch.zeros(1, dtype=torch.int64, device=device)
    started = time.perf_counter()
    best = (float("inf"), 0.0)
    for peer in range(1, size):
        for _ in range(_EXCHANGES):
            if rank == 0:
                dist.recv(message, group=group, group_src=peer)
                message.fill_(int(1e9 * (time.perf_counter() - started)))
                dist.send(message, group=group, group_dst=peer)
            elif rank == peer:
                asked = time.perf_counter()
                dist.send(message, group=group, group_dst=0)
                dist.recv(message, group=group, group_src=0)
                theirs, answered = int(message) / 1e9, time.perf_counter()
                best = min(best, (answered - asked, (asked + answered) / 2 - theirs))
    return started if rank == 0 else best[1]
