"""Indices, masks and embeddings."""

from __future__ import annotations

import torch
from torch import nn

from saved_sets.row import Row, index, leaf

F = nn.functional
_aten = torch.ops.aten
_MASK = torch.zeros(4, 6, dtype=torch.bool)


def _bag(mode: str, **settings: bool) -> nn.Module:
    return nn.EmbeddingBag(10, 4, mode=mode, **settings)


ROWS = (
    # index.Tensor: indices. index_put: indices, of the values their sizes (zeros_like).
    Row("index", lambda x, i: x[i], (leaf(4, 6), index(3)), ("input 1",)),
    Row(
        "unsafe index",
        lambda x, i: _aten._unsafe_index(x, [i]),
        (leaf(4, 6), index(3)),
        ("input 1",),
    ),
    Row(
        "index put",
        lambda x, i, y: x.index_put((i,), y),
        (leaf(4, 6), index(3), leaf(3, 6)),
        ("input 1",),
    ),
    Row(
        "index put, accumulating",
        lambda x, i, y: x.index_put((i,), y, accumulate=True),
        (leaf(4, 6), index(3), leaf(3, 6)),
        ("input 1",),
    ),
    Row(
        "unsafe index put",
        lambda x, i, y: _aten._unsafe_index_put(x, [i], y),
        (leaf(4, 6), index(3), leaf(3, 6)),
        ("input 1",),
    ),
    # index_select, scatter_add: index. gather: self, too; put: source, for its shape.
    Row(
        "put",
        lambda x, i, y: x.put(i, y),
        (leaf(4, 6), index(3), leaf(3)),
        ("input 1", "input 2"),
    ),
    Row("index select", lambda x, i: x.index_select(0, i), (leaf(4, 6), index(3)), ("input 1",)),
    Row("gather", lambda x, i: x.gather(1, i), (leaf(4, 6), index(4, 2)), ("input 0", "input 1")),
    Row(
        "scatter add",
        lambda x, i, y: x.scatter_add(1, i, y),
        (leaf(4, 6), index(4, 2), leaf(4, 2)),
        ("input 1",),
    ),
    # index_add: index, and source, for its shape.
    Row(
        "index add",
        lambda x, i, y: x.index_add(0, i, y),
        (leaf(4, 6), index(3), leaf(3, 6)),
        ("input 1", "input 2"),
    ),
    # scatter_reduce: self, index, src and result, whatever it reduces by.
    Row(
        "scatter reduce",
        lambda x, i, y: x.scatter_reduce(0, i, y, "mean"),
        (leaf(4, 6), index(2, 6), leaf(2, 6)),
        ("input 0", "input 1", "input 2", "4x6:float32"),
    ),
    # repeat_interleave (Repeat.cpp): index_select by what the operator of repeats makes.
    Row(
        "repeat interleave",
        lambda x, repeats: x.repeat_interleave(repeats, 0, output_size=9),
        (leaf(4, 6), torch.tensor([1, 2, 3, 3])),
        ("9:int64",),
    ),
    # In place: as the operators beside them.
    Row(
        "index put in place",
        lambda x, i, y: (x * 1).index_put_((i,), y),
        (leaf(4, 6), index(3), leaf(3, 6)),
        ("input 1",),
    ),
    Row(
        "put in place",
        lambda x, i, y: (x * 1).put_(i, y),
        (leaf(4, 6), index(3), leaf(3)),
        ("input 1", "input 2"),
    ),
    Row(
        "masked scatter in place",
        lambda x, m, y: (x * 1).masked_scatter_(m, y),
        (leaf(4, 6), _MASK, leaf(24)),
        ("input 1",),
    ),
    # masked_select: self and mask; masked_scatter: mask, of the source its sizes.
    Row(
        "masked select",
        lambda x, m: x.masked_select(m),
        (leaf(4, 6), _MASK),
        ("input 0", "input 1"),
    ),
    Row(
        "masked scatter",
        lambda x, m, y: x.masked_scatter(m, y),
        (leaf(4, 6), _MASK, leaf(24)),
        ("input 1",),
    ),
    # embedding: indices.
    Row("embedding", nn.Embedding(10, 4), (index(3, 5),), ("input 0",)),
    # _embedding_bag: indices, offsets, result1 (the bag of each index), result2 (the bags' sizes),
    # result3 (where the maxima are, no elements in other modes), per_sample_weights; the weight
    # for the gradient of those. EmbeddingBag.cu, _embedding_bag_cuda: sizes of the results.
    # nn.functional.embedding_bag makes the offsets of bags that are rows.
    Row("bags, sum", _bag("sum"), (index(3, 5),), ("input 0", "3:int64", "15:int64", "3:int64")),
    Row("bags, mean", _bag("mean"), (index(3, 5),), ("input 0", "3:int64", "15:int64", "3:int64")),
    Row(
        "bags, max",
        _bag("max"),
        (index(3, 5),),
        ("input 0", "3:int64", "15:int64", "3:int64", "3x4:int64"),
    ),
    Row(
        "bags, offsets with the last",
        _bag("sum", include_last_offset=True),
        (index(15), index(4)),
        ("input 0", "input 1", "15:int64", "4:int64"),
    ),
    Row(
        "bags, weighted",
        lambda w, i, factors: F.embedding_bag(i, w, mode="sum", per_sample_weights=factors),
        (leaf(10, 4), index(3, 5), leaf(3, 5)),
        ("input 0", "input 1", "input 2", "3:int64", "15:int64", "3:int64"),
    ),
    Row("bags, inference", _bag("sum"), (index(3, 5),), (), mode="infer"),
)
