"""``npu_fusion_attention`` and its gradient.

From the API documentation: dropout(softmax(mask(scale * (pse + q @ k.T)))) @ v, the mask as in :mod:`attention_mask`. Not
checked on an NPU: the statistics of wholly hidden rows, and which elements dropout drops. The gradient by ``pse`` is
documented by CANN as not in use, so a ``pse`` that requires one is refused.
"""

from __future__ import annotations

import torch

from ascend_emulator.fused.attention_call import Call, Prepared, prepare
from ascend_emulator.fused.attention_layout import to_bnsd
from ascend_emulator.fused.attention_run import run_backward, run_forward
from ascend_emulator.fused.registry import DOCS, SOURCE, formula

SPEED = "inner_precise gen_mask_parallel sync"
"""Arguments that change how an NPU computes, not what."""

CHECKED = "F.scaled_dot_product_attention"


def gradients(
    call: Prepared,
    keep_mask: torch.Tensor | None,
    attention_in: torch.Tensor | None,
    dy: torch.Tensor,
    softmax_max: torch.Tensor | None,
    softmax_sum: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients by query, key, value, pse and sink, as the operators return them.

    The one by pse is NaN, since an NPU does not write it; those of arguments that are None are empty.
    """
    if attention_in is None or softmax_max is None or softmax_sum is None:
        raise RuntimeError("the gradient of fused attention needs softmax_max, softmax_sum and attention_in")
    layout, heads = call.call.input_layout, call.call.head_num
    out, dout = to_bnsd(attention_in, layout, heads), to_bnsd(dy, layout, heads)
    dq, dk, dv, dsink = run_backward(call, keep_mask, out, dout, softmax_max, softmax_sum)
    pse = call.call.pse
    dpse = dq.new_empty(0) if pse is None else torch.full_like(pse, float("nan"))
    return dq, dk, dv, dpse, torch.empty(0) if dsink is None else dsink


@formula(
    "npu_fusion_attention",
    source=DOCS,
    checked=CHECKED,
    backward="npu_fusion_attention_grad",
    ignored=SPEED,
    refused="padding_mask",
    wants_device=True,
    no_gradient="pse",
)
def fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None,
    atten_mask: torch.Tensor | None,
    scale: float,
    keep_prob: float,
    pre_tockens: int,
    next_tockens: int,
    prefix: list[int] | None,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    sparse_mode: int,
    softmax_layout: str,
    sink: torch.Tensor | None,
    dropout_mask: torch.Tensor | None,
    seed: int,
    offset: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Attention; maximum and sum of the softmax; an empty tensor; seed, offset and length of the dropout mask."""
    arguments = Call(
        head_num, input_layout, pse, atten_mask, scale, keep_prob, pre_tockens, next_tockens, prefix,
        actual_seq_qlen or [], actual_seq_kvlen or [], sparse_mode, softmax_layout, sink,
    )  # fmt: skip
    call = prepare(arguments, query, key, value)
    keep_mask, seed, offset = call.dropout(dropout_mask, seed, offset, device)
    out, top, total = run_forward(call, keep_mask)
    return out, top, total, query.new_empty(0), seed, offset, call.mask_numbers()


@formula(
    "npu_fusion_attention_grad",
    source=SOURCE,
    checked=f"autograd of {CHECKED}",
    ignored=f"{SPEED} softmax_in numels",
    refused="padding_mask",
)
def fusion_attention_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None,
    atten_mask: torch.Tensor | None,
    softmax_max: torch.Tensor | None,
    softmax_sum: torch.Tensor | None,
    attention_in: torch.Tensor | None,
    scale_value: float,
    keep_prob: float,
    pre_tockens: int,
    next_tockens: int,
    seed: int,
    offset: int,
    prefix: list[int] | None,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    sparse_mode: int,
    softmax_layout: str,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients by query, key, value, pse and sink; see :func:`gradients`."""
    arguments = Call(
        head_num, input_layout, pse, atten_mask, scale_value, keep_prob, pre_tockens, next_tockens, prefix,
        actual_seq_qlen or [], actual_seq_kvlen or [], sparse_mode, softmax_layout, sink,
    )  # fmt: skip
    call = prepare(arguments, query, key, value)
    return gradients(call, call.dropout_again(seed, offset), attention_in, dy, softmax_max, softmax_sum)
