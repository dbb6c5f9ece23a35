"""Rank functions: mixture-of-experts operators against plain torch formulas."""

from __future__ import annotations

from typing import Any

import torch
from fused_compare import BF16, differences, error_of, here, randn, torch_npu, wrong_cases

EXPERTS = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]])
"""Two experts for each of five tokens."""


def _on(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(here())


def _order() -> torch.Tensor:
    """(token, choice) pairs, expert by expert."""
    return torch.tensor([i for e in range(3) for i, expert in enumerate(EXPERTS.flatten().tolist()) if expert == e])


def _places() -> torch.Tensor:
    order = _order().tolist()
    return torch.tensor([order.index(i) for i in range(len(order))])


def _back(rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    out = []
    for token in range(5):
        places = [_order().tolist().index(2 * token + choice) for choice in range(2)]
        out.append(
            sum(probs[token, c] * rows[p] if p < len(rows) else 0 * probs[token, c] * rows[0] for c, p in enumerate(places))
        )
    return torch.stack(out)


def tokens() -> list[str]:
    x, rows, probs, experts = randn(5, 4), randn(10, 4, seed=1), randn(5, 2, seed=2), _on(EXPERTS)
    places = _on(_places().int())
    permute, unpermute = torch_npu.npu_moe_token_permute, torch_npu.npu_moe_token_unpermute
    cases = {
        "permute": differences(lambda t: permute(t, experts)[0], lambda t: t[_order() // 2], [x]),
        "permute cut": differences(lambda t: permute(t, experts, num_out_tokens=7)[0], lambda t: t[_order()[:7] // 2], [x]),
        "permute drop": differences(lambda t: permute(t, experts, num_out_tokens=-2)[0], lambda t: t[_order()[:8] // 2], [x]),
        "permute one": differences(
            lambda t: permute(t, experts[:, 0])[0], lambda t: t[torch.argsort(EXPERTS[:, 0], stable=True)], [x]
        ),
        "permute bf16": differences(lambda t: permute(t, experts)[0], lambda t: t[_order() // 2], [x.bfloat16()], **BF16),
        "unpermute": differences(lambda t, p: unpermute(t, places, probs=p), _back, [rows, probs]),
        "unpermute cut": differences(lambda t, p: unpermute(t, places, probs=p), _back, [rows[:7], probs]),
        "unpermute plain": differences(lambda t: unpermute(t, places), lambda t: t[_places()], [rows]),
        "both": differences(
            lambda t, p: unpermute(*permute(t, experts), probs=p), lambda t, p: t * p.sum(1, keepdim=True), [x, probs]
        ),
    }
    indices = permute(_on(x), experts)[1]
    if indices.dtype != torch.int32 or indices.tolist() != _places().tolist():
        cases["sorted_indices"] = [str(indices.tolist())]
    older = torch_npu.npu_moe_token_permute_grad(_on(x), _on(rows), experts, places)
    if not torch.allclose(older.cpu(), rows[_places()].view(5, 2, 4).sum(1), atol=1e-6):
        cases["npu_moe_token_permute_grad"] = ["differs"]
    grads = torch_npu.npu_moe_token_unpermute_grad(_on(rows), _on(x), places, probs=_on(probs))
    leaves = [rows.clone().requires_grad_(), probs.clone().requires_grad_()]
    _back(*leaves).backward(x)
    if not all(torch.allclose(g.cpu(), leaf.grad, atol=1e-6) for g, leaf in zip(grads, leaves, strict=True)):
        cases["npu_moe_token_unpermute_grad"] = ["differs"]
    with torch.inference_mode():
        if not torch.allclose(unpermute(_on(rows), places).cpu(), rows[_places()]):
            cases["inference"] = ["differs"]
    padded = error_of(lambda: permute(_on(x), experts, padded_mode=True))
    if "NotImplementedError" not in padded or "padded_mode" not in padded:
        cases["padded mode"] = [padded]
    return wrong_cases(cases)


def routing_map() -> list[str]:
    x, probs = randn(5, 4), randn(5, 3, seed=2)
    chosen = torch.zeros(5, 3, dtype=torch.bool).scatter_(1, EXPERTS, True)
    rows = [t for e in range(3) for t in range(5) if chosen[t, e]]
    permute, unpermute = torch_npu.npu_moe_token_permute_with_routing_map, torch_npu.npu_moe_token_unpermute_with_routing_map
    sorted_rows = randn(10, 4, seed=3)

    def there(t: torch.Tensor, p: torch.Tensor) -> Any:
        return permute(t, _on(chosen), probs=p, num_out_tokens=10)[:2]

    def back(r: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        indices = permute(_on(x), _on(chosen), num_out_tokens=10)[2]
        return unpermute(r, indices, [5, 4], probs=p, routing_map=_on(chosen))

    def plain_back(r: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(5, 4)
        for place, (e, t) in enumerate((e, t) for e in range(3) for t in range(5) if chosen[t, e]):
            out = out.index_add(0, torch.tensor([t]), (r[place] * p[t, e])[None])
        return out

    capacity = 2  # each expert takes its first two tokens
    picked = [(e, [t for t in range(5) if chosen[t, e]][:capacity]) for e in range(3)]

    def padded(t: torch.Tensor, p: torch.Tensor) -> Any:
        return permute(t, _on(chosen), probs=p, num_out_tokens=6, drop_and_pad=True)[:2]

    def padded_back(r: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        indices = permute(_on(x), _on(chosen), num_out_tokens=6, drop_and_pad=True)[2]
        return unpermute(r, indices, [5, 4], probs=p, routing_map=_on(chosen), drop_and_pad=True)

    def plain_padded_back(r: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(5, 4)
        for place, (e, t) in enumerate((e, t) for e, ts in picked for t in ts):
            out = out.index_add(0, torch.tensor([t]), (r[place] * p[t, e])[None])
        return out

    cases = {
        "permute": differences(
            there, lambda t, p: [t[rows], torch.stack([p[t_, e] for e in range(3) for t_ in range(5) if chosen[t_, e]])], [x, probs]
        ),
        "permute without probs": differences(
            lambda t: permute(t, _on(chosen), num_out_tokens=10)[0], lambda t: t[rows], [x]
        ),
        "unpermute": differences(back, plain_back, [sorted_rows, probs]),
        "pad": differences(
            padded,
            lambda t, p: [t[[i for _, ts in picked for i in ts]], torch.stack([p[i, e] for e, ts in picked for i in ts])],
            [x, probs],
        ),
        "pad back": differences(padded_back, plain_padded_back, [sorted_rows[:6], probs]),
    }  # fmt: skip
    with torch.inference_mode():
        if not torch.allclose(back(_on(sorted_rows), _on(probs)).cpu(), plain_back(sorted_rows, probs), atol=1e-6):
            cases["inference"] = ["differs"]
    wrong = error_of(lambda: permute(_on(x), _on(chosen), num_out_tokens=5))
    if "the map has 10 entries" not in wrong:
        cases["wrong count"] = [wrong]
    return wrong_cases(cases)


def routing() -> list[str]:
    logits, finished = randn(5, 6), torch.tensor([False, True, False, False, True])
    best, expert, place = torch_npu.npu_moe_gating_top_k_softmax(_on(logits), _on(finished), k=2)
    values, wanted = logits.softmax(-1).topk(2)
    wanted[finished] = 6
    seen = {
        "gating values": torch.allclose(best.cpu(), values, atol=1e-6),
        "gating experts": torch.equal(expert.cpu(), wanted.int()),
        "gating places": place.tolist() == [[i, i + 5] for i in range(5)],
    }
    x = randn(5, 4)
    columns = torch.arange(10, dtype=torch.int32).view(2, 5).t().contiguous()
    rows, back, experts = torch_npu.npu_moe_init_routing(_on(x), _on(columns), _on(EXPERTS.int()), 5)
    pairs = sorted((int(EXPERTS[t, c]), 2 * t + c, t + 5 * c) for t in range(5) for c in range(2))
    seen["init rows"] = torch.equal(rows.cpu(), torch.stack([x[p % 5] for _, _, p in pairs]))
    seen["init experts"] = experts.tolist() == [e for e, _, _ in pairs]
    seen["init places"] = [pairs[i][2] for i in back.tolist()] == list(range(10))
    scales, bias, skip = randn(5, 2, seed=1), randn(3, 4, seed=2), randn(5, 4, seed=3)
    merged = torch_npu.npu_moe_finalize_routing(rows, _on(skip), None, _on(bias), _on(scales), back, _on(EXPERTS.int()))
    plain = skip + torch.stack([sum(scales[t, c] * (x[t] + bias[EXPERTS[t, c]]) for c in range(2)) for t in range(5)])
    seen["finalize"] = torch.allclose(merged.cpu(), plain, atol=1e-6)
    by_row = back.view(2, 5).t().reshape(-1).contiguous()
    merged = torch_npu.npu_moe_finalize_routing(
        rows, _on(skip), None, _on(bias), _on(scales), by_row, _on(EXPERTS.int()), drop_pad_mode=2
    )
    seen["finalize by rows"] = torch.allclose(merged.cpu(), plain, atol=1e-6)
    dropped = by_row.clone()
    dropped[0] = -1
    merged = torch_npu.npu_moe_finalize_routing(
        rows, _on(skip), None, None, _on(scales), dropped, _on(EXPERTS.int()), drop_pad_mode=3
    )
    seen["finalize dropped"] = torch.allclose(merged[0].cpu(), skip[0] + scales[0, 1] * x[0], atol=1e-6)
    probs = _on(logits).requires_grad_()
    text = error_of(lambda: torch_npu.npu_moe_gating_top_k_softmax(probs, None, 2)[0].sum().backward())
    seen["no derivative"] = "derivative for npu::npu_moe_gating_top_k_softmax is not implemented" in text
    return [name for name, right in seen.items() if not right]
