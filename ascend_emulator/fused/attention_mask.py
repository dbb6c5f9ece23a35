"""Which positions of attention are hidden: the meaning of ``atten_mask`` and ``sparse_mode``.

From the API documentation: True or 1 in ``atten_mask`` HIDES a position, the opposite of torch's own attention. Without
``atten_mask`` nothing is hidden, whatever ``sparse_mode`` says. Modes 2, 3, 4 and 6 take a compressed mask, which does
not say what is hidden: the mode does.

Stricter than an NPU, which does not look and computes something else: a mask that contradicts its mode is an error.
"""

from __future__ import annotations

from functools import lru_cache

import torch

COMPRESSED = {2: (2048, 2048), 3: (2048, 2048), 4: (2048, 2048), 6: (3072, 2048)}
"""Modes with a compressed mask, and its shape."""


@lru_cache(maxsize=1)
def _upper_triangle() -> torch.Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def check_mask(mask: torch.Tensor, mode: int, shape: tuple[int, int, int, int], layout: str) -> torch.Tensor:
    """The mask as booleans.

    Args:
        mask: ``atten_mask``, bool or uint8.
        mode: ``sparse_mode``.
        shape: Batch, heads and longest sequences of query and key.
        layout: Of the call.

    Raises:
        RuntimeError: It has a shape, a type or values that the operator does not take.
    """
    if mask.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(f"atten_mask must be bool or uint8, not {mask.dtype}")
    batch, heads, sq, skv = shape
    if mode in COMPRESSED:
        if tuple(mask.shape) not in (COMPRESSED[mode], (1, 1, *COMPRESSED[mode])):
            raise RuntimeError(
                f"atten_mask has shape {tuple(mask.shape)}; sparse_mode {mode} takes the compressed mask {COMPRESSED[mode]}"
            )
        if mode != 6 and not torch.equal(mask.view(2048, 2048).bool(), _upper_triangle()):
            raise RuntimeError(
                f"sparse_mode {mode} takes the compressed mask torch.ones(2048, 2048).triu(1), 1 where a position is hidden; "
                "this one is different, and an NPU gives wrong results with it"
            )
        return mask.bool()
    allowed = [(sq, skv)] if layout == "TND" else [(batch, heads, sq, skv), (batch, 1, sq, skv), (1, 1, sq, skv), (sq, skv)]
    if tuple(mask.shape) not in allowed:
        raise RuntimeError(
            f"atten_mask has shape {tuple(mask.shape)}; with layout {layout} it can be {', '.join(map(str, allowed))}"
        )
    return mask.bool()


def _band(sq: int, skv: int, before: int, after: int, shift: int) -> torch.Tensor:
    """Hidden outside of a band: keys more than ``before`` before the query or ``after`` after it, from a shifted diagonal."""
    distance = torch.arange(skv).view(1, -1) - torch.arange(sq).view(-1, 1) - shift
    return (distance > after) | (distance < -before)


def hidden(mask: torch.Tensor, mode: int, sq: int, skv: int, before: int, after: int, prefix: list[int] | None) -> torch.Tensor:
    """The hidden positions of one part.

    Args:
        mask: From :func:`check_mask`.
        mode: ``sparse_mode``.
        sq: Length of the query.
        skv: Length of the key.
        before: ``pre_tockens``.
        after: ``next_tockens``.
        prefix: For modes 5 and 6, how many first keys every query of each batch sees.

    Returns:
        Booleans that broadcast to (batch, heads, sq, skv).
    """
    if mode in (7, 8):
        raise NotImplementedError(f"sparse_mode {mode} (sequences cut over devices) has no formula in the emulator")
    if mode == 2:
        return _band(sq, skv, sq + skv, 0, 0)
    if mode == 3:
        return _band(sq, skv, sq + skv, 0, skv - sq)
    if mode == 4:
        return _band(sq, skv, before, after, skv - sq)
    if mode in (5, 6):
        if not prefix:
            raise RuntimeError(f"sparse_mode {mode} needs prefix")
        first = torch.arange(skv) < torch.tensor(prefix).view(-1, 1, 1, 1)
        computed = _band(sq, skv, sq + skv, 0, skv - sq) & ~first
        if mode == 5 and bool((mask != computed).any()):
            raise RuntimeError(f"sparse_mode 5: atten_mask differs from what prefix={prefix} says")
        return computed
    given = mask[..., :sq, :skv]
    if mode == 0 and bool((_band(sq, skv, before, after, 0) & ~given).any()):
        raise RuntimeError(
            f"atten_mask shows positions that pre_tockens={before} and next_tockens={after} hide\n"
            "Why: with sparse_mode 0 both must say the same, or an NPU skips blocks and gives wrong results.\n"
            "Do: hide them in the mask too, or leave both numbers at their default."
        )
    return given
