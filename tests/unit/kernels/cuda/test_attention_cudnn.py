"""cuDNN's attention: its outputs, and the buffers of its frontend."""

from __future__ import annotations

import pytest
import torch
from cuda_steps import estimate, on_gpu, run_kernel

from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.gpu import Gpu, use_gpu

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_cudnn_attention.default
BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default


@pytest.mark.parametrize("needs_sums", [True, False])
def test_statistics_are_for_backward(needs_sums: bool) -> None:
    with on_gpu():
        q = torch.empty(2, 16, 4, 64, dtype=torch.float16).transpose(1, 2)
        results, nbytes = run_kernel(FORWARD, q, q, q, None, needs_sums, 0.125)
    result, sums, *_, queries, keys, seed, offset, mask = results
    assert nbytes == 0 and (queries, keys, mask) == (16, 16, None)
    assert (result.shape, result.stride(), result.dtype) == (q.shape, q.stride(), q.dtype)
    assert (sums is not None) == needs_sums
    if needs_sums:
        assert (sums.shape, sums.dtype) == ((2, 4, 16, 1), torch.float32)
    for scalar in (seed, offset):
        assert (scalar.shape, scalar.dtype, scalar.device) == ((), torch.int64, q.device)


def test_values_of_another_size_keep_the_order_of_the_queries() -> None:
    with on_gpu():
        q = torch.empty(2, 16, 4, 64, dtype=torch.float16).transpose(1, 2)
        v = torch.empty(2, 4, 16, 32, dtype=torch.float16)
        result = run_kernel(FORWARD, q, q, v, None, True)[0][0]
    assert result.shape == (2, 4, 16, 32)
    assert result.transpose(1, 2).is_contiguous()


def run_backward(gpu: Gpu, keys: int, *, is_dense: bool = True) -> int:
    with on_gpu(), use_gpu(gpu):
        q = torch.empty(2, 4, 256, 64, dtype=torch.float16)
        k = torch.empty(2, 4, keys, 64, dtype=torch.float16)
        results, _ = run_kernel(FORWARD, q, k, k, None, True)
        result, sums, *_, seed, offset, _mask = results
        grad = result if is_dense else torch.empty((), dtype=torch.float16).expand(q.shape)
        return estimate(
            BACKWARD, grad, q, k, k, result, sums, seed, offset, None, None, None, 256, keys,
            0.0, False,
        )  # fmt: skip


def test_backward_adds_up_in_float() -> None:
    # dQ_accum and softmax_sum: 2 * 4 * 256 rows of 64 + 1 floats.
    assert run_backward(Gpu((9, 0)), 256) == 2 * 4 * 256 * 65 * 4
    assert run_backward(Gpu((9, 0)), 200) == 2 * 4 * 256 * 65 * 4


def test_backward_of_older_versions_pads_by_lengths() -> None:
    # To 9.15.0: a length of queries and of keys for each of the batch, where 128 does not divide.
    old = Gpu((9, 0), cudnn_version=91500)
    assert run_backward(old, 200) == 2 * 4 * 256 * 65 * 4 + 2 * 2 * 4
    assert run_backward(old, 256) == 2 * 4 * 256 * 65 * 4


def test_a_gradient_whose_rows_are_not_dense_is_copied() -> None:
    assert run_backward(Gpu((9, 0)), 256, is_dense=False) == (
        2 * 4 * 256 * 65 * 4 + 2 * 4 * 256 * 64 * 2
    )


def test_what_a_plan_takes_is_not_known() -> None:
    assert CUDA.unmodelled.keys() >= {FORWARD, BACKWARD}
