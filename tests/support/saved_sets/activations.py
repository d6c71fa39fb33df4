"""Softmax, products, convolutions and elementwise operators."""

from __future__ import annotations

import torch
from torch import nn

from saved_sets.row import Row, leaf

F = nn.functional
F16, BF16 = torch.float16, torch.bfloat16
_MASK = torch.zeros(4, 6, dtype=torch.bool)

ROWS = (
    # _softmax, _log_softmax: result. From float16 to float32 the kernel casts (SoftMax.cpp,
    # ``softmax``), and there is one result; from bfloat16 a copy is made first, and not saved.
    Row("softmax", lambda x: x.softmax(-1), (leaf(4, 6),), ("4x6:float32",)),
    Row("special softmax", lambda x: torch.special.softmax(x, -1), (leaf(4, 6),), ("4x6:float32",)),
    Row("softmax bf16", lambda x: F.softmax(x, -1), (leaf(4, 6, dtype=BF16),), ("4x6:bfloat16",)),
    Row(
        "softmax fp16 to fp32",
        lambda x: torch.softmax(x, -1, dtype=torch.float32),
        (leaf(4, 6, dtype=F16),),
        ("4x6:float32",),
    ),
    Row(
        "softmax bf16 to fp32",
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        (leaf(4, 6, dtype=BF16),),
        ("4x6:float32",),
    ),
    Row("log softmax", lambda x: x.log_softmax(-1), (leaf(4, 6),), ("4x6:float32",)),
    Row(
        "special log softmax",
        lambda x: torch.special.log_softmax(x, -1),
        (leaf(4, 6),),
        ("4x6:float32",),
    ),
    Row(
        "log softmax fp16 to fp32",
        lambda x: torch.log_softmax(x, -1, dtype=torch.float32),
        (leaf(4, 6, dtype=F16),),
        ("4x6:float32",),
    ),
    # _masked_softmax: result and mask; _safe_softmax: result.
    Row(
        "masked softmax",
        lambda x, mask: torch._masked_softmax(x, mask, -1, 2),
        (leaf(4, 6), _MASK),
        ("4x6:float32", "input 1"),
    ),
    # log_sigmoid_forward: self, and a buffer that has no elements on CUDA (cuda/Activation.cpp).
    Row("log sigmoid", F.logsigmoid, (leaf(4, 6),), ("input 0",)),
    # mm: mat2 for self, self for mat2; the others likewise. addmm's self is not saved.
    Row("mm", torch.mm, (leaf(4, 6), leaf(6, 5)), ("input 0", "input 1")),
    Row("mm of a constant", torch.mm, (torch.zeros(4, 6), leaf(6, 5)), ("input 0",)),
    Row("bmm", torch.bmm, (leaf(2, 4, 6), leaf(2, 6, 5)), ("input 0", "input 1")),
    Row("addmm", torch.addmm, (leaf(5), leaf(4, 6), leaf(6, 5)), ("input 1", "input 2")),
    Row(
        "baddbmm",
        torch.baddbmm,
        (leaf(2, 4, 5), leaf(2, 4, 6), leaf(2, 6, 5)),
        ("input 1", "input 2"),
    ),
    Row(
        "addbmm",
        torch.addbmm,
        (leaf(4, 5), leaf(2, 4, 6), leaf(2, 6, 5)),
        ("input 1", "input 2"),
    ),
    Row(
        "addmm in place",
        lambda x, a, b: (x * 1).addmm_(a, b),
        (leaf(4, 5), leaf(4, 6), leaf(6, 5)),
        ("input 1", "input 2"),
    ),
    Row(
        "baddbmm in place",
        lambda x, a, b: (x * 1).baddbmm_(a, b),
        (leaf(2, 4, 5), leaf(2, 4, 6), leaf(2, 6, 5)),
        ("input 1", "input 2"),
    ),
    Row(
        "addmv in place",
        lambda x, a, b: (x * 1).addmv_(a, b),
        (leaf(4), leaf(4, 6), leaf(6)),
        ("input 1", "input 2"),
    ),
    Row("mv", torch.mv, (leaf(4, 6), leaf(6)), ("input 0", "input 1")),
    Row("addmv", torch.addmv, (leaf(4), leaf(4, 6), leaf(6)), ("input 1", "input 2")),
    Row("dot", torch.dot, (leaf(6), leaf(6)), ("input 0", "input 1")),
    Row("vdot", torch.vdot, (leaf(6), leaf(6)), ("input 0", "input 1")),
    Row("linear", nn.Linear(6, 5), (leaf(4, 6),), ("input 0", "weight")),
    # convolution: input and weight, of the bias its sizes.
    Row("convolution", nn.Conv2d(3, 4, 3), (leaf(2, 3, 8, 8),), ("input 0", "weight")),
    Row(
        "transposed convolution",
        nn.ConvTranspose1d(3, 4, 3),
        (leaf(2, 3, 8),),
        ("input 0", "weight"),
    ),
    # _cdist_forward: x1, x2, result. In float32, and few enough for no product of matrices.
    Row(
        "distances",
        lambda a, b: torch.cdist(a, b, p=1.0),
        (leaf(4, 6), leaf(5, 6)),
        ("input 0", "input 1", "4x5:float32"),
    ),
    # _foreach_norm.Scalar: self[i] and result[i].
    Row(
        "norms of several",
        lambda a, b: torch.stack(torch._foreach_norm([a, b])),
        (leaf(4, 6), leaf(5)),
        ("input 0", "input 1", ":float32", ":float32"),
    ),
    # _to_copy: options alone. roll, pixel_shuffle: sizes alone.
    Row("cast", lambda x: x.to(BF16), (leaf(4, 6),), ()),
    Row("roll", lambda x: x.roll((1, 2), (0, 1)), (leaf(4, 6),), ()),
    Row("pixel shuffle", nn.PixelShuffle(2), (leaf(2, 4, 3, 3),), ()),
    Row("pixel unshuffle", nn.PixelUnshuffle(2), (leaf(2, 1, 4, 4),), ()),
)
