"""``npu_fusion_attention_v2`` and its gradient: the first version, with a choice of where the bias is added.

``pse_type`` 1: scale * (pse + q @ k.T); 0: scale * q @ k.T + pse. Types 2 and 3, in which the operator makes the bias,
and the separate rotary parts of query and key are not emulated.
"""

from __future__ import annotations

import torch

from ascend_emulator.fused.attention import CHECKED, SPEED, gradients
from ascend_emulator.fused.attention_call import Call, prepare
from ascend_emulator.fused.attention_run import run_forward
from ascend_emulator.fused.registry import DOCS, SOURCE, formula

_REFUSED = "padding_mask query_rope key_rope q_start_idx kv_start_idx"


@formula(
    "npu_fusion_attention_v2",
    source=DOCS,
    checked=CHECKED,
    backward="npu_fusion_attention_grad_v2",
    ignored=SPEED,
    refused=_REFUSED,
    wants_device=True,
    no_gradient="pse",
)
def fusion_attention_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None,
    atten_mask: torch.Tensor | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    prefix: list[int] | None,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    sparse_mode: int,
    pse_type: int,
    softmax_layout: str,
    sink: torch.Tensor | None,
    dropout_mask: torch.Tensor | None,
    seed: int,
    offset: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """As :func:`ascend_emulator.fused.attention.fusion_attention`."""
    arguments = Call(
        head_num, input_layout, pse, atten_mask, scale, keep_prob, pre_tokens, next_tokens, prefix,
        actual_seq_qlen or [], actual_seq_kvlen or [], sparse_mode, softmax_layout, sink, pse_type,
    )  # fmt: skip
    call = prepare(arguments, query, key, value)
    keep_mask, seed, offset = call.dropout(dropout_mask, seed, offset, device)
    out, top, total = run_forward(call, keep_mask)
    return out, top, total, query.new_empty(0), seed, offset, call.mask_numbers()


@formula(
    "npu_fusion_attention_grad_v2",
    source=SOURCE,
    checked=f"autograd of {CHECKED}",
    ignored=f"{SPEED} softmax_in numels",
    refused=_REFUSED,
)
def fusion_attention_grad_v2(
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
    pre_tokens: int,
    next_tokens: int,
    seed: int,
    offset: int,
    prefix: list[int] | None,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    sparse_mode: int,
    pse_type: int,
    softmax_layout: str,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients by query, key, value, pse, the two rotary parts (empty) and sink."""
    arguments = Call(
        head_num, input_layout, pse, atten_mask, scale_value, keep_prob, pre_tokens, next_tokens, prefix,
        actual_seq_qlen or [], actual_seq_kvlen or [], sparse_mode, softmax_layout, sink, pse_type,
    )  # fmt: skip
    call = prepare(arguments, query, key, value)
    found = gradients(call, call.dropout_again(seed, offset), attention_in, dy, softmax_max, softmax_sum)
    dq, dk, dv, dpse, dsink = found
    return dq, dk, dv, dpse, query.new_empty(0), query.new_empty(0), dsink
