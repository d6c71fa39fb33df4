"""Products, losses, embeddings, windows and elementwise operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from saved_sets.row import row

F = nn.functional
F32 = torch.float32

_ACTIVATIONS = (
    # _softmax, _log_softmax: result. From float16 to float32 the kernel casts (SoftMax.cpp,
    # ``softmax``), and there is one result; from bfloat16 a copy is made first, and not saved.
    row("softmax", lambda x: x.softmax(-1), "4x6", "4x6"),
    row("special softmax", lambda x: torch.special.softmax(x, -1), "4x6", "4x6"),
    row("softmax fp16", lambda x: torch.softmax(x, -1, dtype=F32), "4x6:float16", "4x6"),
    row("softmax bf16", lambda x: F.softmax(x, -1, dtype=F32), "4x6:bfloat16", "4x6"),
    row("log softmax", lambda x: x.log_softmax(-1), "4x6", "4x6"),
    row("special log softmax", lambda x: torch.special.log_softmax(x, -1), "4x6", "4x6"),
    row("log softmax fp16", lambda x: torch.log_softmax(x, -1, dtype=F32), "4x6:float16", "4x6"),
    # _masked_softmax: result and mask; _safe_softmax: result.
    row(
        "masked softmax", lambda x, m: torch._masked_softmax(x, m, -1, 2), "4x6 4x6:bool", "4x6 in1"
    ),
    # log_sigmoid_forward: self, and a buffer that has no elements on CUDA (cuda/Activation.cpp).
    row("log sigmoid", F.logsigmoid, "4x6", "in0"),
    # pixel_shuffle: sizes alone.
    row("pixel shuffle", nn.PixelShuffle(2), "2x4x3x3"),
)

_PRODUCTS = (
    # _grouped_mm: both matrices, and where the groups end.
    row(
        "grouped product",
        lambda x, weights, ends: F.grouped_mm(x, weights, offs=ends),
        "8x16 2x16x8 2:int32",
        "in0 in1 in2",
    ),
    # convolution: input and weight, of the bias its sizes.
    row("convolution", nn.Conv2d(3, 4, 3), "2x3x8x8", "in0 weight"),
)


def _ctc(x: Tensor, targets: Tensor) -> Tensor:
    return F.ctc_loss(x, targets, (12, 12), (4, 5), reduction="sum")


def _ctc_tensors(x: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    return F.ctc_loss(x, targets, steps, lengths, reduction="none")


_LOSSES = (
    row(
        "binary cross entropy with logits",
        F.binary_cross_entropy_with_logits,
        "4x6 4x6:constant",
        "in0 in1",
    ),
    # _ctc_loss: log_probs, targets, result0 (a loss each) and result1, log_alpha, of sizes
    # (batch, steps, 2 * longest target + 1) (cuda/LossCTC.cu, ctc_loss_gpu_template).
    row("ctc loss", _ctc, "12x2x7 2x6:int64", "in0 in1 2 2x12x11"),
    # ctc_loss_tensor: the lengths are saved; the lengths of targets in rows are not looked at, and
    # the longest is as long as a row (6 of them).
    row(
        "ctc loss with tensors of lengths",
        _ctc_tensors,
        "12x2x7 2x6:int64 2:int64 2:int64",
        "in0 in1 in2 in3 2 2x12x13",
    ),
)


def _bag(mode: str, **settings: bool) -> nn.Module:
    return nn.EmbeddingBag(10, 4, mode=mode, **settings)


_BAGS = (
    # _embedding_bag: indices, offsets, result1 (the bag of each index), result2 (the bags' sizes),
    # result3 (where the maxima are, no elements in other modes), per_sample_weights; the weight
    # for the gradient of those. EmbeddingBag.cu, _embedding_bag_cuda: sizes of the results.
    # nn.functional.embedding_bag makes the offsets of bags that are rows.
    row("bags, mean", _bag("mean"), "3x5:int64", "in0 3:int64 15:int64 3:int64"),
    row("bags, max", _bag("max"), "3x5:int64", "in0 3:int64 15:int64 3:int64 3x4:int64"),
    row(
        "bags, offsets with the last",
        _bag("sum", include_last_offset=True),
        "15:int64 4:int64",
        "in0 in1 15:int64 4:int64",
    ),
    row(
        "bags, weighted",
        lambda w, i, factors: F.embedding_bag(i, w, mode="sum", per_sample_weights=factors),
        "10x4 3x5:int64 3x5",
        "in0 in1 in2 3:int64 15:int64 3:int64",
    ),
    row("bags, inference", _bag("sum"), "3x5:int64", mode="infer"),
)


def _interpolate(mode: str) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, scale_factor=2, mode=mode)


_2D, _3D = "2x3x8x8", "1x2x4x4x4"
_WINDOWS = (
    # upsample_*, im2col: sizes. reflection_pad*, replication_pad*: self.
    *(row(mode, _interpolate(mode), _2D) for mode in ("nearest", "nearest-exact", "bilinear")),
    row("reflection pad 2d", nn.ReflectionPad2d(1), _2D, "in0"),
    row("reflection pad 3d", nn.ReflectionPad3d(1), _3D, "in0"),
    row("replication pad 2d", nn.ReplicationPad2d(1), _2D, "in0"),
    row("replication pad 3d", nn.ReplicationPad3d(1), _3D, "in0"),
    row("unfold", nn.Unfold(2), _2D),
)

ROWS = (*_ACTIVATIONS, *_PRODUCTS, *_LOSSES, *_BAGS, *_WINDOWS)
