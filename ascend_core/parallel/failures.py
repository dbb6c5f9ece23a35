"""Errors that one rank meets and all must know of, so that nobody waits for a rank that has given up."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ascend_core.errors import AscendError, ModelError, PeerError


def gather_errors(error: Exception | None) -> list[str | None]:
    """Tell every rank of the world about this rank's error.

    Returns:
        By rank, the error's type and text, or None.

    Communication:
        One object all-gather over the world.
    """
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if error is None else f"{type(error).__name__}: {error}")
    return everyone


def raise_together(error: Exception | None) -> None:
    """Raise this rank's error, or a :class:`PeerError` if only another rank has one.

    Communication:
        See :func:`gather_errors`; every rank must call it.
    """
    everyone = gather_errors(error)
    if error is not None:
        raise error
    failed = [f"rank {r}: {text}" for r, text in enumerate(everyone) if text is not None]
    if failed:
        raise PeerError("Another rank cannot go on.", failed[0], "Mend what that rank names.")


def portable(error: BaseException) -> Exception:
    """An error that survives pickling; unusual ones become :class:`PeerError` with their text.

    torch's stage wraps what a stage raised; the cause is what the user needs.
    """
    cause = error.__cause__ if isinstance(error, RuntimeError) and isinstance(error.__cause__, AscendError) else error
    if type(cause).__module__ in ("builtins", "ascend_core.errors") and isinstance(cause, Exception):
        return type(cause)(*cause.args) if not isinstance(cause, AscendError) else cause
    return PeerError(f"{type(cause).__name__}: {cause}", "Another pipeline rank failed with it.", "See its traceback.")


def shape_changed(stage: int, number: int, output: torch.Tensor, meta: torch.Tensor) -> ModelError:
    """The error for microbatches of one step whose activations differ in shape or type."""
    return ModelError(
        f"Stage {stage} produced {tuple(output.shape)} {output.dtype} for microbatch {number}, but "
        f"{tuple(meta.shape)} {meta.dtype} for microbatch 0.",
        "All microbatches of a step have the same activation shape.",
        "Pad to one length inside a batch.",
    )


def exchange_failed(rank: int, under_way: list[str], error: RuntimeError) -> RuntimeError:
    """Say what a pipeline rank was sending and receiving when the exchange with its neighbours failed or timed out.

    Args:
        rank: Pipeline rank.
        under_way: What each of its stages waits for.
        error: The communication's error; any other one is returned as it is.
    """
    if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
        return error
    return PeerError(
        f"The exchange between pipeline stages failed on pipeline rank {rank}. Under way: {'. '.join(under_way)}.",
        f"{type(error).__name__}: {str(error).splitlines()[0]}",
        "Compare with what the other ranks report: one of them died, is slow, or waits for a message that is never sent.",
    )
