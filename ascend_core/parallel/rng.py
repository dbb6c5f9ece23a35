"""Random numbers in a step that runs in pieces on several ranks.

The user's own code (noise, augmentation, label smoothing by sampling) runs once per stage and must draw the same
numbers on each, or inputs and targets would not belong together. Blocks must draw different numbers on each stage, or
dropout masks would repeat down the model; ranks of one tensor-parallel group must agree in both. So every microbatch
gets two seeds, derived from the run's seed, the data-parallel rank and the step.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ascend_core.mesh import HybridMesh


class StepRng:
    """Seeds the random generators of a step and puts the old state back afterwards.

    Args:
        base_seed: The run's seed, equal on all ranks.
        dp_rank: Data-parallel rank: different batches draw different numbers.
        device: Device whose generator is seeded besides the CPU's, Python's and NumPy's.
    """

    def __init__(self, base_seed: int, dp_rank: int, device: torch.device) -> None:
        self.base_seed, self.dp_rank, self.device = base_seed, dp_rank, device
        self.step = 0
        self._stage = self._microbatch = 0
        self._user_state: tuple[Any, ...] = ()

    @classmethod
    def for_mesh(cls, mesh: HybridMesh, device: torch.device) -> StepRng:
        """Agree on a seed: rank 0's. Communication: one object broadcast over all ranks."""
        seed = [torch.initial_seed() % 2**63]
        torch.distributed.broadcast_object_list(seed, src=0)
        return cls(seed[0], mesh.rank("dp"), device)

    @contextmanager
    def user_code(self, stage: int, microbatch: int) -> Iterator[None]:
        """Run the user's step of one microbatch with the stream all stages share."""
        outside = generator_states(self.device)
        self._stage, self._microbatch = stage, microbatch
        self._seed("step", microbatch)
        try:
            yield
        finally:
            set_generator_states(outside, self.device)

    def enter_blocks(self) -> None:
        """Switch to the stage's own stream."""
        self._user_state = generator_states(self.device)
        self._seed("blocks", self._microbatch, self._stage)

    def leave_blocks(self) -> None:
        """Switch back to the shared stream, where it was left."""
        set_generator_states(self._user_state, self.device)

    def _seed(self, *key: object) -> None:
        text = repr((self.base_seed, self.dp_rank, self.step, *key)).encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """States of all generators that a model may draw from: torch's on the CPU and the device, Python's, NumPy's."""
    own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    return (torch.get_rng_state(), own, random.getstate(), np.random.get_state())


def set_generator_states(states: tuple[Any, ...], device: torch.device) -> None:
    """Put back what :func:`generator_states` returned."""
    cpu, own, python, numpy = states
    torch.set_rng_state(cpu)
    if own is not None:
        torch.get_device_module(device).set_rng_state(own)
    random.setstate(python)
    np.random.set_state(numpy)
