"""A mixture-of-experts layer in plain torch, which trains in one process and whose experts can be spread over ranks.

The experts follow the same protocol as those of Hugging Face's MoE models (:mod:`ascend_core.parallel.expert`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ascend_core import _shim
from ascend_core.errors import ConfigError

_ACTIVATIONS = ("swiglu", "gelu")


class GroupedExperts(nn.Module):
    """MLPs that are called for their own tokens only, with their weights stacked on dim 0.

    Args:
        num_experts: Number of experts E.
        dim: Size of a token.
        hidden_dim: Size between the two projections H.
        activation: ``"swiglu"``: ``down(silu(gate(x)) * up(x))``; ``"gelu"``: ``down(gelu(up(x)))``.

    Shape:
        ``gate_up_proj (E, 2H or H, dim)``, ``down_proj (E, dim, H)``.
    """

    def __init__(self, num_experts: int, dim: int, hidden_dim: int, activation: str = "swiglu") -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ConfigError(f"activation={activation!r} is not known.", "", f"Use one of {', '.join(_ACTIVATIONS)}.")
        self.num_experts, self.hidden_dim, self.activation = num_experts, dim, activation
        columns = 2 * hidden_dim if activation == "swiglu" else hidden_dim
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, columns, dim))
        self.down_proj = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        for weight in (self.gate_up_proj, self.down_proj):
            bound = weight.shape[-1] ** -0.5  # as nn.Linear does
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return ``sum over k of weights[t, k] * expert[index[t, k]](tokens[t])``.

        Args:
            tokens: ``(T, dim)``.
            index: ``(T, K)``, int64; ``num_experts`` stands for no expert.
            weights: ``(T, K)``.

        Returns:
            ``(T, dim)`` in the type of ``tokens``.
        """
        up, down = self.gate_up_proj.unbind(0), self.down_proj.unbind(0)
        experts = [functools.partial(self._expert, up=u, down=d) for u, d in zip(up, down, strict=True)]
        return mix_experts(experts, tokens, index, weights)

    def _expert(self, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x, up)
        if self.activation == "gelu":
            return F.linear(F.gelu(hidden), down)
        gate, value = hidden.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * value, down)


class ExpertList(nn.ModuleList):
    """Expert modules of your own, each ``(R, dim) -> (R, dim)``, behind the forward of :class:`GroupedExperts`."""

    @property
    def num_experts(self) -> int:
        """Number of experts, on all ranks together."""
        return len(self)

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See :meth:`GroupedExperts.forward`; an expert without tokens is not called."""
        return mix_experts(list(self), tokens, index, weights)


def mix_experts(
    experts: Sequence[Callable[[torch.Tensor], torch.Tensor]], tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Call each expert once with all of its tokens; see :meth:`GroupedExperts.forward`."""
    chosen, number = index.reshape(-1), len(experts)
    counts = torch.bincount(chosen, minlength=number + 1)[:number].tolist()
    order = torch.argsort(chosen, stable=True)[: sum(counts)]
    token_of = order // index.shape[1]
    rows = tokens[token_of].split(counts)
    results = [expert(x) for expert, x in zip(experts, rows, strict=True) if x.shape[0]]
    if not results:
        return torch.zeros_like(tokens)
    weighted = torch.cat(results) * weights.reshape(-1)[order, None]
    return torch.zeros_like(tokens).index_add(0, token_of, weighted.to(tokens.dtype))


class MoELayer(nn.Module):
    """Router, top-k choice and experts.

    Args:
        dim: Size of a token.
        hidden_dim: Size inside an expert.
        num_experts: Number of experts E.
        top_k: Experts of each token K.
        activation: See :class:`GroupedExperts`; ignored when ``experts`` is given.
        normalize_weights: Divide the chosen probabilities by their sum.
        capacity_factor: None keeps every token. Otherwise an expert takes at most
            ``ceil(capacity_factor * T * K / E)`` of the T tokens of one call on one rank; the rest of its tokens lose it.
            First choices are served before second ones, earlier tokens before later ones.
        load_balance_coefficient: Factor of the load-balance loss; 0 computes none.
        experts: Experts of your own: an ``nn.ModuleList`` of modules ``(R, dim) -> (R, dim)``, or a module with the
            forward of :class:`GroupedExperts`.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        top_k: int = 2,
        activation: str = "swiglu",
        normalize_weights: bool = True,
        capacity_factor: float | None = None,
        load_balance_coefficient: float = 0.0,
        experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ConfigError(f"top_k={top_k} of {num_experts} experts.", "", "Choose 1 up to the number of experts.")
        if capacity_factor is not None and capacity_factor <= 0:
            raise ConfigError(
                f"capacity_factor={capacity_factor}.", "Every token would be dropped.", "Use a positive number or None."
            )
        self.num_experts, self.top_k, self.normalize_weights = num_experts, top_k, normalize_weights
        self.capacity_factor, self.load_balance_coefficient = capacity_factor, load_balance_coefficient
        self.router = nn.Linear(dim, num_experts, bias=False)
        if experts is None:
            experts = GroupedExperts(num_experts, dim, hidden_dim, activation)
        elif isinstance(experts, nn.ModuleList):
            experts = ExpertList(experts)
        if getattr(experts, "num_experts", None) != num_experts:
            raise ConfigError(
                f"num_experts={num_experts}, but the experts count {getattr(experts, 'num_experts', None)}.",
                "The router chooses among num_experts.",
                "Give as many experts; a module of your own says their number in its attribute num_experts.",
            )
        self.experts = experts
        self.load_balance_loss: torch.Tensor | None = None
        self.load_balance_loss_asked = False
        self.sum_over_replicas: Callable[[torch.Tensor], int] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix the experts' outputs.

        Args:
            x: ``(*, dim)``.

        Returns:
            ``(*, dim)``.
        """
        tokens = x.reshape(-1, x.shape[-1])
        probabilities = self.router(tokens).float().softmax(-1)
        weights, index = probabilities.topk(self.top_k, dim=-1)
        if self.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.load_balance_coefficient and self.training and torch.is_grad_enabled():
            loss = self.load_balance_coefficient * self._balance(probabilities, index)
            self.load_balance_loss = self.load_balance_loss if _shim.inside_backward() else loss
        if self.capacity_factor is not None:
            index = self._drop(index)
        return self.experts(tokens, index, weights.to(tokens.dtype)).reshape(x.shape)

    def _drop(self, index: torch.Tensor) -> torch.Tensor:
        """Take tokens off experts that are full."""
        assert self.capacity_factor is not None
        capacity = math.ceil(self.capacity_factor * index.numel() / self.num_experts)
        by_choice = index.t().reshape(-1)  # first choices of all tokens, then second ones
        place = F.one_hot(by_choice, self.num_experts).cumsum(0).gather(1, by_choice[:, None]).squeeze(1)
        return torch.where(place > capacity, self.num_experts, by_choice).view(self.top_k, -1).t()

    def _balance(self, probabilities: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """E * sum over experts of (share of the choices) * (mean probability); 1 when balanced.

        The shares are those of all replicas. The mean over replicas of value and gradient is the one of the whole batch.
        """
        totals = torch.bincount(index.reshape(-1), minlength=self.num_experts).float()
        totals = torch.cat([totals, totals.new_tensor([probabilities.shape[0]])])
        replicas = 1 if self.sum_over_replicas is None else self.sum_over_replicas(totals)
        shares = totals[:-1] / (totals[-1] * self.top_k)
        return self.num_experts * replicas / totals[-1] * (shares * probabilities.sum(0)).sum()


def load_balance_loss(model: nn.Module) -> torch.Tensor | float:
    """Add up the load-balance losses of the last forward, coefficients included; add it to the loss of the step.

    In a pipeline the step must add it as it is; the value holds the last stage's layers only, the gradients all.

    Args:
        model: The model, or any module that holds its MoE layers.

    Returns:
        0-dim tensor, or 0.0 when no layer has computed one. Each is returned once.
    """
    total: torch.Tensor | float = 0.0
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.load_balance_loss_asked = True
            if module.load_balance_loss is not None:
                total = total + module.load_balance_loss
                module.load_balance_loss = None
    return total
