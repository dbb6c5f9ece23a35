"""One step of Adam and AdamW on the caller's tensors ``out=(var, m, v)``.

torch_npu's ``NpuFused*`` optimizers need no operator of their own: they join tensors and use foreach-like arithmetic.
"""

from __future__ import annotations

import math

import torch

from ascend_emulator.fused.precision import wide
from ascend_emulator.fused.registry import OP_TEST, formula


def _targets(out: list[torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if len(out) != 3:
        raise RuntimeError(f"{name}: out must be (var, m, v)")
    var, m, v = out
    return var, m, v


@formula("npu_apply_adam.out", source=OP_TEST, checked="torch.optim.Adam", ignored="use_locking", aliases=True)
def apply_adam(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: torch.Tensor,
    use_nesterov: bool | None,
    out: list[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Adam as TensorFlow's ApplyAdam: the powers belong to this step, and epsilon is added after the bias correction.

    var -= lr * sqrt(1 - beta2_power) / (1 - beta1_power) * m / (epsilon + sqrt(v))
    """
    var, m, v = _targets(out, "npu_apply_adam")
    g = wide(grad)
    new_m = wide(m) + (1 - beta1) * (g - wide(m))
    new_v = wide(v) + (1 - beta2) * (g * g - wide(v))
    rate = lr * math.sqrt(1 - beta2_power) / (1 - beta1_power)
    direction = new_m * beta1 + (1 - beta1) * g if use_nesterov else new_m
    new_var = wide(var) - rate * direction / (epsilon + new_v.sqrt())
    for target, value in ((var, new_var), (m, new_m), (v, new_v)):
        target.copy_(value)
    return var, m, v


@formula("npu_apply_adam_w.out", source=OP_TEST, checked="torch.optim.AdamW", aliases=True)
def apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: torch.Tensor,
    max_grad_norm: torch.Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    out: list[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """AdamW; the powers are those of the step before.

    With ``amsgrad``, ``max_grad_norm`` holds the largest v so far and is updated in place: that it is, the documentation
    does not say.
    """
    var, m, v = _targets(out, "npu_apply_adam_w")
    g = -wide(grad) if maximize else wide(grad)
    new_m = wide(m) * beta1 + (1 - beta1) * g
    new_v = wide(v) * beta2 + (1 - beta2) * g * g
    second = new_v
    if amsgrad:
        if max_grad_norm is None:
            raise RuntimeError("npu_apply_adam_w: amsgrad needs max_grad_norm")
        second = torch.maximum(wide(max_grad_norm), new_v)
        max_grad_norm.copy_(second)
    denominator = (second / (1 - beta2_power * beta2)).sqrt() + epsilon
    new_var = wide(var) * (1 - lr * weight_decay) - lr * new_m / (1 - beta1_power * beta1) / denominator
    for target, value in ((var, new_var), (m, new_m), (v, new_v)):
        target.copy_(value)
    return var, m, v
