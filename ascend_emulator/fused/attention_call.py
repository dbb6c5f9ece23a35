"""A call of fused attention: its arguments checked, and run part by part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ascend_emulator.fused import attention_math
from ascend_emulator.fused.attention_layout import LAYOUTS, Part, from_bnsd, parts, to_bnsd
from ascend_emulator.fused.attention_mask import check_mask, hidden
from ascend_emulator.fused.dropout import STEPS, keep_bits
from ascend_emulator.fused.precision import wide
from ascend_emulator.fused.sign_bits import unpack_bits
from ascend_emulator.random_state import draw

STAT = 8
"""Last dimension of the softmax statistics: each number is written eight times."""


@dataclass(frozen=True)
class Call:
    """The arguments that all versions of the operator share; names as in the operator."""

    head_num: int
    input_layout: str
    pse: torch.Tensor | None
    atten_mask: torch.Tensor | None
    scale: float
    keep_prob: float
    pre_tokens: int
    next_tokens: int
    prefix: list[int] | None
    actual_seq_qlen: list[int]
    actual_seq_kvlen: list[int]
    sparse_mode: int
    softmax_layout: str
    sink: torch.Tensor | None
    pse_type: int = 1

    def check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise if the operator does not take these arguments, or if the emulator has no formula for them."""
        layout, mode = self.input_layout, self.sparse_mode
        if layout not in LAYOUTS:
            raise RuntimeError(f"The input_layout should be BSH/SBH/BNSD/BSND/TND(case-insensitive), but got {layout}")
        if self.head_num <= 0:
            raise RuntimeError(f"head_num must > 0, but got {self.head_num}")
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != (4 if layout in ("BNSD", "BSND") else 3):
                raise RuntimeError(f"{name} has {tensor.dim()} dimensions, which does not fit input_layout {layout}")
            if tensor.dtype != query.dtype:
                raise RuntimeError(f"query, key, value and pse must have one type, not {query.dtype} and {tensor.dtype}")
        if not 0 < self.keep_prob <= 1:
            raise RuntimeError(f"The keep_prob value must be in range of (0, 1], but got {self.keep_prob}")
        last = 8 if layout == "TND" else 6
        if not 0 <= mode <= last or (layout == "TND" and mode == 5):
            allowed = "[0,5) or (5,8]" if layout == "TND" else "[0,6]"
            raise RuntimeError(f"The sparse_mode value must be in range of {allowed}, but got {mode}")
        if self.softmax_layout not in ("", "TND") or (self.softmax_layout == "TND" and layout != "TND"):
            raise RuntimeError("only supported softmax_layout=TND, and only with input_layout TND")
        lengths = len(self.actual_seq_qlen), len(self.actual_seq_kvlen)
        if layout == "TND" and (0 in lengths or lengths[0] != lengths[1]):
            raise RuntimeError("the size of actual_seq_qlen and actual_seq_kvlen must be the same and cannot be empty.")
        if layout != "TND" and lengths != (0, 0):
            raise NotImplementedError(f"actual_seq_qlen with input_layout {layout} has no formula in the emulator")
        if self.pse is not None and (layout == "TND" or self.pse_type in (2, 3)):
            raise NotImplementedError("pse with input_layout TND, or made by the operator (pse_type 2, 3), has no formula here")


def prepare(call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Prepared:
    """Check a call.

    Raises:
        RuntimeError: The operator does not take these arguments.
        NotImplementedError: It does, but the emulator has no formula for them.
    """
    call = replace(call, input_layout=call.input_layout.upper())
    call.check(query, key, value)
    return Prepared(call, query, key, value)


class Prepared:
    """A checked call with its tensors as (batch, heads, sequence, dimension).

    Args:
        call: The arguments.
        query: In the call's layout.
        key: In the call's layout.
        value: In the call's layout.
    """

    def __init__(self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.call, layout = call, call.input_layout
        self.q = to_bnsd(query, layout, call.head_num)
        heads = key.size(-1) // self.q.size(-1) if layout in ("BSH", "SBH") else 0
        self.k, self.v = to_bnsd(key, layout, heads), to_bnsd(value, layout, heads)
        self.parts = parts(layout, call.actual_seq_qlen, call.actual_seq_kvlen)
        self._check_shapes()
        self.mask = None
        if call.atten_mask is not None:
            self.mask = check_mask(call.atten_mask, call.sparse_mode, self._longest(), layout)

    def _check_shapes(self) -> None:
        q, k, v = self.q, self.k, self.v
        if q.size(1) != self.call.head_num:
            raise RuntimeError(f"head_num is {self.call.head_num}, but the query has {q.size(1)} heads")
        if k.shape[:3] != v.shape[:3] or q.size(0) != k.size(0) or q.size(3) != k.size(3) or v.size(3) > k.size(3):
            raise RuntimeError(f"as (batch, heads, sequence, dimension), {q.shape}, {k.shape} and {v.shape} do not fit")
        if k.size(1) == 0 or q.size(1) % k.size(1):
            raise RuntimeError(f"the query's {q.size(1)} heads are not a multiple of the key's {k.size(1)}")
        pse = self.call.pse
        if pse is not None:
            batch, heads, sq, skv = q.size(0), q.size(1), q.size(2), k.size(2)
            allowed = [(batch, heads, sq, skv), (batch, heads, 1, skv), (1, heads, sq, skv)]
            if tuple(pse.shape) not in allowed or (pse.dtype != self.q.dtype):
                raise RuntimeError(f"pse has shape {tuple(pse.shape)} and {pse.dtype}; it takes {allowed} in the query's type")
        if self.call.sink is not None and tuple(self.call.sink.shape) != (self.call.head_num,):
            raise RuntimeError(f"sink must have shape ({self.call.head_num},), not {tuple(self.call.sink.shape)}")

    def _longest(self) -> tuple[int, int, int, int]:
        if self.call.input_layout != "TND":
            return self.q.size(0), self.q.size(1), self.q.size(2), self.k.size(2)
        queries = max((p.queries.stop - p.queries.start for p in self.parts), default=0)
        keys = max((p.keys.stop - p.keys.start for p in self.parts), default=0)
        return 1, self.q.size(1), queries, keys

    def mask_numbers(self) -> int:
        """How many elements the dropout mask has."""
        return sum(self._count(p) for p in self.parts)

    def _count(self, part: Part) -> int:
        return self.q.size(0) * self.q.size(1) * self.q[:, :, part.queries].size(2) * self.k[:, :, part.keys].size(2)

    def scores(self, keep_mask: torch.Tensor | None) -> Iterator[tuple[Part, attention_math.Scores]]:
        """Each part with how its scores are made; ``keep_mask`` is the whole dropout mask."""
        call, start = self.call, 0
        for part in self.parts:
            sq, skv = self.q[:, :, part.queries].size(2), self.k[:, :, part.keys].size(2)
            kept = None
            if keep_mask is not None:
                kept = keep_mask[start : start + self._count(part)].view(self.q.size(0), -1, sq, skv)
                start += self._count(part)
            away = None
            if self.mask is not None:
                prefix = call.prefix if part.index is None or not call.prefix else [call.prefix[part.index]]
                away = hidden(self.mask, call.sparse_mode, sq, skv, call.pre_tokens, call.next_tokens, prefix)
            pse = None if call.pse is None else wide(call.pse)
            sink = None if call.sink is None else wide(call.sink)
            yield part, attention_math.Scores(call.scale, pse, call.pse_type == 1, away, sink, kept, call.keep_prob)

    def dropout(
        self, dropout_mask: torch.Tensor | None, seed: int, offset: int, device: torch.device
    ) -> tuple[torch.Tensor | None, int, int]:
        """The whole dropout mask of a forward call (None: nothing is dropped), its seed and its offset."""
        if self.call.keep_prob == 1:
            return None, seed, offset
        if dropout_mask is not None:
            return unpack_bits(dropout_mask)[: self.mask_numbers()], seed, offset
        if seed or offset:
            raise NotImplementedError(
                "npu_fusion_attention with a seed but without dropout_mask\n"
                "Why: the documentation says that the seed is used, torch_npu's public source draws another one.\n"
                "Do: pass torch_npu._npu_dropout_gen_mask(...) as dropout_mask, or use torch.npu.manual_seed."
            )
        seed, offset = draw(None, device, STEPS)
        return self.dropout_again(seed, offset), seed, offset

    def dropout_again(self, seed: int, offset: int) -> torch.Tensor | None:
        """The dropout mask for a seed and an offset that a forward call has returned."""
        if self.call.keep_prob == 1:
            return None
        return keep_bits(seed, offset, self.mask_numbers(), self.call.keep_prob)

    def back(self, tensor: torch.Tensor) -> torch.Tensor:
        """A result in the call's layout."""
        return from_bnsd(tensor, self.call.input_layout)
