"""Products, losses, reductions, indices, windows and elementwise operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from saved_sets.row import Row, make_input, row

F = nn.functional
_aten = torch.ops.aten
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
_IN01 = "in0 in1"
_IN12 = "in1 in2"

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
    # _to_copy: options alone. roll, pixel_shuffle: sizes alone.
    row("cast", lambda x: x.to(BF16), "4x6"),
    row("roll", lambda x: x.roll((1, 2), (0, 1)), "4x6"),
    row("pixel shuffle", nn.PixelShuffle(2), "2x4x3x3"),
)

_PRODUCTS = (
    # mm: mat2 for self, self for mat2; the others likewise. addmm's self is not saved.
    row("mm", torch.mm, "4x6 6x5", _IN01),
    row("mm of a constant", torch.mm, "4x6:constant 6x5", "in0"),
    row("bmm", torch.bmm, "2x4x6 2x6x5", _IN01),
    row("addmm", torch.addmm, "5 4x6 6x5", _IN12),
    row("baddbmm", torch.baddbmm, "2x4x5 2x4x6 2x6x5", _IN12),
    row("addbmm", torch.addbmm, "4x5 2x4x6 2x6x5", _IN12),
    row("addmm in place", lambda x, a, b: (x * 1).addmm_(a, b), "4x5 4x6 6x5", _IN12),
    row("baddbmm in place", lambda x, a, b: (x * 1).baddbmm_(a, b), "2x4x5 2x4x6 2x6x5", _IN12),
    row("addmv in place", lambda x, a, b: (x * 1).addmv_(a, b), "4 4x6 6", _IN12),
    row("addmv", torch.addmv, "4 4x6 6", _IN12),
    row("dot", torch.dot, "6 6", _IN01),
    row("vdot", torch.vdot, "6 6", _IN01),
    row("linear", nn.Linear(6, 5), "4x6", "in0 weight"),
    # _grouped_mm: both matrices, and where the groups end.
    row(
        "grouped product",
        lambda x, weights, ends: F.grouped_mm(x, weights, offs=ends),
        "8x16 2x16x8 2:int32",
        "in0 in1 in2",
    ),
    # convolution: input and weight, of the bias its sizes.
    row("convolution", nn.Conv2d(3, 4, 3), "2x3x8x8", "in0 weight"),
    # _cdist_forward: x1, x2, result. In float32, and few enough for no product of matrices.
    row("distances", lambda a, b: torch.cdist(a, b, p=1.0), "4x6 5x6", "in0 in1 4x5"),
)


def _ctc(x: Tensor, targets: Tensor) -> Tensor:
    return F.ctc_loss(x, targets, (12, 12), (4, 5), reduction="sum")


def _ctc_tensors(x: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    return F.ctc_loss(x, targets, steps, lengths, reduction="none")


def _weighted_nll(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return F.nll_loss(x, y, weight)


_PAIRWISE = (
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"
)
_LOSSES = (
    # nll_loss_forward: self, target, weight and total_weight, a scalar; cross entropy's self is
    # the result of log_softmax, which that saves as well.
    row("nll loss", F.nll_loss, "8x10 8:int64", "in0 in1 :float32"),
    row("weighted nll loss", _weighted_nll, "8x10 8:int64 10:constant", "in0 in1 in2 :float32"),
    row("nll loss 2d", F.nll_loss, "2x10x4x4 2x4x4:int64", "in0 in1 :float32"),
    row("cross entropy", F.cross_entropy, "8x10 8:int64", "8x10 in1 :float32"),
    # Self and target of each; those that are also made for the target's gradient save no more.
    *(row(name, getattr(F, name), "4x6 4x6:constant", _IN01) for name in _PAIRWISE.split()),
    # multilabel_margin_loss_forward: self, target and is_target, of the input's type
    # (cuda/MultiLabelMarginCriterion.cu).
    row("multilabel margin", F.multilabel_margin_loss, "8x10 8x10:int64", "in0 in1 8x10"),
    # _ctc_loss: log_probs, targets, result0 (a loss each) and result1, log_alpha, of sizes
    # (batch, steps, 2 * longest target + 1) (cuda/LossCTC.cu, ctc_loss_gpu_template).
    row("ctc loss", _ctc, "12x2x7 2x6:int64", "in0 in1 2 2x12x11"),
    # ctc_loss_tensor: the lengths are saved; those of targets in rows are not looked at, and the
    # longest is as long as a row (6 of them).
    row(
        "ctc loss with tensors of lengths",
        _ctc_tensors,
        "12x2x7 2x6:int64 2:int64 2:int64",
        "in0 in1 in2 in3 2 2x12x13",
    ),
)


def _total(*tensors: Tensor) -> Tensor:
    """The sum of all, so that each has a gradient; sums save sizes alone."""
    return sum((x.sum() for x in tensors[1:]), tensors[0].sum())


def _call(name: str, *args: Any) -> Callable[[Tensor], Tensor]:
    """Calls a method; of several results, the first."""

    def run(x: Tensor) -> Tensor:
        result = getattr(x, name)(*args)
        return result if isinstance(result, Tensor) else result[0]

    return run


_REDUCTIONS = (
    # sum, mean: sizes. nansum, var: self. prod, std, norms, logsumexp, amax: self and result.
    *(row(name, _call(name), "4x6") for name in ("sum", "mean")),
    row("mean of rows", _call("mean", 1), "4x6"),
    *(row(name, _call(name, 1), "4x6", "in0") for name in ("nansum", "var")),
    *(
        row(f"{name} of rows", _call(name, 1), "4x6", "in0 4")
        for name in ("prod", "std", "logsumexp", "amax", "amin")
    ),
    row("var and mean", lambda x: _total(*torch.var_mean(x, 1)), "4x6", "in0"),
    row("std and mean", lambda x: _total(*torch.std_mean(x, 1)), "4x6", "in0 4"),
    row("norm, scalar", lambda x: _aten.norm.Scalar(x, 2), "4x6", "in0 :float32"),
    row("norm, dimension", lambda x: _aten.norm.ScalarOpt_dim(x, 2, [1]), "4x6", "in0 4"),
    # ScalarOpt_dim_dtype: self.to(grad.scalar_type()) of self.
    row(
        "norm, dtype",
        lambda x: _aten.norm.ScalarOpt_dim_dtype(x, 2, [1], False, dtype=torch.float64),
        "4x6",
        "in0 4:float64",
    ),
    # _foreach_norm.Scalar: self[i] and result[i].
    row(
        "norms of several",
        lambda a, b: torch.stack(torch._foreach_norm([a, b])),
        "4x6 5",
        "in0 in1 :float32 :float32",
    ),
    row("aminmax", lambda x: _total(*x.aminmax(dim=1)), "4x6", "in0 4 4"),
    # value_selecting_reduction_backward: indices; evenly_distribute_backward: self and result.
    *(row(f"{n} of rows", _call(n, 1), "4x6", "4:int64") for n in ("max", "min", "median")),
    *(
        row(name, _call(name), "4x6", "in0 :float32")
        for name in ("prod", "norm", "max", "min", "median")
    ),
    row("sort", _call("sort"), "4x6", "4x6:int64"),
    row("stable sort", lambda x: torch.sort(x, stable=True)[0], "4x6", "4x6:int64"),
    row("topk", _call("topk", 3), "4x6", "4x3:int64"),
    # cumsum: nothing; cumprod, logcumsumexp: self and result; cummax: self and indices.
    row("cumsum", _call("cumsum", 1), "4x6"),
    row("cumprod", _call("cumprod", 1), "4x6", "in0 4x6"),
    row("logcumsumexp", _call("logcumsumexp", 1), "4x6", "in0 4x6"),
    row("cummax", _call("cummax", 1), "4x6", "in0 4x6:int64"),
)


def _bag(mode: str, **settings: bool) -> nn.Module:
    return nn.EmbeddingBag(10, 4, mode=mode, **settings)


_PUT = "4x6 3:int64 3x6"
_INDICES = (
    # index.Tensor: indices. index_put: indices, of the values their sizes (zeros_like).
    row("index", lambda x, i: x[i], "4x6 3:int64", "in1"),
    row("unsafe index", lambda x, i: _aten._unsafe_index(x, [i]), "4x6 3:int64", "in1"),
    row("index put", lambda x, i, y: x.index_put((i,), y), _PUT, "in1"),
    row("index put in place", lambda x, i, y: (x * 1).index_put_((i,), y), _PUT, "in1"),
    # index_select, scatter_add: index. gather: self, too; put, index_add: source, for its shape.
    row("put", lambda x, i, y: x.put(i, y), "4x6 3:int64 3", _IN12),
    row("index add", lambda x, i, y: x.index_add(0, i, y), _PUT, _IN12),
    row("index select", lambda x, i: x.index_select(0, i), "4x6 3:int64", "in1"),
    row("gather", lambda x, i: x.gather(1, i), "4x6 4x2:int64", _IN01),
    row("scatter add", lambda x, i, y: x.scatter_add(1, i, y), "4x6 4x2:int64 4x2", "in1"),
    # scatter_reduce: self, index, src and result, whatever it reduces by.
    row(
        "scatter reduce",
        lambda x, i, y: x.scatter_reduce(0, i, y, "mean"),
        "4x6 2x6:int64 2x6",
        "in0 in1 in2 4x6",
    ),
    # repeat_interleave (Repeat.cpp): index_select by what the operator of repeats makes.
    Row(
        "repeat interleave",
        lambda x, repeats: x.repeat_interleave(repeats, 0, output_size=9),
        (make_input("4x6"), torch.tensor([1, 2, 3, 3])),
        ("9:int64",),
    ),
    # masked_select: self and mask; masked_scatter: mask, of the source its sizes.
    row("masked select", lambda x, m: x.masked_select(m), "4x6 4x6:bool", _IN01),
    row("masked scatter", lambda x, m, y: x.masked_scatter(m, y), "4x6 4x6:bool 24", "in1"),
    row(
        "masked scatter in place",
        lambda x, m, y: (x * 1).masked_scatter_(m, y),
        "4x6 4x6:bool 24",
        "in1",
    ),
    # embedding: indices.
    row("embedding", nn.Embedding(10, 4), "3x5:int64", "in0"),
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


def _interpolate(mode: str, **settings: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, scale_factor=2, mode=mode, **settings)


_1D, _2D, _3D = "2x3x8", "2x3x8x8", "1x2x4x4x4"
_WINDOWS = (
    # max_pool2d_with_indices: self and the indices, of 64 bits. In one dimension it is the same of
    # a view (Pooling.cpp, max_pool1d_with_indices).
    row("max pool 1d", nn.MaxPool1d(2), _1D, "in0 2x3x1x4:int64"),
    row("max pool 2d", nn.MaxPool2d(2), _2D, "in0 2x3x4x4:int64"),
    row("max pool 3d", nn.MaxPool3d(2), _3D, "in0 1x2x2x2x2:int64"),
    # Averages save self, for its sizes and format.
    row("average pool 2d", nn.AvgPool2d(2), _2D, "in0"),
    row("average pool 3d", nn.AvgPool3d(2), _3D, "in0"),
    row("adaptive average pool 2d", nn.AdaptiveAvgPool2d(3), _2D, "in0"),
    row("adaptive average pool 3d", nn.AdaptiveAvgPool3d(2), _3D, "in0"),
    # AdaptiveAveragePooling.cpp: of size 1 it is a mean.
    row("adaptive average pool 2d to 1", nn.AdaptiveAvgPool2d(1), _2D),
    row("adaptive max pool 2d", nn.AdaptiveMaxPool2d(3), _2D, "in0 2x3x3x3:int64"),
    row("adaptive max pool 3d", nn.AdaptiveMaxPool3d(2), _3D, "in0 1x2x2x2x2:int64"),
    # max_unpool2d: indices.
    row("max unpool 2d", lambda x, i: F.max_unpool2d(x, i, 2), "2x3x4x4 2x3x4x4:int64", "in1"),
    row("max unpool 3d", lambda x, i: F.max_unpool3d(x, i, 2), "1x2x2x2x2 1x2x2x2x2:int64", "in1"),
    # upsample_*: sizes.
    *(
        row(f"{mode} {size.count('x') - 1}d", _interpolate(mode), size)
        for mode in ("nearest", "nearest-exact")
        for size in (_1D, _2D, _3D)
    ),
    row("linear 1d", _interpolate("linear"), _1D),
    row("bilinear", _interpolate("bilinear"), _2D),
    row("bicubic", _interpolate("bicubic"), _2D),
    row("trilinear", _interpolate("trilinear"), _3D),
    row("bilinear, antialiased", _interpolate("bilinear", antialias=True), _2D),
    row("bicubic, antialiased", _interpolate("bicubic", antialias=True), _2D),
    # reflection_pad*, replication_pad*: self.
    row("reflection pad 1d", nn.ReflectionPad1d(1), _1D, "in0"),
    row("reflection pad 2d", nn.ReflectionPad2d(1), _2D, "in0"),
    row("reflection pad 3d", nn.ReflectionPad3d(1), _3D, "in0"),
    row("replication pad 2d", nn.ReplicationPad2d(1), _2D, "in0"),
    row("replication pad 3d", nn.ReplicationPad3d(1), _3D, "in0"),
    # im2col, col2im: sizes.
    row("unfold", nn.Unfold(2), _2D),
)

ROWS = (*_ACTIVATIONS, *_PRODUCTS, *_LOSSES, *_REDUCTIONS, *_INDICES, *_WINDOWS)
