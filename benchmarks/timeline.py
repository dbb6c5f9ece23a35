"""Executed against simulated timelines: 4 ranks train blocks that sleep instead of computing, under every schedule.

Sleeping needs no processor, so 4 ranks take their turns on any number of cores; the longer a block sleeps, the less does
it matter what else the machine does. Of some steps the fastest counts.

python benchmarks/timeline.py [milliseconds that a block sleeps in forward and in each half of backward] [steps]
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import sleepy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ascend_core.schedule import TimedAction, simulate
from ascend_core.schedule_rules import MULTI_STAGE_SCHEDULES, SCHEDULES

RANKS, MICROBATCHES, BLOCKS = 4, 8, 8
SLEEP_S = float(sys.argv[1]) / 1e3 if len(sys.argv) > 1 else 0.03  # a rank has two blocks
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 3


def executed(schedule: str) -> tuple[float, list[TimedAction]]:
    """Makespan in seconds and actions of the fastest of some steps."""
    model = sleepy.spread(
        BLOCKS,
        (SLEEP_S, SLEEP_S, SLEEP_S),
        pipeline_parallel_size=RANKS,
        num_microbatches=MICROBATCHES,
        schedule=schedule,
    )
    x = torch.zeros(MICROBATCHES, 4)
    model.train_step(x, x)  # measures shapes
    runs = []
    for _ in range(STEPS):
        with model.record_timeline() as timeline:
            model.train_step(x, x)
        events = timeline.gather()
        runs.append((max(e.end_s for e in events) - min(e.start_s for e in events), events))
    return min(runs, key=lambda run: run[0])


def simulated(schedule: str) -> float:
    """Makespan in seconds. The batch needs no gradient, so the first block's is not computed."""
    stages = RANKS * (2 if schedule in MULTI_STAGE_SCHEDULES else 1)
    each = [SLEEP_S * BLOCKS / stages] * stages
    first = [each[0] - SLEEP_S, *each[1:]]
    return simulate(schedule, RANKS, MICROBATCHES, forward_s=each, backward_input_s=first, backward_weight_s=each).makespan_s


def rank_main(rank: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    for schedule in SCHEDULES:
        makespan, _ = executed(schedule)
        if rank == 0:
            results.put((schedule, makespan))
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=rank_main, args=(r, port, results)) for r in range(RANKS)]
    for process in ranks:
        process.start()
    print(f"| schedule              | executed, ms | simulated, ms | ratio |\n|{'-' * 23}|{'-' * 14}|{'-' * 15}|{'-' * 7}|")
    for _ in SCHEDULES:
        schedule, makespan = results.get(timeout=120)
        expected = simulated(schedule)
        print(f"| {schedule:21} | {1e3 * makespan:12.0f} | {1e3 * expected:13.0f} | {makespan / expected:5.2f} |", flush=True)
    for process in ranks:
        process.join(30)


if __name__ == "__main__":
    main()
