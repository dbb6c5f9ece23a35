"""What an operator of the emulated NPU must refuse or may do, by name. Both operator layers follow these tables.

Sources: for types, the support list of torch_npu for PyTorch 2.13 (its documentation, "native API"); operators that are
missing from a table follow the common rule.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from ascend_emulator import _torch

MIXED, NO_FLOAT64, SATURATES, CASTS = 1, 2, 4, 8
"""Flags of an operator: operands may be on different devices; float64 is refused; results are clamped in saturating mode;
they are if operands on NPUs differ in type."""

MIXED_DEVICES = frozenset(
    "copy_ _to_copy _copy_from _copy_from_and_resize index index_put index_put_ _index_put_impl_ _unsafe_index set_ "
    "_foreach_copy_ resize_as_ empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_zeros "
    "_has_compatible_shallow_copy_type".split()
)
"""Operators whose tensors may live on different devices, as on a real NPU."""

FLOAT64_REFUSED = frozenset(
    "mm bmm addmm addmm_ addbmm addbmm_ baddbmm baddbmm_ addmv addmv_ mv dot vdot addr addr_ linear _trilinear convolution "
    "convolution_overrideable convolution_backward native_layer_norm native_layer_norm_backward native_batch_norm "
    "native_batch_norm_backward _native_batch_norm_legit native_group_norm native_group_norm_backward "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_fused_attention_overrideable gelu gelu_ gelu_backward silu silu_ silu_backward mish mish_ "
    "mish_backward hardswish hardswish_ hardswish_backward softplus softplus_backward log_sigmoid_forward "
    "log_sigmoid_backward hardsigmoid hardsigmoid_ hardsigmoid_backward _log_softmax _log_softmax_backward_data avg_pool2d "
    "avg_pool2d_backward avg_pool3d avg_pool3d_backward max_pool2d_with_indices max_pool2d_with_indices_backward "
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward embedding embedding_dense_backward nll_loss_forward "
    "nll_loss_backward nll_loss2d_forward nll_loss2d_backward binary_cross_entropy binary_cross_entropy_backward "
    "mse_loss mse_loss_backward repeat_interleave index_select gather masked_select multinomial sort msort kthvalue "
    "_cdist_forward _cdist_backward".split()
)
"""Matrix, convolution, normalization, attention, activation, loss, sorting and gathering operators without fp64 in the list."""

_MOVES = frozenset(
    "clone fill_ full full_like zeros zeros_like ones ones_like zero_ masked_fill masked_fill_ where cat stack gather "
    "index index_select index_put index_put_ _index_put_impl_ scatter scatter_ select_scatter slice_scatter "
    "constant_pad_nd masked_select masked_scatter masked_scatter_ tril triu flip roll repeat index_copy index_copy_ "
    "index_fill index_fill_ take empty_like new_full isfinite nan_to_num nan_to_num_ _unsafe_index embedding sort topk "
    "set_ resize_ _copy_from _copy_from_and_resize detach scalar_tensor".split()
)
"""Operators that move values without computing: infinities that are written on purpose, as in masks, stay."""

_OLD_SOCS = ("Ascend910PremiumA", "Ascend910ProA", "Ascend910A", "Ascend910ProB", "Ascend910B", "Ascend310")
"""SoCs before Ascend910B1 in torch_npu's order, and the inference parts."""


def base(op: Any) -> str:
    """``add`` of ``aten::add.Tensor``."""
    return str(_torch.schema(op).name).partition("::")[2]


def flags(op: Any) -> int:
    """The flags of an operator overload in this process."""
    name = base(op)
    refused = name in FLOAT64_REFUSED and os.environ.get("ASCEND_EMULATOR_FLOAT64") != "allow"
    saturates = CASTS if name == "copy_" else 0 if name in _MOVES else SATURATES
    return (MIXED if name in MIXED_DEVICES else 0) | (NO_FLOAT64 if refused else 0) | saturates


def soc() -> str:
    """Name of the emulated SoC."""
    return os.environ.get("ASCEND_EMULATOR_SOC") or "Ascend910B1"


@functools.cache
def lacks_bfloat16() -> bool:
    """Whether the SoC is older than Ascend910B1, with which bfloat16 came."""
    name = soc()
    return name in _OLD_SOCS or name.startswith("Ascend310P")


def check_types(name: str, flags: int, types: set[torch.dtype]) -> None:
    """Refuse types that the NPU's kernels lack.

    Args:
        name: The operator.
        flags: Its flags.
        types: Types of its operands and results on NPUs.

    Raises:
        RuntimeError: The reason and what to do.
    """
    if flags & NO_FLOAT64 and torch.float64 in types:
        raise RuntimeError(
            f"The operator {name} has no float64 kernel on NPUs.\n"
            "Why: the matrix and vector units of Ascend compute float32, float16 and bfloat16.\n"
            "Do: use float32, or set ASCEND_EMULATOR_FLOAT64=allow."
        )
    moves = flags & MIXED or not flags & SATURATES  # bits may be stored and carried, but not computed with or cast
    if torch.bfloat16 in types and lacks_bfloat16() and (not moves or len(types) > 1):
        raise RuntimeError(
            f"bfloat16 is not supported on this SoC, {soc()} ({name}).\nWhy: it came with Ascend910B1.\nDo: use float16."
        )
