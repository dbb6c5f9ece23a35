"""Cut blocks into pipeline stages of equal cost, not of equal number.

The slowest stage sets the pace of a pipeline, and the first and last stage do more than their blocks: above all the output
head counts. Parameter names do not depend on the cut, and neither do checkpoints.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.parallel.block_costs import BlockCosts, Cut, estimated_costs
from ascend_core.parallel.blocks import BlockList, deal, equal_cut
from ascend_core.schedule import Simulation, simulate
from ascend_core.schedule_rules import stage_owner

_SIMULATED_STAGES = 8
"""Cuts of more stages are not simulated: there are too many, and the gain is small."""


def balance(costs: BlockCosts, num_stages: int, schedule: str, pipeline_size: int) -> Cut:
    """Find the cut whose most expensive stage is cheapest.

    Of the cuts with the same most expensive stage it takes, in this order, the one that loads ranks most evenly (the V
    schedules' first rank has the first and the last stage), that needs the least memory on the fullest rank, and, among its
    neighbours, that is fastest in a simulated step.

    Args:
        costs: Costs of the blocks.
        num_stages: Stages over all ranks, at most the number of blocks.
        schedule: torch's name, which tells the owners of stages.
        pipeline_size: Pipeline ranks.

    Returns:
        The cut.
    """
    best = _optimum(costs, equal_cut(len(costs.blocks), num_stages))
    if pipeline_size == 1:
        return best
    judge = _Judge(costs, num_stages, schedule, pipeline_size)
    better: Cut | None = best
    while better is not None:
        best = better
        better = next((cut for cut in _shifted(best) if judge.prefers(cut, best)), None)
    return best


class _Judge:
    """Compares cuts that have the same most expensive stage, or a cheaper one."""

    def __init__(self, costs: BlockCosts, num_stages: int, schedule: str, pipeline_size: int) -> None:
        self.costs, self.schedule, self.size = costs, schedule, pipeline_size
        self.owners = [stage_owner(schedule, s, pipeline_size) for s in range(num_stages)]
        self.live = self._simulate([1.0] * num_stages).peak_live

    def prefers(self, cut: Cut, best: Cut) -> bool:
        """Whether ``cut`` is better than ``best``."""
        mine, theirs = self._loads(cut), self._loads(best)
        if mine != theirs or len(cut) > _SIMULATED_STAGES:
            return mine < theirs
        return self._makespan(cut) < self._makespan(best)

    def _loads(self, cut: Cut) -> tuple[float, ...]:
        stages = self.costs.stages(cut)
        ranks = [0.0] * self.size
        for owner, cost in zip(self.owners, stages, strict=True):
            ranks[owner] += cost
        held = max(live * cost for live, cost in zip(self.live, ranks, strict=True))
        return tuple(_rounded(x) for x in (max(stages), max(ranks), sum(c * c for c in ranks), held))

    def _makespan(self, cut: Cut) -> float:
        return _rounded(self._simulate(self.costs.stages(cut)).makespan_s)

    def _simulate(self, each: list[float]) -> Simulation:
        chunks = len(each) // self.size
        return simulate(
            self.schedule,
            self.size,
            2 * self.size,
            stages_per_rank=chunks,
            forward_s=each,
            backward_input_s=each,
            backward_weight_s=each,
        )


def _rounded(value: float) -> float:
    """Sums in another order are no gain."""
    return float(f"{value:.9g}")


def _optimum(costs: BlockCosts, equal: Cut) -> Cut:
    """The least largest stage, exactly; then the least sum of squares; then small early stages."""
    bound = max(costs.stages(equal))
    largest, _ = _partition(costs, len(equal), bound, lambda so_far, cost: max(so_far, cost))
    _, cut = _partition(costs, len(equal), largest, lambda so_far, cost: so_far + cost * cost)
    return cut


def _partition(costs: BlockCosts, num_stages: int, bound: float, add: Callable[[float, float], float]) -> tuple[float, Cut]:
    """Dynamic programming over the last stage's first block, for stages that cost at most ``bound``."""
    n, bound = len(costs.blocks), bound * (1 + 1e-9)
    total = [0.0, *itertools.accumulate(costs.blocks)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # blocks dealt so far: measure, first of each stage
    for stage in range(num_stages):
        extra = (costs.before if stage == 0 else 0.0) + (costs.after if stage == num_stages - 1 else 0.0)
        following = {}
        for end in range(stage + 1, n + 1 - (num_stages - 1 - stage)):
            candidates = []
            for first in range(end - 1, stage - 1, -1):
                cost = total[end] - total[first] + extra
                if cost > bound:
                    break
                if first in best:
                    so_far, starts = best[first]
                    candidates.append((_rounded(add(so_far, cost)), (*starts, first)))
            if candidates:
                following[end] = min(candidates)
        best = following
    measure, starts = best[n]
    return measure, list(zip(starts, (*starts[1:], n), strict=True))


def _shifted(cut: Cut) -> Iterator[Cut]:
    """Cuts in which one stage has a block less and another one more; the stages between move by one."""
    bounds = [first for first, _ in cut[1:]]
    for i, j in itertools.combinations(range(len(bounds) + 1), 2):
        for by in (-1, 1):
            moved = [b + by if i <= k < j else b for k, b in enumerate(bounds)]
            edges = [0, *moved, cut[-1][1]]
            if all(a < b for a, b in itertools.pairwise(edges)):
                yield list(itertools.pairwise(edges))


def cut_blocks(
    model: nn.Module,
    blocks: BlockList,
    num_stages: int,
    schedule: str,
    pipeline_size: int,
    wish: Sequence[int] | BlockCosts | None = None,
) -> Cut:
    """Cut the blocks: as given, by given costs, or by estimated ones.

    Args:
        model: The whole model.
        blocks: Its blocks.
        num_stages: Stages over all ranks.
        schedule: torch's name.
        pipeline_size: Pipeline ranks.
        wish: The first block of every stage but the first; or costs; or None to estimate them.

    Returns:
        The cut, equal on all ranks.

    Raises:
        ConfigError: There are more stages than blocks, or the given cut or costs do not fit.

    Communication:
        With a wish, one object broadcast over all ranks: rank 0's counts.
    """
    n = len(blocks)
    deal(blocks, num_stages)
    if wish is not None:
        message = [wish]
        dist.broadcast_object_list(message, src=0)
        wish = message[0]
    if wish is not None and not isinstance(wish, BlockCosts):
        edges = [0, *wish, n]
        if len(edges) != num_stages + 1 or any(a >= b for a, b in itertools.pairwise(edges)):
            raise ConfigError(
                f"stage_cuts={list(wish)!r} for {num_stages} stages of {n} blocks.",
                "It names the first block of every stage but the first, in order, and no stage is empty.",
                f"Give {num_stages - 1} increasing numbers from 1 to {n - 1}.",
            )
        return list(itertools.pairwise(edges))
    costs = estimated_costs(model, blocks) if wish is None else wish
    if len(costs.blocks) != n:
        raise ConfigError(
            f"stage_cuts holds costs of {len(costs.blocks)} blocks, and {blocks.list_name or 'the model'} has {n}.",
            "Each block has a cost.",
            "Measure the model that is spread.",
        )
    return balance(costs, num_stages, schedule, pipeline_size)
