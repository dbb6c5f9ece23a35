"""The part of the database that runs with the tests: the operators of the training path, their first samples."""

from __future__ import annotations

from typing import Any

TRAINING_PATH = """
add sub mul div.no_rounding_mode pow neg abs exp log sqrt rsqrt square sigmoid tanh erf sin cos reciprocal sign clamp clamp_min
maximum minimum where masked_fill eq lt ge logical_and isfinite isnan sum mean prod std var amax amin argmax max.reduction_with_dim
cumsum norm linalg.vector_norm logsumexp all any matmul mm bmm addmm baddbmm linalg.multi_dot einsum outer cat stack chunk split
split.list_args unbind narrow select index_select gather scatter scatter_add index_put index_add index_copy masked_select take_along_dim
view reshape transpose permute t squeeze unsqueeze expand expand_as repeat repeat_interleave flatten unfold as_strided diagonal tril
triu flip roll clone contiguous to copysign lerp addcmul addcdiv topk sort nonzero zeros_like ones_like full_like empty_like
new_zeros arange linspace rand_like randn_like bernoulli normal nn.functional.linear nn.functional.conv1d nn.functional.conv2d
nn.functional.conv_transpose2d nn.functional.embedding nn.functional.layer_norm nn.functional.rms_norm nn.functional.group_norm
nn.functional.batch_norm nn.functional.dropout nn.functional.relu nn.functional.gelu nn.functional.silu nn.functional.leaky_relu
nn.functional.softplus nn.functional.glu softmax log_softmax nn.functional.cross_entropy nn.functional.nll_loss
nn.functional.mse_loss nn.functional.l1_loss nn.functional.smooth_l1_loss nn.functional.kl_div
nn.functional.binary_cross_entropy_with_logits nn.functional.scaled_dot_product_attention nn.functional.max_pool2d
nn.functional.avg_pool2d nn.functional.adaptive_avg_pool2d nn.functional.interpolate.bilinear nn.functional.pad.constant
nn.functional.normalize nn.functional.cosine_similarity nn.functional.one_hot
""".split()
"""Full names in the database."""

SAMPLES = 2


def run() -> list[dict[str, Any]]:
    """The records of the subset; called on an emulated NPU."""
    from conformance.gaps import deadly, load
    from conformance.samples import main_dtype, operators
    from conformance.suite import run_operator

    database, known, records = operators(), load(), []
    for name in TRAINING_PATH:
        dtype = main_dtype(database[name])
        assert dtype is not None
        records.append(run_operator(name, database[name], dtype, SAMPLES, deadly(known, name)))
    return records
