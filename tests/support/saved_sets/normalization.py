"""Normalization and dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saved_sets.row import Row, leaf

F = nn.functional
_aten = torch.ops.aten
F16, BF16 = torch.float16, torch.bfloat16
IMAGE = (2, 8, 6, 6)


def last(x: Tensor) -> Tensor:
    """The input in channels last, still a leaf."""
    return x.detach().to(memory_format=torch.channels_last).requires_grad_()


def frozen(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Batch normalization by running statistics, under gradients."""
    return F.batch_norm(x, mean, variance, weight, bias)


# Dropout.cpp: native_dropout keeps a mask of bytes (derivatives.yaml: result1). All others go by
# _dropout_impl: noise like the input, or of sizes (N, C, 1, ...) by make_feature_noise, which
# ``input * noise`` saves (mul.Tensor: other); alpha's ``.add_(b)`` saves nothing.
_DROPOUT = (
    Row("dropout", nn.Dropout(0.1), (leaf(4, 6),), ("4x6:bool",)),
    Row("dropout bf16", nn.Dropout(0.1), (leaf(4, 6, dtype=BF16),), ("4x6:bool",)),
    Row(
        "dropout in place",
        lambda x: F.dropout(x * 1, 0.1, inplace=True),
        (leaf(4, 6),),
        ("4x6:float32",),
    ),
    Row("dropout 1d", nn.Dropout1d(0.1), (leaf(2, 3, 4),), ("2x3x1:float32",)),
    Row("dropout 2d", nn.Dropout2d(0.1), (leaf(2, 3, 4, 4),), ("2x3x1x1:float32",)),
    Row("dropout 3d", nn.Dropout3d(0.1), (leaf(2, 3, 4, 4, 4),), ("2x3x1x1x1:float32",)),
    Row(
        "dropout 2d bf16",
        nn.Dropout2d(0.1),
        (leaf(2, 3, 4, 4, dtype=BF16),),
        ("2x3x1x1:bfloat16",),
    ),
    Row("alpha dropout", nn.AlphaDropout(0.1), (leaf(4, 6),), ("4x6:float32",)),
    Row(
        "feature alpha dropout",
        nn.FeatureAlphaDropout(0.1),
        (leaf(2, 3, 4, 4),),
        ("2x3x1x1:float32",),
    ),
    Row("dropout of nothing", nn.Dropout(0.0), (leaf(4, 6),), ()),
)

_RUNNING = ("running_mean", "running_var")
_PAIR = ("8:float32",) * 2
# derivatives.yaml, cudnn_batch_norm: input, weight, running_mean, running_var, result1, result2,
# and result3, the reserve, which cuDNN alone knows (BatchNorm.cpp). Its statistics are of the
# weight's type; native_batch_norm's of the accumulation type (cuda/Normalization.cu), and it
# saves the same without a reserve. Which serves: Normalization.cpp, _select_batch_norm_backend.
_BATCH_NORM = (
    Row(
        "batch norm",
        nn.BatchNorm2d(8),
        (leaf(*IMAGE),),
        ("input 0", "weight", *_RUNNING, *_PAIR),
    ),
    Row(
        "batch norm, channels last",
        nn.BatchNorm2d(8),
        (last(leaf(*IMAGE)),),
        ("input 0", "weight", *_RUNNING, *_PAIR),
    ),
    Row(
        "batch norm fp16 with a float weight",
        nn.BatchNorm2d(8),
        (leaf(*IMAGE, dtype=F16),),
        ("input 0", "weight", *_RUNNING, *_PAIR),
    ),
    Row(
        "batch norm bf16 throughout",
        nn.BatchNorm2d(8).to(BF16),
        (leaf(*IMAGE, dtype=BF16),),
        ("input 0", "weight", *_RUNNING, *_PAIR),
    ),
    Row(
        "batch norm of two dimensions",
        nn.BatchNorm1d(8),
        (leaf(6, 8),),
        ("input 0", "weight", *_RUNNING, *_PAIR),
    ),
    Row(
        "batch norm without running statistics",
        nn.BatchNorm2d(8, track_running_stats=False),
        (leaf(*IMAGE),),
        ("input 0", "weight", *_PAIR),
    ),
    Row(
        "batch norm without weight",
        nn.BatchNorm2d(8, affine=False),
        (leaf(*IMAGE),),
        ("input 0", *_RUNNING, *_PAIR),
    ),
    # BatchNorm.cpp: in evaluation save_mean and save_var are of no elements.
    Row(
        "batch norm in evaluation",
        frozen,
        (leaf(*IMAGE), leaf(8), leaf(8), torch.zeros(8), torch.ones(8)),
        ("input 0", "input 1", "input 3", "input 4"),
    ),
    # batch_norm_cuda: in evaluation, too, save_mean and save_invstd have the channels' size, and
    # the formula saves them.
    Row(
        "native batch norm in evaluation",
        frozen,
        (
            leaf(*IMAGE, dtype=BF16), leaf(8), leaf(8), torch.zeros(8), torch.ones(8),
        ),
        ("input 0", "input 1", "input 3", "input 4", *_PAIR),
    ),
    # The operators that functionalization leaves; without statistics there are none to save.
    Row(
        "batch norm, functional",
        lambda *tensors: _aten._native_batch_norm_legit(*tensors, True, 0.1, 1e-5)[0],
        (leaf(*IMAGE), leaf(8), leaf(8), torch.zeros(8), torch.ones(8)),
        ("input 0", "input 1", "input 3", "input 4", *_PAIR),
    ),
    Row(
        "batch norm, functional, no statistics",
        lambda *tensors: _aten._native_batch_norm_legit.no_stats(*tensors, True, 0.1, 1e-5)[0],
        (leaf(*IMAGE), leaf(8), leaf(8)),
        ("input 0", "input 1", *_PAIR),
    ),
    # Normalization.cpp, instance_norm: repeat_if_defined for all but the input, of which a view
    # is normalized; cuDNN serves where there are weights.
    Row("instance norm", nn.InstanceNorm2d(8), (leaf(*IMAGE),), ("input 0", *["16:float32"] * 2)),
    Row(
        "instance norm, affine",
        nn.InstanceNorm2d(8, affine=True),
        (leaf(*IMAGE),),
        ("input 0", *["16:float32"] * 3),
    ),
    Row(
        "instance norm, affine and tracking",
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        (leaf(*IMAGE),),
        ("input 0", *["16:float32"] * 5),
    ),
)  # fmt: skip

# native_layer_norm: input, weight, bias, and mean and rstd in the accumulation type
# (cuda/layer_norm_kernel.cu, layer_norm_cuda). native_group_norm: input, weight, result1 and
# result2 of (N, groups), in the input's type (group_norm.cpp; cuda/group_norm_kernel.cu takes no
# weights of another).
# _fused_rms_norm: input, weight, result1 in the accumulation type.
_OTHERS = (
    Row(
        "layer norm",
        nn.LayerNorm(6),
        (leaf(4, 6),),
        ("input 0", "weight", "bias", *["4x1:float32"] * 2),
    ),
    Row(
        "layer norm bf16",
        nn.LayerNorm(6, dtype=BF16),
        (leaf(4, 6, dtype=BF16),),
        ("input 0", "weight", "bias", *["4x1:float32"] * 2),
    ),
    Row(
        "layer norm without weights",
        nn.LayerNorm(6, elementwise_affine=False),
        (leaf(4, 6),),
        ("input 0", *["4x1:float32"] * 2),
    ),
    Row(
        "group norm",
        nn.GroupNorm(4, 8),
        (leaf(*IMAGE),),
        ("input 0", "weight", *["2x4:float32"] * 2),
    ),
    Row(
        "group norm bf16",
        nn.GroupNorm(4, 8, dtype=BF16),
        (leaf(*IMAGE, dtype=BF16),),
        ("input 0", "weight", *["2x4:bfloat16"] * 2),
    ),
    # group_norm.cpp, group_norm: X.contiguous() unless channels last on a CPU.
    Row(
        "group norm, channels last",
        nn.GroupNorm(4, 8),
        (last(leaf(*IMAGE)),),
        ("2x8x6x6:float32", "weight", *["2x4:float32"] * 2),
    ),
    Row("rms norm", nn.RMSNorm(6), (leaf(4, 6),), ("input 0", "weight", "4x1:float32")),
    Row(
        "rms norm bf16",
        nn.RMSNorm(6, dtype=BF16),
        (leaf(4, 6, dtype=BF16),),
        ("input 0", "weight", "4x1:float32"),
    ),
    Row(
        "rms norm without a weight",
        nn.RMSNorm(6, elementwise_affine=False),
        (leaf(4, 6),),
        ("input 0", "4x1:float32"),
    ),
)

ROWS = (*_DROPOUT, *_BATCH_NORM, *_OTHERS)
