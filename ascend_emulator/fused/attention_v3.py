"""``npu_fusion_attention_v3`` and its gradient: the first version for graphs.

Lengths of sequences are given, and seed and offset of dropout returned, as int64 tensors on the CPU.
"""

from __future__ import annotations

import torch

from ascend_emulator.fused.attention import CHECKED, SPEED, gradients
from ascend_emulator.fused.attention_call import Call, prepare
from ascend_emulator.fused.attention_run import run_forward
from ascend_emulator.fused.registry import DOCS, SOURCE, formula


def _numbers(tensor: torch.Tensor | None) -> list[int]:
    return [] if tensor is None else [int(n) for n in tensor]


@formula(
    "npu_fusion_attention_v3",
    source=DOCS,
    checked=CHECKED,
    backward="npu_fusion_attention_grad_v3",
    ignored=SPEED,
    refused="padding_mask",
    host_arguments="actual_seq_qlen actual_seq_kvlen",
    host_results=(4, 5),
    wants_device=True,
    no_gradient="pse",
)
def fusion_attention_v3(
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
    actual_seq_qlen: torch.Tensor | None,
    actual_seq_kvlen: torch.Tensor | None,
    sparse_mode: int,
    softmax_layout: str,
    sink: torch.Tensor | None,
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """Attention; maximum and sum of the softmax; an empty tensor; seed and offset of the dropout mask."""
    arguments = Call(
        head_num, input_layout, pse, atten_mask, scale, keep_prob, pre_tockens, next_tockens, prefix,
        _numbers(actual_seq_qlen), _numbers(actual_seq_kvlen), sparse_mode, softmax_layout, sink,
    )  # fmt: skip
    call = prepare(arguments, query, key, value)
    keep_mask, seed, offset = call.dropout(None, 0, 0, device)
    out, top, total = run_forward(call, keep_mask)
    return out, top, total, query.new_empty(0), torch.tensor([seed]), torch.tensor([offset])


@formula(
    "npu_fusion_attention_grad_v3",
    source=SOURCE,
    checked=f"autograd of {CHECKED}",
    ignored=f"{SPEED} softmax_in",
    refused="padding_mask",
    host_arguments="actual_seq_qlen actual_seq_kvlen seed offset",
)
def fusion_attention_grad_v3(
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
    seed: torch.Tensor | None,
    offset: torch.Tensor | None,
    prefix: list[int] | None,
    actual_seq_qlen: torch.Tensor | None,
    actual_seq_kvlen: torch.Tensor | None,
    sparse_mode: int,
    softmax_layout: str,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients by query, key, value, pse and sink."""
    arguments = Call(
        head_num, input_layout, pse, atten_mask, scale_value, keep_prob, pre_tockens, next_tockens, prefix,
        _numbers(actual_seq_qlen), _numbers(actual_seq_kvlen), sparse_mode, softmax_layout, sink,
    )  # fmt: skip
    call = prepare(arguments, query, key, value)
    numbers = [0 if n is None else int(n) for n in (seed, offset)]
    return gradients(call, call.dropout_again(*numbers), attention_in, dy, softmax_max, softmax_sum)
