"""Normalization and dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saved_sets.row import row

F = nn.functional
_aten = torch.ops.aten
BF16 = torch.bfloat16


def frozen(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Batch normalization by running statistics, under gradients."""
    return F.batch_norm(x, mean, variance, weight, bias)


# Dropout.cpp: native_dropout keeps a mask of bytes (derivatives.yaml: result1). All others go by
# _dropout_impl: noise like the input, or of sizes (N, C, 1, ...) by make_feature_noise, which
# ``input * noise`` saves (mul.Tensor: other); alpha's ``.add_(b)`` saves nothing.
_DROPOUT = (
    row("dropout", nn.Dropout(0.1), "4x6", "4x6:bool"),
    row("dropout in place", lambda x: F.dropout(x * 1, 0.1, inplace=True), "4x6", "4x6"),
    row("dropout 2d", nn.Dropout2d(0.1), "2x3x4x4:bfloat16", "2x3x1x1:bfloat16"),
    row("alpha dropout", nn.AlphaDropout(0.1), "4x6", "4x6"),
    row("feature alpha dropout", nn.FeatureAlphaDropout(0.1), "2x3x4x4", "2x3x1x1"),
    row("dropout of nothing", nn.Dropout(0.0), "4x6"),
)

_X, _HALF, _LAST = "2x8x6x6", "2x8x6x6:bfloat16", "2x8x6x6:last"
_STATISTICS = "8 8 8:constant 8:constant"
_RUNNING = "running_mean running_var 8 8"
# derivatives.yaml, cudnn_batch_norm: input, weight, running_mean, running_var, result1, result2,
# and result3, the reserve, which cuDNN alone knows (BatchNorm.cpp). Its statistics are of the
# weight's type; native_batch_norm's of the accumulation type (cuda/Normalization.cu), and it
# saves the same without a reserve. Which serves: Normalization.cpp, _select_batch_norm_backend.
_BATCH_NORM = (
    row("batch norm", nn.BatchNorm2d(8), _X, f"in0 weight {_RUNNING}"),
    row("batch norm bf16 throughout", nn.BatchNorm2d(8).to(BF16), _HALF, f"in0 weight {_RUNNING}"),
    row(
        "batch norm without running statistics",
        nn.BatchNorm2d(8, track_running_stats=False),
        _X,
        "in0 weight 8 8",
    ),
    row("batch norm without weight", nn.BatchNorm2d(8, affine=False), _X, f"in0 {_RUNNING}"),
    # BatchNorm.cpp: in evaluation save_mean and save_var are of no elements.
    row("batch norm in evaluation", frozen, f"{_X} {_STATISTICS}", "in0 in1 in3 in4"),
    # batch_norm_cuda: in evaluation, too, save_mean and save_invstd have the channels' size, and
    # the formula saves them.
    row("native batch norm in evaluation", frozen, f"{_HALF} {_STATISTICS}", "in0 in1 in3 in4 8 8"),
    # The operators that functionalization leaves; without statistics there are none to save.
    row(
        "batch norm, functional",
        lambda *tensors: _aten._native_batch_norm_legit(*tensors, True, 0.1, 1e-5)[0],
        f"{_X} {_STATISTICS}",
        "in0 in1 in3 in4 8 8",
    ),
    row(
        "batch norm, functional, no statistics",
        lambda *tensors: _aten._native_batch_norm_legit.no_stats(*tensors, True, 0.1, 1e-5)[0],
        f"{_X} 8 8",
        "in0 in1 8 8",
    ),
    # Normalization.cpp, instance_norm: repeat_if_defined for all but the input, of which a view
    # is normalized; cuDNN serves where there are weights.
    row("instance norm", nn.InstanceNorm2d(8), _X, "in0 16 16"),
    row(
        "instance norm, affine and tracking",
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        _X,
        "in0 16 16 16 16 16",
    ),
)

# native_layer_norm: input, weight, bias, and mean and rstd in the accumulation type
# (cuda/layer_norm_kernel.cu, layer_norm_cuda). native_group_norm: input, weight, result1 and
# result2 of (N, groups), in the input's type (group_norm.cpp; cuda/group_norm_kernel.cu takes no
# weights of another).
# _fused_rms_norm: input, weight, result1 in the accumulation type.
_OTHERS = (
    row("layer norm", nn.LayerNorm(6, dtype=BF16), "4x6:bfloat16", "in0 weight bias 4x1 4x1"),
    row("bare layer norm", nn.LayerNorm(6, elementwise_affine=False), "4x6", "in0 4x1 4x1"),
    row(
        "group norm",
        nn.GroupNorm(4, 8, dtype=BF16),
        _HALF,
        "in0 weight 2x4:bfloat16 2x4:bfloat16",
    ),
    # group_norm.cpp, group_norm: X.contiguous() unless channels last on a CPU.
    row("group norm, channels last", nn.GroupNorm(4, 8), _LAST, "2x8x6x6 weight 2x4 2x4"),
    row("rms norm", nn.RMSNorm(6, dtype=BF16), "4x6:bfloat16", "in0 weight 4x1"),
    row("bare rms norm", nn.RMSNorm(6, elementwise_affine=False), "4x6", "in0 4x1"),
)

ROWS = (*_DROPOUT, *_BATCH_NORM, *_OTHERS)
