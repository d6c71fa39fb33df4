"""Functions of indices: classes, embeddings, gathering and scattering."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.cases import ids
from benchmarks.catalogue.core import MATRIX, add

add(
    (MATRIX, ids(256, high=256)),
    cross_entropy=F.cross_entropy,
    cross_entropy_smooth=lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1),
    cross_entropy_none=lambda x, i: F.cross_entropy(x, i, reduction="none"),
    cross_entropy_weight=lambda x, i: F.cross_entropy(x, i, torch.ones(1024)),
    nll_loss=F.nll_loss,
    multi_margin=F.multi_margin_loss,
    multi_margin_p2=lambda x, i: F.multi_margin_loss(x, i, p=2),
    multilabel_margin=lambda x, i: F.multilabel_margin_loss(
        x, i[:, None].expand(-1, 1024).contiguous()
    ),
    embedding=lambda x, i: F.embedding(i, x),
    embedding_norm=lambda x, i: F.embedding(i, x * 1, max_norm=None, scale_grad_by_freq=True),
    index_select=lambda x, i: x.index_select(0, i),
    index_select1=lambda x, i: x.index_select(1, i),
    index=lambda x, i: x[i],
    index1=lambda x, i: x[:, i],
    index2=lambda x, i: x[i, i],
    index_mask=lambda x, i: (x * (i > 3)[:, None])[:100],
    index_put=lambda x, i: torch.zeros(MATRIX).index_put((i,), x),
    index_put_add=lambda x, i: torch.zeros(MATRIX).index_put((i,), x, accumulate=True),
    index_add=lambda x, i: torch.zeros(MATRIX).index_add(0, i, x),
    index_add1=lambda x, i: torch.zeros(256, 256).index_add(1, i, x[:, :256]),
    index_copy=lambda x, i: torch.zeros(MATRIX).index_copy(0, i, x),
    index_copy1=lambda x, i: torch.zeros(256, 256).index_copy(1, i, x[:, :256]),
    index_fill=lambda x, i: x.index_fill(0, i, 1.5),
    index_fill1=lambda x, i: x.index_fill(1, i, 1.5),
    index_mean=lambda x, i: torch.zeros(MATRIX).index_reduce(0, i, x, "mean"),
    index_reduce=lambda x, i: x.index_reduce(0, i, x * 2, "amax"),
    take=lambda x, i: x.take(i),
    put=lambda x, i: x.put(i, x[:, 0]),
    take_along=lambda x, i: x.take_along_dim(i[:, None], 1),
    gather=lambda x, i: x.gather(1, i[:, None].expand(-1, 1024).contiguous()),
    gather0=lambda x, i: x.gather(0, i[:, None].expand(-1, 1024)),
    scatter=lambda x, i: torch.zeros(MATRIX).scatter(1, i[:, None].expand(-1, 1024), x),
    scatter_number=lambda x, i: x.scatter(1, i[:, None], 2.0),
    scatter0=lambda x, i: torch.zeros(MATRIX).scatter(0, i[:, None].expand(-1, 1024), x),
    scatter_add=lambda x, i: torch.zeros(MATRIX).scatter_add(0, i[:, None].expand(-1, 1024), x),
    scatter_add1=lambda x, i: torch.zeros(MATRIX).scatter_add(1, i[:, None].expand(-1, 1024), x),
    scatter_reduce=lambda x, i: torch.zeros(MATRIX).scatter_reduce(
        0, i[:, None].expand(-1, 1024), x, "amax"
    ),
    scatter_mean=lambda x, i: torch.zeros(MATRIX).scatter_reduce(
        0, i[:, None].expand(-1, 1024), x, "mean"
    ),
    embedding_bag=lambda x, i: F.embedding_bag(i.view(64, 4), x),
    embedding_bag_sum=lambda x, i: F.embedding_bag(i.view(64, 4), x, mode="sum"),
    embedding_bag_max=lambda x, i: F.embedding_bag(i.view(64, 4), x, mode="max"),
    embedding_bag_offsets=lambda x, i: F.embedding_bag(i, x, torch.arange(0, 256, 8)),
    embedding_bag_last=lambda x, i: F.embedding_bag(
        i, x, torch.arange(0, 257, 8), include_last_offset=True
    ),
    embedding_bag_padding=lambda x, i: F.embedding_bag(i.view(64, 4), x, padding_idx=1),
    embedding_bag_sum_padding=lambda x, i: F.embedding_bag(
        i.view(64, 4), x, mode="sum", padding_idx=1
    ),
    embedding_bag_weighted=lambda x, i: F.embedding_bag(
        i.view(64, 4), x, mode="sum", per_sample_weights=x[:64, :4] * 1
    ),
    embedding_bag_scaled=lambda x, i: F.embedding_bag(i.view(64, 4), x, scale_grad_by_freq=True),
    embedding_bag_half=lambda x, i: F.embedding_bag(i.view(64, 4), x.bfloat16(), mode="sum"),
    ctc_loss=lambda x, i: F.ctc_loss(
        x.view(64, 4, 1024).log_softmax(2), i.view(4, 64)[:, :20] + 1, [64] * 4, [20] * 4
    ),
)
