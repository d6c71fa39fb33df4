"""Functions that rearrange, fill or transform."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.cases import Spec
from benchmarks.catalogue.core import MATRIX, add


def _set(x: torch.Tensor, where: Any) -> torch.Tensor:
    """A copy of which a part is set."""
    result = x * 2
    result[where] = 1.5 if where == 0 else x[:, 5]
    return result


add(
    (MATRIX,),
    cat=lambda x: torch.cat([x, x * 2, x * 3]),
    cat1=lambda x: torch.cat([x, x * 2], 1),
    stack=lambda x: torch.stack([x, x]),
    stack2=lambda x: torch.stack([x, x], 2),
    repeat=lambda x: x.repeat(2, 1),
    repeat_interleave=lambda x: x.repeat_interleave(2, 0),
    tile=lambda x: x.tile(2, 2),
    expand=lambda x: x[None].expand(3, -1, -1) * 2,
    flip=lambda x: x.flip(0, 1),
    roll=lambda x: x.roll((1, 2), (0, 1)),
    roll_flat=lambda x: x.roll(1),
    rot90=torch.rot90,
    clone=torch.clone,
    contiguous=lambda x: x.t().contiguous(),
    tril=torch.tril,
    triu=torch.triu,
    diagonal=lambda x: x.diagonal() * 2,
    diag_embed=lambda x: x[:, :64].diag_embed(),
    diag=lambda x: x[0].diag(),
    trace=torch.trace,
    unbind=lambda x: torch.stack([a * 2 for a in x.unbind(0)[:7]]),
    chunk=lambda x: torch.cat([a * 2 for a in x.chunk(4)]),
    select=lambda x: x[0] * x[1] + x[2],
    slice=lambda x: x[:10] * x[10:20] + x[20:30],
    step=lambda x: x[::2, ::3] * 2,
    unfold=lambda x: x.unfold(1, 8, 4) * 2,
    as_strided=lambda x: x.as_strided((100, 100), (3, 5)) * 2,
    pad=lambda x: F.pad(x, (1, 2, 3, 4)),
    pad_number=lambda x: F.pad(x, (1, 2), value=3.0),
    pad_reflect=lambda x: F.pad(x, (1, 2), "reflect"),
    pad_replicate=lambda x: F.pad(x, (1, 2), "replicate"),
    pad_circular=lambda x: F.pad(x, (1, 2), "circular"),
    one_hot=lambda x: F.one_hot(x.detach()[:, :64].long().clamp(0, 7), 8),
    meshgrid=lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0] * 2,
    outer=lambda x: torch.outer(x[0], x[1]),
    cartesian=lambda x: torch.cartesian_prod(x[0], x[1][:64]),
    combinations=lambda x: torch.combinations(x[0][:128]),
    kron=lambda x: torch.kron(x[:16, :16], x[:16, :16]),
    cross=lambda x: torch.cross(x[:, :1023].reshape(-1, 3), x[:, 1:].reshape(-1, 3), dim=1),
    block_diag=lambda x: torch.block_diag(x, x),
    vander=lambda x: torch.vander(x[0].detach(), 20),
    cov=torch.cov,
    corrcoef=torch.corrcoef,
    renorm=lambda x: x.renorm(2, 0, 1.0),
    dist=lambda x: torch.dist(x, x * 2),
    cosine_similarity=lambda x: F.cosine_similarity(x, x * 2),
    pairwise_distance=lambda x: F.pairwise_distance(x, x * 2),
    pdist=lambda x: F.pdist(x[:, :64]),
    setitem=lambda x: _set(x, 0),
    setitem_row=lambda x: _set(x, (slice(None), 3)),
    multinomial=lambda x: torch.multinomial(x.detach().softmax(1), 3),
    bernoulli=lambda x: torch.bernoulli(x.detach().sigmoid()),
    poisson=lambda x: torch.poisson(x.detach().exp()),
    randn_like=torch.randn_like,
    rand_like=torch.rand_like,
    unique=lambda x: x.detach().round().unique().shape,
    isin=lambda x: torch.isin(x.detach(), torch.arange(9.0)),
    complex=lambda x: torch.complex(x, x * 2).abs(),
    polar=lambda x: torch.polar(x, x * 2).real,
    view_as_complex=lambda x: torch.view_as_complex(x.view(256, 512, 2)).abs(),
    complex_mul=lambda x: (torch.complex(x, x) * torch.complex(x, -x)).real,
    fft=lambda x: torch.fft.fft(x).abs(),
    rfft=lambda x: torch.fft.rfft(x).abs(),
    irfft=lambda x: torch.fft.irfft(x),
    ifft=lambda x: torch.fft.ifft(x).real,
    fft2=lambda x: torch.fft.fft2(x).real,
    fft0=lambda x: torch.fft.fft(x, dim=0).real,
    rfft2=lambda x: torch.fft.rfft2(x).abs(),
    fftshift=lambda x: torch.fft.fftshift(x),
    hfft=lambda x: torch.fft.hfft(x),
    irfft2=lambda x: torch.fft.irfft2(torch.complex(x, x)),
    hfft2=lambda x: torch.fft.hfft2(torch.complex(x, x)),
    irfftn=lambda x: torch.fft.irfftn(torch.complex(x, x).view(16, 16, 1024)),
    exp_imaginary=lambda x: torch.exp(1j * x).real,
    complex_linear=lambda x: F.linear(torch.complex(x, x), torch.complex(x, x)).abs(),
    complex_bmm=lambda x: torch.bmm(
        torch.complex(x, x).view(4, 64, 1024).conj(), torch.complex(x, x).view(4, 64, 1024).mH
    ).abs(),
    sgn=lambda x: x.sgn() * x,
    softmax_transposed=lambda x: x.t().softmax(1),
    mvlgamma=lambda x: (x.abs() + 3).mvlgamma(2),
    segment_reduce=lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([100, 156])),
    dirichlet=lambda x: torch._sample_dirichlet(x.abs() + 1),
    stft=lambda x: torch.stft(x, 64, window=torch.ones(64), return_complex=True).abs(),
    istft=lambda x: torch.istft(torch.complex(x[:33], x[:33])[None], 64, window=torch.ones(64)),
    bincount=lambda x: torch.bincount(x.detach().view(-1).abs().long(), minlength=10).shape,
)

add(
    (Spec(MATRIX, torch.complex64), MATRIX),
    complex_abs=lambda w, z: (z * w).abs(),
    complex_exp=lambda w, z: (z * w).exp().real,
    complex_mm=lambda w, z: (z @ (z * w).mT).real,
    complex_angle=lambda w, z: (z * w).angle(),
    complex_conj=lambda w, z: ((z * w).conj() * z).real,
    complex_sum=lambda w, z: (z * w).sum(1).real,
    complex_view=lambda w, z: torch.view_as_real(z * w).sum(2),
)
