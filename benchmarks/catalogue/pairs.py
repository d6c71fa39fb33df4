"""Functions of two matrices: losses, products, normalizations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.catalogue.core import MATRIX, add

add(
    (MATRIX, MATRIX),
    mse_loss=F.mse_loss,
    mse_loss_sum=lambda x, y: F.mse_loss(x, y, reduction="sum"),
    mse_loss_none=lambda x, y: F.mse_loss(x, y, reduction="none"),
    l1_loss=F.l1_loss,
    smooth_l1_loss=F.smooth_l1_loss,
    huber_loss=F.huber_loss,
    huber_sum=lambda x, y: F.huber_loss(x, y, reduction="sum"),
    bce=lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.detach().sigmoid()),
    bce_weighted=lambda x, y: F.binary_cross_entropy(
        x.sigmoid(), y.detach().sigmoid(), y.detach().abs()
    ),
    bce_logits=lambda x, y: F.binary_cross_entropy_with_logits(x, y.detach().sigmoid()),
    bce_logits_none=lambda x, y: F.binary_cross_entropy_with_logits(
        x, y.detach().sigmoid(), reduction="none"
    ),
    bce_logits_weighted=lambda x, y: F.binary_cross_entropy_with_logits(
        x, y.detach().sigmoid(), pos_weight=torch.ones(1024)
    ),
    kl_div=lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1)),
    kl_div_batch=lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    kl_div_log=lambda x, y: F.kl_div(x.log_softmax(1), y.log_softmax(1), log_target=True),
    poisson_nll=lambda x, y: F.poisson_nll_loss(x, y.detach().abs()),
    gaussian_nll=lambda x, y: F.gaussian_nll_loss(x, y.detach(), y.detach().abs()),
    soft_margin=lambda x, y: F.soft_margin_loss(x, y.detach().sign()),
    margin_ranking=lambda x, y: F.margin_ranking_loss(x, y, y.detach().sign()),
    hinge_embedding=lambda x, y: F.hinge_embedding_loss(x, y.detach().sign()),
    cosine_embedding=lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(256)),
    multilabel_soft_margin=lambda x, y: F.multilabel_soft_margin_loss(x, (y.detach() > 0).float()),
    triplet=lambda x, y: F.triplet_margin_loss(x, y, x * y),
    soft_cross_entropy=lambda x, y: F.cross_entropy(x, y.detach().softmax(1)),
    linear=F.linear,
    mm=lambda x, y: x @ y.t(),
    mm_transposed=lambda x, y: x.t() @ y,
    cdist=lambda x, y: torch.cdist(x, y),
    cdist_exact=lambda x, y: torch.cdist(x[:20], y[:20]),
    cdist_p1=lambda x, y: torch.cdist(x, y, p=1.0),
    einsum=lambda x, y: torch.einsum("ij,kj->ik", x, y),
    einsum3=lambda x, y: torch.einsum("ij,kj,kl->il", x, y, y),
    einsum_outer=lambda x, y: torch.einsum("ij,ik->jk", x, y),
    einsum_diagonal=lambda x, y: torch.einsum("ij,ij->i", x, y),
    tensordot=lambda x, y: torch.tensordot(
        x.view(16, 16, 1024), y.view(16, 16, 1024), ([1, 2], [1, 2])
    ),
    addmm=lambda x, y: torch.addmm(x[:, :256], x, y.t()),
    addmv=lambda x, y: torch.addmv(x[:, 0], x, y[0]),
    mv=lambda x, y: x @ y[0],
    addr=lambda x, y: torch.addr(x, x[:, 0], y[0]),
    dot=lambda x, y: torch.dot(x.view(-1), y.view(-1)),
    vdot=lambda x, y: x.view(-1).vdot(y.view(-1)),
    inner=torch.inner,
    multi_dot=lambda x, y: torch.linalg.multi_dot([x, y.t(), x]),
    chain_matmul=lambda x, y: x @ y.t() @ x,
    masked_scatter=lambda x, y: x.masked_scatter(x > 0, y),
    linear_3d=lambda x, y: F.linear(x.view(8, 32, 1024), y, y[:, 0]),
    linear_expanded=lambda x, y: F.linear(x.view(8, 32, 1024), y, y[0, :1].expand(256)),
    linear_strided=lambda x, y: F.linear(x.view(8, 32, 1024).transpose(0, 1), y, y[:, 0]),
    linear_half=lambda x, y: F.linear(x.bfloat16(), y.bfloat16()),
    gelu_half=lambda x, y: F.gelu(x.half()),
    mm_half=lambda x, y: x.bfloat16() @ y.bfloat16().t(),
    mv_half=lambda x, y: x.bfloat16() @ y[0].bfloat16(),
    layer_norm=lambda x, y: F.layer_norm(x, (1024,), y[0], y[1]),
    rms_norm=lambda x, y: F.rms_norm(x, (1024,), y[0]),
    batch_norm=lambda x, y: F.batch_norm(x, None, None, y[0], y[1], training=True),
    batch_norm_eval=lambda x, y: F.batch_norm(x, y[0].detach(), y[1].detach().abs(), y[2], y[3]),
    bilinear=lambda x, y: F.bilinear(x[:, :32], y[:, :32], torch.ones(16, 32, 32)),
    matmul_1d=lambda x, y: x[0] @ y.t(),
    layer_norm_half=lambda x, y: F.layer_norm(
        x.bfloat16(), (1024,), y[0].bfloat16(), y[1].bfloat16()
    ),
)
