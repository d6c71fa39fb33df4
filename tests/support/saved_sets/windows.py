"""Pooling, resampling, padding and patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from saved_sets.row import Row, index, leaf

F = nn.functional
_1D, _2D, _3D = (leaf(2, 3, 8),), (leaf(2, 3, 8, 8),), (leaf(1, 2, 4, 4, 4),)
_LAST = (leaf(2, 3, 8, 8).detach().to(memory_format=torch.channels_last).requires_grad_(),)


def _interpolate(mode: str, **settings: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, scale_factor=2, mode=mode, **settings)


ROWS = (
    # max_pool2d_with_indices: self and the indices, of 64 bits. In one dimension it is the same of
    # a view (Pooling.cpp, max_pool1d_with_indices).
    Row("max pool 1d", nn.MaxPool1d(2), _1D, ("input 0", "2x3x1x4:int64")),
    Row("max pool 2d", nn.MaxPool2d(2), _2D, ("input 0", "2x3x4x4:int64")),
    Row("max pool 2d, channels last", nn.MaxPool2d(2), _LAST, ("input 0", "2x3x4x4:int64")),
    Row("max pool 3d", nn.MaxPool3d(2), _3D, ("input 0", "1x2x2x2x2:int64")),
    # Averages save self, for its sizes and format.
    Row("average pool 1d", nn.AvgPool1d(2), _1D, ("input 0",)),
    Row("average pool 2d", nn.AvgPool2d(2), _2D, ("input 0",)),
    Row("average pool 3d", nn.AvgPool3d(2), _3D, ("input 0",)),
    Row("adaptive average pool 2d", nn.AdaptiveAvgPool2d(3), _2D, ("input 0",)),
    Row("adaptive average pool 3d", nn.AdaptiveAvgPool3d(2), _3D, ("input 0",)),
    # AdaptiveAveragePooling.cpp: of size 1 it is a mean.
    Row("adaptive average pool 2d to 1", nn.AdaptiveAvgPool2d(1), _2D, ()),
    Row("adaptive max pool 2d", nn.AdaptiveMaxPool2d(3), _2D, ("input 0", "2x3x3x3:int64")),
    Row("adaptive max pool 3d", nn.AdaptiveMaxPool3d(2), _3D, ("input 0", "1x2x2x2x2:int64")),
    # max_unpool2d: indices.
    Row(
        "max unpool 2d",
        lambda x, i: F.max_unpool2d(x, i, 2),
        (leaf(2, 3, 4, 4), index(2, 3, 4, 4)),
        ("input 1",),
    ),
    Row(
        "max unpool 3d",
        lambda x, i: F.max_unpool3d(x, i, 2),
        (leaf(1, 2, 2, 2, 2), index(1, 2, 2, 2, 2)),
        ("input 1",),
    ),
    # upsample_*: sizes.
    *(
        Row(f"{mode} {len(x[0].shape) - 2}d", _interpolate(mode), x, ())
        for mode in ("nearest", "nearest-exact")
        for x in (_1D, _2D, _3D)
    ),
    Row("linear 1d", _interpolate("linear"), _1D, ()),
    Row("bilinear", _interpolate("bilinear"), _2D, ()),
    Row("bicubic", _interpolate("bicubic"), _2D, ()),
    Row("trilinear", _interpolate("trilinear"), _3D, ()),
    Row("bilinear, antialiased", _interpolate("bilinear", antialias=True), _2D, ()),
    Row("bicubic, antialiased", _interpolate("bicubic", antialias=True), _2D, ()),
    # reflection_pad*, replication_pad*: self.
    Row("reflection pad 1d", nn.ReflectionPad1d(1), _1D, ("input 0",)),
    Row("reflection pad 2d", nn.ReflectionPad2d(1), _2D, ("input 0",)),
    Row("reflection pad 3d", nn.ReflectionPad3d(1), _3D, ("input 0",)),
    Row("replication pad 2d", nn.ReplicationPad2d(1), _2D, ("input 0",)),
    Row("replication pad 3d", nn.ReplicationPad3d(1), _3D, ("input 0",)),
    # im2col, col2im: sizes.
    Row("unfold", nn.Unfold(2), _2D, ()),
    Row("fold", nn.Fold((8, 8), 2, stride=2), (leaf(2, 12, 16),), ()),
)
