"""CUDA as a target: the operators that it dispatches to, and what its kernels hold inside."""

from __future__ import annotations

from fxmem.kernels.cuda import (  # noqa: F401 - for what they register
    attention,
    attention_cudnn,
    attention_efficient,
    attention_flash,
    autocast,
    batch_norm,
    batch_norm_kernels,
    blas,
    convolution,
    copying,
    cublas,
    dropout,
    embedding,
    flex_attention,
    grad_scaler,
    grouped,
    indexing,
    losses,
    normalization,
    pointwise,
    pooling,
    reduction,
    resampling,
    rnn,
    rnn_cells,
    softmax,
    sorting,
    surroundings,
    transformer,
    unmodelled,
)
from fxmem.kernels.cuda.target import CUDA

__all__ = ["CUDA"]
