"""Rank functions: losses, optimizers, dropout and float status of torch_npu against plain torch."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fused_compare import differences, error_of, here, randn, torch_npu, wrong_cases

from ascend_emulator import float_status


def losses() -> list[str]:
    x, target, weight = randn(5, 7), torch.tensor([0, 3, 6, 2, 2]), randn(7, seed=1).abs()
    labels, score, yes = randn(5, 7, seed=2).softmax(-1), randn(4, 8), randn(4, 8, seed=1).sigmoid()
    on = lambda t: t.to(here())  # noqa: E731
    cases = {
        f"npu_cross_entropy_loss {options}": differences(
            lambda t, options=options: torch_npu.npu_cross_entropy_loss(
                t, on(target), **{k: on(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
            )[0],
            lambda t, options=options: torch.atleast_1d(F.cross_entropy(t, target, **options)),
            [x],
            gradient=gradient,
        )
        for options, gradient in (
            ({}, True), ({"reduction": "sum", "weight": weight, "ignore_index": 2}, True), ({"reduction": "none"}, True),
            ({"label_smoothing": 0.1, "weight": weight}, False),
        )
    }  # fmt: skip
    cases["log probabilities"] = differences(
        lambda t: torch_npu.npu_cross_entropy_loss(t, on(target))[1], lambda t: t.log_softmax(-1), [x], gradient=False
    )
    cases["npu_softmax_cross_entropy_with_logits"] = differences(
        lambda t: torch_npu.npu_softmax_cross_entropy_with_logits(t, on(labels)),
        lambda t: -(labels * t.log_softmax(-1)).sum(-1),
        [x],
    )
    for reduction in ("mean", "sum", "none"):
        cases[f"binary_cross_entropy_with_logits {reduction}"] = differences(
            lambda t, r=reduction: F.binary_cross_entropy_with_logits(t, on(yes), pos_weight=on(yes[0]), reduction=r),
            lambda t, r=reduction: F.binary_cross_entropy_with_logits(t, yes, pos_weight=yes[0], reduction=r),
            [score],
        )
    cases["renorm"] = differences(lambda t: t.renorm(2, 0, 1.0), lambda t: t.renorm(2, 0, 1.0), [score])
    mask = randn(2, 3, 4, 4, seed=3) > 0.5
    cases["npu_scaled_masked_softmax"] = differences(
        lambda t: torch_npu.npu_scaled_masked_softmax(t, on(mask), 0.5),
        lambda t: (t * 0.5).masked_fill(mask, -10000.0).softmax(-1),
        [randn(2, 3, 4, 4)],
    )
    for name, text, call in (
        ("ignored target", "is not in [0, 7)", lambda: torch_npu.npu_cross_entropy_loss(on(x), on(target) - 100)),
        ("smoothed gradient", "does not support label_smoothing", lambda: torch_npu.npu_cross_entropy_loss(
            on(x).requires_grad_(), on(target), label_smoothing=0.1)[0].backward()),
        ("z-loss", "'return_zloss'", lambda: torch_npu.npu_cross_entropy_loss(on(x), on(target), return_zloss=True)),
    ):  # fmt: skip
        if text not in error_of(call):
            cases[name] = [error_of(call)]
    return wrong_cases(cases)


def _train(make: Any, npu: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    model = copy.deepcopy(model).to(here()) if npu else model
    optimizer = make(model.parameters())
    for step in range(4):
        x = randn(8, 6, seed=step)
        optimizer.zero_grad()
        model(x.to(here()) if npu else x).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def optimizers() -> list[str]:
    wrong = []
    for name, options in {
        "AdamW": {"lr": 1e-2, "weight_decay": 0.1}, "Adam": {"lr": 1e-2, "amsgrad": True},
        "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "Adadelta": {"lr": 1.0}, "RMSprop": {"lr": 1e-2, "momentum": 0.5},
    }.items():  # fmt: skip
        theirs = _train(lambda p: getattr(torch.optim, name)(p, **options), npu=False)
        ours = _train(lambda p: getattr(torch_npu.optim, f"NpuFused{name}")(p, **options), npu=True)
        if not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(theirs, ours, strict=True)):
            wrong.append(f"NpuFused{name}: {max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True))}")
    start = randn(5)
    for kind in ("npu_apply_adam_w", "npu_apply_adam"):
        reference = torch.nn.Parameter(start.clone())
        plain = (
            torch.optim.AdamW([reference], 1e-2, weight_decay=0.1, amsgrad=True)
            if kind.endswith("w")
            else torch.optim.Adam([reference], 1e-2, eps=0)
        )
        var, m, v, top = (t.to(here()) for t in (start.clone(), torch.zeros(5), torch.zeros(5), torch.zeros(5)))
        for step in range(1, 4):
            reference.grad = randn(5, seed=step)
            plain.step()
            grad = reference.grad.to(here())
            if kind.endswith("w"):
                before = 0.9 ** (step - 1), 0.999 ** (step - 1)
                results = torch_npu.npu_apply_adam_w(
                    *before, 1e-2, 0.1, 0.9, 0.999, 1e-8, grad, top, True, False, out=(var, m, v)
                )
            else:  # epsilon stands elsewhere, so it is zero
                results = torch_npu.npu_apply_adam(
                    0.9**step, 0.999**step, 1e-2, 0.9, 0.999, 0.0, grad, False, False, out=(var, m, v)
                )
        if not torch.allclose(var.cpu(), reference.detach(), atol=1e-6) or results[0].data_ptr() != var.data_ptr():
            wrong.append(f"{kind}: {var.cpu() - reference.detach()}")
    return wrong


def dropout() -> list[str]:
    x = randn(40, 50).to(here()).requires_grad_()
    torch.npu.manual_seed(5)
    state = torch.npu.get_rng_state()
    y, mask = torch_npu._npu_dropout(x, 0.3)
    y.sum().backward()
    kept = y.detach() != 0
    torch.npu.set_rng_state(state)
    again, _ = torch_npu._npu_dropout(x.detach(), 0.3)
    other, _ = torch_npu._npu_dropout(x.detach(), 0.3)
    done, _ = torch_npu.npu_dropout_do_mask(x.detach(), mask, 0.3)
    seen = {
        "kept values": torch.allclose(y[kept], x[kept] / 0.7),
        "share": abs(float(kept.float().mean()) - 0.7) < 0.05,
        "gradient": torch.allclose(x.grad, kept / 0.7),
        "same state, same mask": torch.equal(again, y.detach()),
        "the state moves on": not torch.equal(other, again),
        "a mask again": torch.equal(done, y.detach()),
        "mask in bits": mask.dtype == torch.uint8 and mask.numel() == 256,  # 2000 bits, filled up to a multiple of 128
        "nothing kept": not torch_npu._npu_dropout(x.detach(), 1.0)[0].any(),
    }
    return [name for name, right in seen.items() if not right]


def overflow() -> list[str]:
    device = here().index
    status = torch_npu.npu_alloc_float_status(torch.ones(1, device=here()))
    float_status.clear(device)
    before = torch_npu.npu_get_float_status(status)
    inf = torch.full((3,), float("inf"), device=here())
    unseen = torch_npu._amp_foreach_non_finite_check([inf])
    float_status.raise_flag(device)
    float_status.raise_flag(device + 1)
    raised = torch_npu.npu_get_float_status(status)
    checked = torch_npu._amp_foreach_non_finite_check([inf]), torch_npu._amp_foreach_non_finite_check([inf])
    float_status.raise_flag(device)
    cleared = torch_npu.npu_clear_float_status(status), torch_npu.npu_get_float_status(status)
    flag = error_of(torch.npu.utils.get_npu_overflow_flag)
    seen = {
        "allocated": status.tolist() == [0.0] * 8 and status.dtype == torch.float32,
        "before": before.tolist() == [0] * 8 and before.dtype == torch.int32,
        "the flag tells, not the gradients": unseen is False,
        "raised": raised.tolist() == [1] + [0] * 7,
        "checked and cleared": checked == (True, False),
        "cleared": cleared[0].tolist() == [0.0] * 8 and cleared[1].tolist() == [0] * 8,
        "only this device": float_status.flag(device + 1),
        "inf/nan mode": "Unsupported api when soc_version >= Ascend910B1" in flag,
        "npu_check_overflow": torch.npu.utils.npu_check_overflow(inf) and not torch.npu.utils.npu_check_overflow(status),
        "mode": "mode only supported" in error_of(lambda: torch_npu.npu_get_float_status(status, 2)),
    }
    float_status.clear(device + 1)
    return [name for name, right in seen.items() if not right]


def waits_for_communication() -> bool:
    """A fused operator after a collective that a late peer delays."""
    t = torch.ones(1000, device=here())
    dist.all_reduce(t.clone())  # the first one creates the communicator
    torch.npu.synchronize()
    if dist.get_rank() == 0:
        time.sleep(0.3)
    dist.all_reduce(t, async_op=True).wait()
    return bool((torch_npu.npu_silu(t).cpu() == F.silu(torch.full((1000,), 2.0))).all())


def rules() -> dict[str, str]:
    """Errors: unknown operators, devices, types; and that work waits for communication."""
    x = torch.ones(2, 8, device=here())
    gamma = torch.ones(8, device=here())
    elsewhere = torch.ones(8, device=torch.device("npu", 7))
    return {
        "unknown": error_of(lambda: torch_npu.npu_deep_norm(x, x, gamma, gamma)),
        "in Python": error_of(lambda: torch_npu.npu.set_op_timeout_ms(-1)),
        "unknown aclnn": error_of(lambda: torch_npu.npu_clipped_swiglu(x)),
        "own code": str(torch_npu.npu_reshape(x, (4, 4)).shape),
        "cpu": error_of(lambda: torch_npu.npu_rms_norm(x, gamma.cpu())),
        "other device": error_of(lambda: torch_npu.npu_rms_norm(x, elsewhere)),
        "float64": error_of(lambda: torch_npu.npu_rms_norm(x.cpu().double().npu(), gamma.cpu().double().npu())),
        "odd": error_of(lambda: torch_npu.npu_swiglu(x[:, :7])),
    }
