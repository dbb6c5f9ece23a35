"""Rank functions: torch_npu's own operators against plain torch formulas."""

from __future__ import annotations

from typing import Any

import numpy
import torch
import torch.nn.functional as F
from fused_compare import BF16, differences, error_of, here, randn, torch_npu, wrong_cases


def activations() -> list[str]:
    x, wide = randn(4, 6), randn(3, 8, 5)
    fast = lambda t: t * torch.sigmoid(1.702 * t)  # noqa: E731
    cases = {
        "npu_fast_gelu": differences(torch_npu.npu_fast_gelu, fast, [x]),
        "fast_gelu": differences(torch_npu.fast_gelu, fast, [x]),
        "npu_gelu": differences(torch_npu.npu_gelu, F.gelu, [x]),
        "npu_gelu tanh": differences(
            lambda t: torch_npu.npu_gelu(t, approximate="tanh"), lambda t: F.gelu(t, approximate="tanh"), [x]
        ),
        "npu_silu": differences(torch_npu.npu_silu, F.silu, [x]),
        "npu_silu_": differences(lambda t: torch_npu.npu_silu_(t * 1), F.silu, [x], gradient=False),
        "npu_mish": differences(torch_npu.npu_mish, F.mish, [x]),
        "npu_swiglu": differences(lambda t: torch_npu.npu_swiglu(t, dim=1), lambda t: F.silu(t[:, :4]) * t[:, 4:], [wide]),
        "npu_swiglu bf16": differences(torch_npu.npu_swiglu, lambda t: F.silu(t[:, :3]) * t[:, 3:], [x.bfloat16()], **BF16),
        "npu_geglu": differences(
            lambda t: torch_npu.npu_geglu(t)[0], lambda t: F.gelu(t[:, 3:], approximate="tanh") * t[:, :3], [x]
        ),
        "npu_geglu left": differences(
            lambda t: torch_npu.npu_geglu(t, dim=1, approximate=0, activate_left=True)[0],
            lambda t: F.gelu(t[:, :4]) * t[:, 4:],
            [wide],
        ),
        "npu_geglu second result": differences(
            lambda t: torch_npu.npu_geglu(t, -1, 0)[1], lambda t: F.gelu(t[:, 3:]), [x], gradient=False
        ),
    }
    once = x.half().to(here())  # computed in float32 and rounded once: the same bits as that
    if not torch.equal(torch_npu.npu_fast_gelu(once).cpu(), fast(x.half().float()).half()):
        cases["npu_fast_gelu float16"] = ["is not rounded once"]
    kept = once.clone()
    if torch_npu.npu_silu_(kept) is not kept or torch.equal(kept, once):
        cases["npu_silu_"] += ["does not write to the caller's tensor"]
    return wrong_cases(cases)


def norms() -> list[str]:
    x, other, gamma, beta = randn(3, 5, 8), randn(3, 5, 8, seed=1), randn(8, seed=2), randn(8, seed=3)
    two = randn(5, 8, seed=4)
    rstd = lambda t: torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6)  # noqa: E731
    cases = {
        "npu_rms_norm": differences(
            lambda t, g: torch_npu.npu_rms_norm(t, g, 1e-5)[0], lambda t, g: F.rms_norm(t, (8,), g, 1e-5), [x, gamma]
        ),
        "npu_rms_norm two dims": differences(
            lambda t, g: torch_npu.npu_rms_norm(t, g)[0], lambda t, g: F.rms_norm(t, (5, 8), g, 1e-6), [x, two]
        ),
        "npu_rms_norm bf16": differences(
            lambda t, g: torch_npu.npu_rms_norm(t, g)[0],
            lambda t, g: F.rms_norm(t, (8,), g, 1e-6),
            [x.bfloat16(), gamma.bfloat16()],
            atol=6e-2, rtol=2e-2,  # the gradient of gamma is a sum over 15 rows
        ),
        "npu_rms_norm rstd": differences(lambda t: torch_npu.npu_rms_norm(t, gamma.to(here()))[1], rstd, [x], gradient=False),
        "npu_add_rms_norm": differences(
            torch_npu.npu_add_rms_norm,
            lambda a, b, g: (F.rms_norm(a + b, (8,), g, 1e-6), rstd(a + b), a + b),
            [x, other, gamma],
            gradient=False,
        ),
        "npu_gemma_rms_norm": differences(
            torch_npu.npu_gemma_rms_norm, lambda t, g: (F.rms_norm(t, (8,), 1 + g, 1e-6), rstd(t)), [x, gamma], gradient=False
        ),
        "npu_add_layer_norm": differences(
            lambda a, b, g, h: torch_npu.npu_add_layer_norm(a, b, g, h, 1e-5, True)[::3],
            lambda a, b, g, h: (F.layer_norm(a + b, (8,), g, h, 1e-5), a + b),
            [x, other, gamma, beta],
        ),
    }  # fmt: skip
    a = x.to(here()).requires_grad_()
    text = error_of(lambda: torch_npu.npu_add_rms_norm(a, a, gamma.to(here()))[0].sum().backward())
    if "derivative for npu::npu_add_rms_norm is not implemented" not in text:
        cases["npu_add_rms_norm has no derivative"] = [text]
    return wrong_cases(cases)


def rotary() -> list[str]:
    x, cos, sin = randn(2, 5, 3, 8), randn(1, 5, 1, 8, seed=1), randn(1, 5, 1, 8, seed=2)

    def half(t: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        out = t * c
        out[..., :4] = out[..., :4] - t[..., 4:] * s[..., :4]
        out[..., 4:] = out[..., 4:] + t[..., :4] * s[..., 4:]
        return out

    def interleave(t: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        out = t * c
        out[..., ::2] = out[..., ::2] - t[..., 1::2] * s[..., ::2]
        out[..., 1::2] = out[..., 1::2] + t[..., ::2] * s[..., 1::2]
        return out

    def applied(q: torch.Tensor, c: torch.Tensor, s: torch.Tensor, mode: str) -> list[torch.Tensor]:
        query, key = q.clone(), 2 * q
        results = torch_npu.npu_apply_rotary_pos_emb(query, key, c, s, "BSND", mode)
        return [*results, query, key]

    cases = {
        "npu_rotary_mul": differences(torch_npu.npu_rotary_mul, half, [x, cos, sin]),
        "npu_rotary_mul interleave": differences(
            lambda *a: torch_npu.npu_rotary_mul(*a, rotary_mode="interleave"), interleave, [x, cos, sin]
        ),
        "npu_rotary_mul bf16": differences(
            torch_npu.npu_rotary_mul, half, [t.bfloat16() for t in (x, cos, sin)], atol=6e-2, rtol=2e-2  # sums of 6 for cos, sin
        ),
        "npu_rotary_mul rotate": differences(
            lambda t, c, s, r: torch_npu.npu_rotary_mul(t, c, s, rotate=r),
            lambda t, c, s, r: t * c + (t @ r) * s,
            [x, cos, sin, randn(8, 8)],
            gradient=False,
        ),
        "npu_interleave_rope": differences(
            torch_npu.npu_interleave_rope,
            lambda t, c, s: half(t.unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2), c, s),
            [x, cos, sin],
            gradient=False,
        ),
    }  # fmt: skip
    for mode, formula in (("half", half), ("interleave", interleave)):
        cases[f"npu_apply_rotary_pos_emb {mode}"] = differences(
            lambda *a, mode=mode: applied(*a, mode),
            lambda t, c, s, formula=formula: [formula(t, c, s), formula(2 * t, c, s)] * 2,
            [x, cos, sin],
            gradient=False,
        )
    return wrong_cases(cases)


def products() -> list[str]:
    x, w, b = randn(6, 8), randn(4, 8, seed=1), randn(4, seed=2)
    a, c = randn(3, 5, 4, seed=3), randn(4, 6, seed=4)
    group = lambda g: torch.tensor(g, device=here())  # noqa: E731
    weights, rows = randn(3, 8, 4, seed=5), randn(6, 4, seed=6)
    expected = lambda t, ws: torch.cat([t[:2] @ ws[0], t[2:2] @ ws[1], t[2:] @ ws[2]])  # noqa: E731

    def by_rows(t: torch.Tensor, ws: torch.Tensor) -> Any:
        single = torch_npu.npu_grouped_matmul([t], [ws], group_list=group([2, 2, 6]), split_item=2, group_type=0)
        sizes = torch_npu.npu_grouped_matmul(
            [t], list(ws), group_list=group([2, 0, 4]), split_item=3, group_type=0, group_list_type=1
        )
        apart = torch_npu.npu_grouped_matmul([t], list(ws), group_list=group([2, 2, 6]), split_item=0, group_type=0)
        older = torch_npu.npu_grouped_matmul([t], list(ws), group_list=[2, 2, 6], split_item=2)
        silu = torch_npu.npu_grouped_matmul(
            [t], [ws], bias=list(b.to(here()).expand(3, 4)), group_list=group([2, 2, 6]), split_item=2, group_type=0, act_type=5
        )
        return [single[0], sizes[0], torch.cat(apart), older[0], silu[0]]

    def by_columns(t: torch.Tensor, r: torch.Tensor) -> Any:
        return torch_npu.npu_grouped_matmul(
            [t.t()], [r], group_list=group([2, 0, 4]), split_item=3, group_type=2, group_list_type=1
        )[0]

    def added(t: torch.Tensor, r: torch.Tensor) -> Any:
        total = torch.ones(3, 8, 4, device=here())
        return torch_npu.npu_grouped_matmul_add_(total, t, r, group([2, 2, 6])), total

    per_group = lambda t, r: torch.stack([t[:2].t() @ r[:2], torch.zeros(8, 4), t[2:].t() @ r[2:]])  # noqa: E731
    cases = {
        "npu_linear": differences(torch_npu.npu_linear, F.linear, [x, w, b]),
        "npu_linear bf16": differences(
            torch_npu.npu_linear, F.linear, [t.bfloat16() for t in (x, w, b)], atol=8e-2, rtol=2e-2  # sums of 8 products
        ),
        "npu_bmmV2": differences(lambda s, t: torch_npu.npu_bmmV2(s, t, []), torch.matmul, [a, c]),
        "npu_grouped_matmul": differences(
            by_rows,
            lambda t, ws: [*[expected(t, ws)] * 4, F.silu(expected(t, ws) + b)],
            [x, weights],
            gradient=False,
        ),
        "npu_grouped_matmul lists": differences(
            lambda s, t: torch_npu.npu_grouped_matmul([s, s], [t.t(), 2 * t.t()], group_type=-1),
            lambda s, t: [s @ t.t(), 2 * s @ t.t()],
            [x, w],
            gradient=False,
        ),
        "npu_grouped_matmul k axis": differences(by_columns, per_group, [x, rows], gradient=False),
        "npu_grouped_matmul_add_": differences(added, lambda t, r: [1 + per_group(t, r)] * 2, [x, rows], gradient=False),
    }  # fmt: skip
    ours, npu = x.to(here()), weights.to(here())
    rest = torch_npu.npu_grouped_matmul([ours], [npu], group_list=group([1, 2, 4]), split_item=2, group_type=0)[0]
    if not rest[4:].isnan().all() or rest[:4].isnan().any():
        cases["rows in no group"] = ["are not marked"]
    for name, text, call in (
        ("no group_type", "group_type must be given", lambda: torch_npu.npu_grouped_matmul([ours], [npu], group_list=group([6]))),
        ("too long", "does not fit", lambda: torch_npu.npu_grouped_matmul([ours], [npu], group_list=group([2, 3, 9]), group_type=0)),
        ("quantized", "'scale'", lambda: torch_npu.npu_grouped_matmul([ours], [npu], scale=[npu], group_type=0)),
    ):  # fmt: skip
        if text not in error_of(call):
            cases[name] = [error_of(call)]
    return wrong_cases(cases)


def shapes_and_casts() -> list[str]:
    x = randn(2, 3, 4, 6)
    transpose_first = lambda t: t.permute(0, 2, 1, 3).reshape(2, 4, 18)  # noqa: E731
    out = torch.empty(6, 2, 3, 4, device=here())
    ones = torch.zeros(3, device=here())
    cases = {
        "npu_confusion_transpose": differences(
            lambda t: torch_npu.npu_confusion_transpose(t, (0, 2, 1, 3), (2, 4, 18), True), transpose_first, [x]
        ),
        "npu_confusion_transpose reshape": differences(
            lambda t: torch_npu.npu_confusion_transpose(t, (2, 0, 1), (6, 4, 6), False),
            lambda t: t.reshape(6, 4, 6).permute(2, 0, 1),
            [x],
        ),
        "npu_transpose": differences(lambda t: torch_npu.npu_transpose(t, (3, 0, 1, 2)), lambda t: t.permute(3, 0, 1, 2), [x], gradient=False),
        "npu_transpose out": differences(
            lambda t: torch_npu.npu_transpose(t, (3, 0, 1, 2), out=out), lambda t: t.permute(3, 0, 1, 2), [x], gradient=False
        ),
        "npu_dtype_cast": differences(lambda t: torch_npu.npu_dtype_cast(t, torch.float16), lambda t: t, [x], atol=2e-3),
        "_npu_dtype_cast": differences(lambda t: torch_npu._npu_dtype_cast(t, torch.bfloat16), lambda t: t, [x], **BF16),
        "npu_format_cast": differences(lambda t: torch_npu.npu_format_cast(t, 2), lambda t: t, [x]),
    }  # fmt: skip
    seen = {
        "out is the caller's": torch.equal(out.cpu(), x.permute(3, 0, 1, 2)),
        "one_": torch_npu.one_(ones) is ones and ones.cpu().tolist() == [1.0] * 3,
        "the type is cast": torch_npu.npu_dtype_cast(ones, torch.float16).dtype == torch.float16,
        "the format stays plain": torch_npu.get_npu_format(torch_npu.npu_format_cast(out, 29)) == torch_npu.get_npu_format(out),
        "values stay": torch.equal(torch_npu.npu_format_cast(out, 29).cpu(), out.cpu()),
        "format in place": torch_npu.npu_format_cast_(out, 2) is out and torch_npu.npu_format_cast_(out, ones) is out,
    }
    return wrong_cases(cases) + [name for name, right in seen.items() if not right]


def sign_bits() -> list[str]:
    wrong = []
    for size, length, dtype in ((1, 17, torch.float16), (1, 8, torch.float32), (2, 32, torch.float32), (3, 24, torch.float32)):
        x = randn(length, seed=length).to(dtype)
        x[:4] = torch.tensor([0.0, -0.0, float("nan"), -1.0])
        bits = numpy.array([not v < 0 for v in x.tolist()])
        packed = torch_npu.npu_sign_bits_pack(x.to(here()), size)
        wanted = numpy.packbits(bits, bitorder="little").reshape(size, -1)
        if packed.dtype != torch.uint8 or not numpy.array_equal(packed.cpu().numpy(), wanted):
            wrong.append(f"pack {size} {length}")
        signs = torch_npu.npu_sign_bits_unpack(packed.flatten(), size, dtype)
        again = numpy.unpackbits(wanted.reshape(-1), bitorder="little").reshape(size, -1) * 2.0 - 1
        if signs.dtype != dtype or not numpy.array_equal(signs.cpu().double().numpy(), again):
            wrong.append(f"unpack {size} {length}")
    matrix, longer = torch.ones(2, 8, device=here()), torch.ones(24, device=here())
    for text, call in (
        ("a vector of float16 or float32", lambda: torch_npu.npu_sign_bits_pack(matrix, 1)),
        ("a vector of float16 or float32", lambda: torch_npu.npu_sign_bits_pack(longer.bfloat16(), 1)),
        ("cannot be divided", lambda: torch_npu.npu_sign_bits_pack(longer, 2)),
    ):
        if text not in error_of(call):
            wrong.append(error_of(call))
    return wrong
