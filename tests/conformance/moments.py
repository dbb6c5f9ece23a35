"""Random operators on many elements: mean and variance are those of their distribution."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
import torch.nn.functional as F

COUNT = 200_000
DEVIATIONS = 6.0
"""Allowed distance of a sample's moments from the distribution's, in standard errors."""


def wrong_moments(device: str) -> list[str]:
    """Names of the random operators whose large sample has another mean or variance than its distribution.

    Args:
        device: Where to draw.
    """
    like = torch.empty(COUNT, device=device)
    one, half = torch.ones(COUNT, device=device), torch.full((COUNT,), 0.5, device=device)
    weights = torch.tensor([1.0, 3.0], device=device)
    cases: dict[str, tuple[Callable[[], torch.Tensor], float, float]] = {
        "rand": (lambda: torch.rand(COUNT, device=device), 1 / 2, 1 / 12),
        "rand_like": (lambda: torch.rand_like(like), 1 / 2, 1 / 12),
        "randn": (lambda: torch.randn(COUNT, device=device), 0, 1),
        "randn_like": (lambda: torch.randn_like(like), 0, 1),
        "randint": (lambda: torch.randint(5, (COUNT,), device=device), 2, 2),
        "randperm": (lambda: torch.randperm(COUNT, device=device)[: COUNT // 2] / COUNT, 1 / 2, 1 / 12),
        "normal_": (lambda: like.clone().normal_(3, 2), 3, 4),
        "uniform_": (lambda: like.clone().uniform_(-1, 3), 1, 16 / 12),
        "bernoulli": (lambda: torch.bernoulli(half / 2), 1 / 4, 3 / 16),
        "bernoulli_": (lambda: like.clone().bernoulli_(0.25), 1 / 4, 3 / 16),
        "exponential_": (lambda: like.clone().exponential_(2), 1 / 2, 1 / 4),
        "geometric_": (lambda: like.clone().geometric_(0.5), 2, 2),
        "log_normal_": (lambda: like.clone().log_normal_(0, 0.5).log(), 0, 1 / 4),
        "poisson": (lambda: torch.poisson(one * 4), 4, 4),
        "normal": (lambda: torch.normal(one, half), 1, 1 / 4),
        "multinomial": (lambda: torch.multinomial(weights, COUNT, replacement=True), 3 / 4, 3 / 16),
        "dropout": (lambda: F.dropout(one, 0.2), 1, 1 / 4),
        "dropout_": (lambda: F.dropout(one.clone(), 0.2, inplace=True), 1, 1 / 4),
        "alpha_dropout": (lambda: F.alpha_dropout(torch.randn(COUNT, device=device), 0.2), 0, 1),
        "rrelu": (lambda: F.rrelu(-one, 0.2, 0.4, training=True), -0.3, 0.04 / 12),
        "trunc_normal_": (lambda: torch.nn.init.trunc_normal_(like.clone()).clamp(-2, 2), 0, 0.7737),
    }
    torch.manual_seed(0)
    wrong = []
    for name, (draw, mean, variance) in cases.items():
        values = draw().double().cpu()
        near = (values - mean).square()
        errors = sqrt(variance / len(values)), near.std().item() / sqrt(len(values))
        if (
            abs(values.mean() - mean) > DEVIATIONS * errors[0]
            or abs(near.mean() - variance) > DEVIATIONS * errors[1] + 1e-4 * variance
        ):
            wrong.append(f"{name}: mean {values.mean():.4f} of {mean}, variance {near.mean():.4f} of {variance}")
    return wrong
