"""Functions of batches of matrices: linear algebra and attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.catalogue.core import SQUARE, add


def _definite(x: torch.Tensor) -> torch.Tensor:
    """Positive definite matrices."""
    return x @ x.mT + 1000 * torch.eye(x.shape[-1])


add(
    (SQUARE,),
    inv=torch.linalg.inv,
    det=torch.linalg.det,
    slogdet=lambda x: torch.linalg.slogdet(x)[1],
    cholesky=lambda x: torch.linalg.cholesky(_definite(x)),
    solve=lambda x: torch.linalg.solve(x, x * 2),
    svd=lambda x: torch.linalg.svd(x)[1],
    svd_full=lambda x: torch.linalg.svd(x, full_matrices=False),
    svdvals=torch.linalg.svdvals,
    qr=lambda x: torch.linalg.qr(x),
    eigh=lambda x: torch.linalg.eigh(_definite(x)),
    eigvalsh=lambda x: torch.linalg.eigvalsh(_definite(x)),
    eigvals=lambda x: torch.linalg.eigvals(x).abs(),
    eig=lambda x: torch.linalg.eig(x)[0].real,
    pinv=torch.linalg.pinv,
    lstsq=lambda x: torch.linalg.lstsq(x, x * 2)[0],
    matrix_exp=torch.linalg.matrix_exp,
    matrix_power=lambda x: torch.linalg.matrix_power(x, 3),
    lu=lambda x: torch.linalg.lu(x)[2],
    lu_factor=lambda x: torch.linalg.lu_factor(x)[0],
    cholesky_solve=lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(_definite(x))),
    solve_triangular=lambda x: torch.linalg.solve_triangular(x, x * 2, upper=True),
    matrix_norm=lambda x: torch.linalg.matrix_norm(x),
    nuclear_norm=lambda x: torch.linalg.matrix_norm(x, "nuc"),
    cond=torch.linalg.cond,
    matrix_rank=lambda x: torch.linalg.matrix_rank(x.detach()),
    ldl=lambda x: torch.linalg.ldl_factor(x + x.mT)[0],
    ormqr=lambda x: torch.ormqr(x.detach(), x.detach()[:, 0], x),
    lstsq_residuals=lambda x: torch.linalg.lstsq(x[..., :64], x, driver="gelsd")[0],
    householder=lambda x: torch.linalg.householder_product(x, x[:, 0]),
    cholesky_inverse=lambda x: torch.cholesky_inverse(x),
)

add(
    (SQUARE, SQUARE),
    bmm=torch.bmm,
    bmm_transposed=lambda x, y: x.mT @ y,
    matmul_broadcast=lambda x, y: x[0] @ y,
    matmul_fold=lambda x, y: x @ y[0],
    matmul_4d=lambda x, y: x[:, None] @ y[None],
    baddbmm=lambda x, y: torch.baddbmm(x, x, y),
    baddbmm_broadcast=lambda x, y: torch.baddbmm(x[0, 0], x, y),
    addbmm=lambda x, y: torch.addbmm(x[0], x, y),
    bmm_half=lambda x, y: x.bfloat16() @ y.bfloat16(),
    einsum_batch=lambda x, y: torch.einsum("bij,bjk->bik", x, y),
    einsum_swap=lambda x, y: torch.einsum("bij,bkj->ikb", x, y),
    cdist_batch=torch.cdist,
    attention=lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
    attention_causal=lambda x, y: F.scaled_dot_product_attention(
        x[None], y[None], y[None], is_causal=True
    ),
    attention_mask=lambda x, y: F.scaled_dot_product_attention(
        x[None], y[None], y[None], attn_mask=torch.ones(128, 128, dtype=torch.bool)
    ),
    attention_float_mask=lambda x, y: F.scaled_dot_product_attention(
        x[None], y[None], y[None], attn_mask=torch.zeros(128, 128)
    ),
    attention_dropout=lambda x, y: F.scaled_dot_product_attention(
        x[None], y[None], y[None], dropout_p=0.1
    ),
    attention_3d=lambda x, y: F.scaled_dot_product_attention(x, y, y),
    attention_half=lambda x, y: F.scaled_dot_product_attention(
        *(v.bfloat16()[None] for v in (x, y, y))
    ),
    attention_grouped=lambda x, y: F.scaled_dot_product_attention(
        x[None], y[None, :2], y[None, :2], enable_gqa=True
    ),
    attention_values=lambda x, y: F.scaled_dot_product_attention(
        x[None], y[None], y[None, ..., :64]
    ),
)
