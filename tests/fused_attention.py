"""Rank functions: fused attention against F.scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fused_compare import BF16, differences, error_of, here, randn, torch_npu, wrong_cases

SCALE = 0.3


def _on(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(here())


def _compressed(rows: int = 2048) -> torch.Tensor:
    return torch.ones(rows, 2048, dtype=torch.bool, device=here()).triu(1)


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shown: torch.Tensor | None = None) -> torch.Tensor:
    """(batch, heads, sequence, dimension); True in ``shown`` shows a position; rows without any are zero."""
    out = F.scaled_dot_product_attention(q, k, v, shown, scale=SCALE, enable_gqa=True)
    return out if shown is None else torch.where(shown.any(-1, keepdim=True), out.nan_to_num(), 0)


def _rows(sq: int, skv: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(sq).view(-1, 1), torch.arange(skv).view(1, -1)


def _fused(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {"head_num": 4, "input_layout": "BNSD", "scale": SCALE, **options}
    return torch_npu.npu_fusion_attention(*tensors, **options)[0]


def layouts() -> list[str]:
    """Every layout, with two heads of the key for four of the query."""
    q, k, v = randn(2, 4, 5, 6), randn(2, 2, 7, 6, seed=1), randn(2, 2, 7, 6, seed=2)
    views = {
        "BNSD": (lambda t: t, lambda t: t), "BSND": (lambda t: t.transpose(1, 2), lambda t: t.transpose(1, 2)),
        "BSH": (lambda t: t.transpose(1, 2).flatten(2), lambda t: t.unflatten(2, (-1, 6)).transpose(1, 2)),
        "SBH": (lambda t: t.permute(2, 0, 1, 3).flatten(2), lambda t: t.unflatten(2, (-1, 6)).permute(1, 2, 0, 3)),
    }  # fmt: skip
    cases = {}
    for layout, (there, back) in views.items():
        inputs = [there(t).contiguous() for t in (q, k, v)]
        cases[layout] = differences(
            lambda *a, layout=layout: _fused(*a, input_layout=layout),
            lambda *a, there=there, back=back: there(_plain(*map(back, a))),
            inputs,
        )
    cases["bsh"] = differences(
        lambda *a: _fused(*a, input_layout="bsh"),
        lambda *a: views["BSH"][0](_plain(*map(views["BSH"][1], a))),
        [views["BSH"][0](t).contiguous() for t in (q, k, v)],
    )
    cases["bf16"] = differences(_fused, _plain, [t.bfloat16() for t in (q, k, v)], **BF16)
    cases["narrower value"] = differences(_fused, _plain, [q, k, v[..., :4].contiguous()])
    wide = differences(lambda *a: torch_npu.npu_fusion_attention_v2(*a, 4, "BNSD", scale=SCALE)[0], _plain, [q, k, v])
    graph = differences(lambda *a: torch_npu.npu_fusion_attention_v3(*a, 4, "BNSD", scale=SCALE)[0], _plain, [q, k, v])
    return wrong_cases({**cases, "v2": wide, "v3": graph})


def masks() -> list[str]:
    """D56: True hides. Each mode and shape of mask, and rows in which everything is hidden."""
    cases = {}
    for sq, skv in ((6, 6), (5, 8), (8, 5)):
        inputs = [randn(2, 4, sq, 6), randn(2, 2, skv, 6, seed=1), randn(2, 2, skv, 6, seed=2)]
        i, j = _rows(sq, skv)
        shift, prefix = skv - sq, [skv - 2, skv]
        first = torch.tensor(prefix).view(-1, 1, 1, 1) > j
        full = randn(2, 4, sq, skv, seed=3) > 0.3
        full[0, 1, 2] = True  # everything is hidden there
        band = (j <= i + 1) & (j >= i - 2)
        for name, shown, options in (
            ("full", ~full, {"atten_mask": full}),
            ("full, all heads", ~full[:, :1], {"atten_mask": full[:, :1]}),
            ("full, all batches", ~full[:1, :1], {"atten_mask": full[:1, :1]}),
            ("two dims uint8", ~full[0, 1], {"atten_mask": full[0, 1].to(torch.uint8)}),
            ("mode 1", ~full, {"atten_mask": full, "sparse_mode": 1, "pre_tockens": 0, "next_tockens": 0}),
            ("mode 0 band", band, {"atten_mask": ~band, "pre_tockens": 2, "next_tockens": 1}),
            ("mode 2", j <= i, {"atten_mask": _compressed(), "sparse_mode": 2}),
            ("mode 2, four dims", j <= i, {"atten_mask": _compressed()[None, None].to(torch.uint8), "sparse_mode": 2}),
            ("mode 3", j <= i + shift, {"atten_mask": _compressed(), "sparse_mode": 3}),
            ("mode 4", (j <= i + shift + 1) & (j >= i + shift - 2),
             {"atten_mask": _compressed(), "sparse_mode": 4, "pre_tockens": 2, "next_tockens": 1}),
            ("mode 5", (j <= i + shift) | first, {"atten_mask": ~((j <= i + shift) | first), "sparse_mode": 5, "prefix": prefix}),
            ("mode 6", (j <= i + shift) | first, {"atten_mask": _compressed(3072), "sparse_mode": 6, "prefix": prefix}),
            ("no mask, no mode", j >= 0, {"sparse_mode": 2, "next_tockens": 0}),
        ):  # fmt: skip
            given = {n: _on(o) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
            cases[f"{name} {sq}x{skv}"] = differences(
                lambda *a, given=given: _fused(*a, **given),
                lambda *a, shown=shown, sq=sq, skv=skv: _plain(*a, shown.expand(2, 4, sq, skv)),
                inputs,
            )
    return wrong_cases(cases)


def refused() -> dict[str, str]:
    """D57: masks of shapes and values that the operator does not take, and what it has no formula for."""
    q = randn(2, 4, 6, 8).to(here())
    ones = lambda *shape: torch.zeros(*shape, dtype=torch.bool, device=here())  # noqa: E731
    learned = torch.zeros(2, 4, 6, 6, device=here(), requires_grad=True)
    calls: dict[str, dict[str, Any]] = {
        "mask [S]": {"atten_mask": ones(6)}, "mask [B,S]": {"atten_mask": ones(2, 6)}, "mask [B,1,1,S]": {"atten_mask": ones(2, 1, 1, 6)},
        "mask [1,N,S,S]": {"atten_mask": ones(1, 4, 6, 6)}, "mask [B,S,S]": {"atten_mask": ones(2, 6, 6)},
        "float mask": {"atten_mask": ones(6, 6).float()}, "mode 2 with [S,S]": {"atten_mask": ones(6, 6), "sparse_mode": 2},
        "mode 3 upside down": {"atten_mask": ~_compressed(), "sparse_mode": 3}, "mode 9": {"sparse_mode": 9},
        "contradiction": {"atten_mask": ones(6, 6), "next_tockens": 0}, "layout": {"input_layout": "SBND"},
        "heads": {"head_num": 3}, "keep_prob": {"keep_prob": 0.0}, "padding_mask": {"padding_mask": ones(6, 6)},
        "pse shape": {"pse": randn(6, 6).to(here())}, "pse gradient": {"pse": learned}, "TND without lengths": {"input_layout": "TND"},
        "seed": {"keep_prob": 0.5, "seed": 3}, "CPU mask": {"atten_mask": ones(6, 6).cpu()},
    }  # fmt: skip
    seen = {name: error_of(lambda o=o: _fused(q, q, q, **o)) for name, o in calls.items()}
    long = randn(1, 1, 600, 8).to(here())
    seen["mask [B,1,1,S] of 600"] = error_of(lambda: _fused(long, long, long, head_num=1, atten_mask=ones(1, 1, 1, 600)))
    return seen


def sequences() -> list[str]:
    """TND: sequences one after another, also empty ones and ones left out; the layout of the statistics."""
    q, k, v = randn(12, 4, 6), randn(13, 2, 6, seed=1), randn(13, 2, 6, seed=2)
    q_ends, k_ends = [3, 3, 9, 0], [4, 6, 13, 0]

    def plain(*tensors: torch.Tensor) -> torch.Tensor:
        a, b, c = (t.transpose(0, 1)[None] for t in tensors)
        out, q0, k0 = [], 0, 0
        for q1, k1 in zip(q_ends[:3], k_ends[:3], strict=True):
            i, j = _rows(q1 - q0, k1 - k0)
            out.append(_plain(a[:, :, q0:q1], b[:, :, k0:k1], c[:, :, k0:k1], j <= i + (k1 - k0) - (q1 - q0)))
            q0, k0 = q1, k1
        return torch.cat([*out, torch.zeros(1, 4, 3, 6)], 2)[0].transpose(0, 1)

    options = {"atten_mask": _compressed(), "sparse_mode": 3}
    lengths = {"actual_seq_qlen": q_ends, "actual_seq_kvlen": k_ends}
    tensors = {n: torch.tensor(e) for n, e in lengths.items()}
    cases = {
        "v1": differences(lambda *a: _fused(*a, input_layout="TND", **options, **lengths), plain, [q, k, v]),
        "softmax_layout": differences(
            lambda *a: _fused(*a, input_layout="TND", softmax_layout="TND", **options, **lengths), plain, [q, k, v]
        ),
        "v3": differences(
            lambda *a: torch_npu.npu_fusion_attention_v3(*a, 4, "TND", scale=SCALE, **options, **tensors)[0], plain, [q, k, v]
        ),
    }
    ours = [_on(t) for t in (q, k, v)]
    by_block = torch_npu.npu_fusion_attention(*ours, 4, "TND", scale=SCALE, **options, **lengths)[1]
    by_token = torch_npu.npu_fusion_attention(*ours, 4, "TND", scale=SCALE, softmax_layout="TND", **options, **lengths)[1]
    scores = SCALE * torch.einsum("tnd,snd->nts", q[3:9], k[6:13].repeat_interleave(2, 1))
    i, j = _rows(6, 7)
    top = scores.masked_fill(j > i + 1, float("-inf")).amax(-1)
    if by_block.shape != (12, 4, 8) or not torch.allclose(
        by_block.view(-1, 8)[12:36].view(4, 6, 8).cpu(), top[..., None].expand(4, 6, 8)
    ):
        cases["statistics by block"] = ["differ"]
    if not torch.allclose(by_token[3:9].cpu(), top.t()[..., None].expand(6, 4, 8)):
        cases["statistics by token"] = ["differ"]
    return wrong_cases(cases)


def biases() -> list[str]:
    """The position bias before and after scaling, and the sink with its gradient."""
    q, k, v, sink = randn(2, 4, 5, 6), randn(2, 4, 7, 6, seed=1), randn(2, 4, 7, 6, seed=2), randn(4, seed=4)
    cases = {}
    for shape in ((2, 4, 5, 7), (2, 4, 1, 7), (1, 4, 5, 7)):
        pse = randn(*shape, seed=3)
        for name, factor, call in (
            ("v1", SCALE, lambda *a, p=pse: _fused(*a, pse=_on(p))),
            ("type 1", SCALE, lambda *a, p=pse: torch_npu.npu_fusion_attention_v2(*a, 4, "BNSD", pse=_on(p), scale=SCALE)[0]),
            ("type 0", 1.0, lambda *a, p=pse: torch_npu.npu_fusion_attention_v2(
                *a, 4, "BNSD", pse=_on(p), pse_type=0, scale=SCALE)[0]),
        ):  # fmt: skip
            cases[f"{name} {shape}"] = differences(
                call, lambda *a, p=factor * pse: F.scaled_dot_product_attention(*a, p, scale=SCALE), [q, k, v]
            )

    def with_sink(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        scores = torch.cat([SCALE * a @ b.transpose(-1, -2), s.view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1)
        return scores.softmax(-1)[..., :-1] @ c

    cases["sink"] = differences(lambda a, b, c, s: _fused(a, b, c, sink=s), with_sink, [q, k, v, sink])
    return wrong_cases(cases)


def statistics() -> list[str]:
    q, k, v = (_on(randn(2, 4, 5, 6, seed=s)) for s in range(3))
    hidden = torch.zeros(5, 5, dtype=torch.bool, device=here())
    hidden[2] = True
    out, top, total, empty, seed, offset, numbers = torch_npu.npu_fusion_attention(
        q, k, v, 4, "BNSD", atten_mask=hidden, scale=SCALE
    )
    scores = SCALE * q.cpu() @ k.cpu().transpose(-1, -2)
    rows = [0, 1, 3, 4]
    seen = {
        "shape": top.shape == total.shape == (2, 4, 5, 8) and top.dtype == total.dtype == torch.float32,
        "maximum": torch.allclose(top.cpu()[:, :, rows], scores.amax(-1)[:, :, rows, None].expand(2, 4, 4, 8)),
        "sum": torch.allclose((top + total.log()).cpu()[:, :, rows, 0], scores.logsumexp(-1)[:, :, rows], atol=1e-5),
        "hidden row": not out[:, :, 2].any() and out.isfinite().all().item() and not total[:, :, 2].any(),
        "rest": empty.numel() == 0 and (seed, offset, numbers) == (0, 0, 2 * 4 * 5 * 5),
    }
    merged = _two_halves(q, k, v)
    seen["gradient from merged statistics"] = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*merged, strict=True))
    return [name for name, right in seen.items() if not right]


def _two_halves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Ring attention: the gradient by the first half of the keys, with statistics of all keys; ours and plain."""
    leaves = [t.cpu().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, scale=SCALE)
    dout = randn(*out.shape, seed=9)
    out.backward(dout)
    whole, top, total, *_ = torch_npu.npu_fusion_attention(q, k, v, 4, "BNSD", scale=SCALE)
    _, dk, dv, _, _ = torch_npu.npu_fusion_attention_grad(
        q,
        k[:, :, :2],
        v[:, :, :2],
        _on(dout),
        4,
        "BNSD",
        softmax_max=top,
        softmax_sum=total,
        attention_in=whole,
        scale_value=SCALE,
    )
    return [dk.cpu(), dv.cpu()], [leaves[1].grad[:, :, :2], leaves[2].grad[:, :, :2]]


def dropout() -> list[str]:
    """The same mask forward and backward, from torch_npu's generator; and an outside mask."""
    q, k, eye = randn(2, 4, 16, 16), randn(2, 4, 16, 16, seed=1), torch.eye(16).expand(2, 4, 16, 16)
    wrong = []
    torch.npu.manual_seed(11)
    state = torch.npu.get_rng_state()
    leaves = [_on(t).requires_grad_() for t in (q, k, eye)]
    out, *_, seed, offset, numbers = torch_npu.npu_fusion_attention(*leaves, 4, "BNSD", scale=SCALE, keep_prob=0.6)
    p = (SCALE * q @ k.transpose(-1, -2)).softmax(-1)
    kept = out.detach().cpu() != 0  # the value is the identity, so the result is the dropped softmax
    plain = [t.clone().requires_grad_() for t in (q, k, eye)]
    expected = torch.where(kept, (SCALE * plain[0] @ plain[1].transpose(-1, -2)).softmax(-1), 0) / 0.6 @ plain[2]
    weight = randn(2, 4, 16, 16, seed=5)
    (out * _on(weight)).sum().backward()
    (expected * weight).sum().backward()
    torch.npu.set_rng_state(state)
    again = _fused(*(t.detach() for t in leaves), keep_prob=0.6)
    third = torch_npu.npu_fusion_attention_v3(*(t.detach() for t in leaves), 4, "BNSD", scale=SCALE, keep_prob=0.6)
    mask = torch_npu._npu_dropout_gen_mask(leaves[0].detach(), [2, 4, 16, 16], p=0.4, seed=seed, offset=offset)
    outside = torch_npu.npu_fusion_attention(
        *(t.detach() for t in leaves), 4, "BNSD", scale=SCALE, keep_prob=0.6, dropout_mask=mask, seed=seed, offset=offset
    )
    checks = {
        "values": torch.allclose(out.detach().cpu(), torch.where(kept, p, 0) / 0.6, atol=1e-6),
        "share": abs(float(kept.float().mean()) - 0.6) < 0.05,
        "numbers": numbers == 2 * 4 * 16 * 16,
        "same state, same mask": torch.equal(again, out.detach()),
        "the state moves on": not torch.equal(third[0], again),
        "v3 returns tensors": third[4].device.type == "cpu" and third[4].dtype == torch.int64 and int(third[5]) > offset,
        "outside mask": torch.equal(outside[0], out.detach()) and outside[4:] == (seed, offset, numbers),
    }
    wrong += [name for name, right in checks.items() if not right]
    for name, ours, theirs in zip("qkv", leaves, plain, strict=True):
        if not torch.allclose(ours.grad.cpu(), theirs.grad, atol=1e-5):
            wrong.append(f"gradient of {name}")
    return wrong
