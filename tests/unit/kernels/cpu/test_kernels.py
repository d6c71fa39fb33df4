"""Kernels that copy, reduce or resample take what the CPU profiler sees."""

from __future__ import annotations

import pytest
import torch
from kernels import check, check_workspace, strided
from torch import Tensor

aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore")

LARGE = (90, 400)


def spread(*sizes: int) -> Tensor:
    """A gradient as it comes from a sum: one element, seen everywhere."""
    return torch.ones(1).expand(sizes)


@pytest.mark.parametrize("sizes", [(6, 10), (300, 400)])
def test_reductions_cast_as_a_whole(sizes: tuple[int, ...]) -> None:
    x = torch.randn(sizes)
    for mask in (x > 0, (x > 0).int()):
        check(aten.sum.default, mask)
        check(aten.sum.dim_IntList, mask, [1], True)
    check(aten.mean.dim, x, [1], dtype=torch.float64)
    check(aten.linalg_vector_norm.default, x, 2, [1], True, dtype=torch.float64)
    check(aten.linalg_vector_norm.default, x, 2, [1])
    for func in (aten.any, aten.all):
        check(func.default, x > 0)
        check(func.dim, x > 0, 1)
        check(func.default, x)
    check(aten.mean.default, x)
    check(aten.mean.dim, x.bfloat16(), [0])
    for func in (aten.prod, aten.nansum, aten.logsumexp):
        check(func.default, x, *(([0, 1],) if func is aten.logsumexp else ()))
    for y in (x, x.t(), (x > 0).int()):
        check(aten.prod.dim_int, y, 1)
        check(aten.cumprod.default, y, 1)


def test_chunks_are_padded() -> None:
    tensors = [torch.randn(129, 65), torch.randn(70, 129).t(), torch.randn(128), torch.randn(3, 2)]
    out = torch.empty(2, sum((len(x) + 1) // 2 * x[0].numel() for x in tensors))
    check(aten._chunk_cat.out, tensors, 0, 2, out=out)
    check(aten._chunk_cat.out, [x.bfloat16() for x in tensors], 0, 2, out=out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums(dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, 14, 16).to(dtype)
    for y in (
        x,
        x.permute(0, 2, 3, 1),
        x[:, :, ::2],
        x[:, :1].expand(4, 6, 14, 16),
        spread(4, 6, 14, 16).to(dtype),
        x[..., :1],
        x[:1],
    ):
        for dims in ([0], [0, 2, 3], [2, 3], [0, 1], [1, 3], [0, 1, 2, 3], [-1, -3]):
            check(aten.sum.dim_IntList, y, dims)
        check(aten.sum.default, y)
        check(aten.sum.dim_IntList, y, [0, 2], dtype=torch.float32)
        check(aten.sum.dim_IntList, y, [0, 2], dtype=torch.bfloat16)
    check(aten.sum.default, torch.randn(400, 400).to(dtype)[:, ::2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_batch_norm_with_strided_gradients(dtype: torch.dtype) -> None:
    x, numbers = torch.randn(4, 16, 6, 7).to(dtype), (None, None)
    for weight in (torch.ones(16), torch.ones(16, dtype=dtype)):
        _, mean, scale = torch.native_batch_norm(x, weight, weight, *numbers, True, 0.1, 1e-5)
        for gradient in (torch.ones(1, dtype=dtype).expand(x.shape), strided(*x.shape).to(dtype)):
            for mask in ([True] * 3, [True, False, False]):
                operands = (gradient, x, weight, *numbers, mean, scale, True, 1e-5, mask)
                check(aten.native_batch_norm_backward.default, *operands)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gelu_backward(dtype: torch.dtype, approximate: str) -> None:
    x, columns_first = torch.randn(30, 40).to(dtype), strided(30, 40, dtype=dtype)
    for gradient in (x, columns_first, spread(30, 40).to(dtype)):
        for y in (x, columns_first):
            check(aten.gelu_backward.default, gradient, y, approximate=approximate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [-1, 3])
def test_weighted_bags(padding: int, dtype: torch.dtype) -> None:
    table, weights = torch.randn(20, 6).to(dtype), torch.randn(48).to(dtype)
    gradient, indices = torch.randn(12, 6).to(dtype), torch.arange(48) % 7
    offsets, rest = torch.arange(0, 48, 4), (False, 0, False, weights)
    out = check(aten._embedding_bag.default, table, indices, offsets, *rest, False, padding)
    operands = (gradient, indices, offsets, *out[1:], 20)  # type: ignore[index]
    check(aten._embedding_bag_backward.default, *operands, *rest, padding)
    backward = aten._embedding_bag_per_sample_weights_backward.default
    check(backward, gradient, table, indices, offsets, out[1], 0, padding)  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("sizes", [(37, 90), (8, 6, 3)])
def test_weight_norm(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(sizes).to(dtype)
    for dim in (0, len(sizes) - 1):
        scale = torch.norm_except_dim(x, 2, dim)
        norms = check(aten._weight_norm_interface.default, x, scale, dim)[1]  # type: ignore[index]
        for gradient in (x, torch.ones(1, dtype=dtype).expand(sizes)):
            backward = aten._weight_norm_interface_backward.default
            check(backward, gradient, x, scale, norms, dim)
    check(aten._weight_norm_interface.default, x, torch.norm_except_dim(x))


def test_copies() -> None:
    for dtype in (torch.float32, torch.uint8, torch.bfloat16, torch.complex64):
        x = torch.zeros(LARGE, dtype=dtype)
        check(aten.clone.default, x.t(), memory_format=torch.contiguous_format)
        check(aten.clone.default, x.t())
        check(aten.clone.default, x[:, :100].t(), memory_format=torch.contiguous_format)
    x = torch.randn(40, 50)
    check(aten.clone.default, x.t(), memory_format=torch.contiguous_format)
    check(aten.roll.default, x.t(), [3])
    check(aten.roll.default, x, [3])


def test_masks() -> None:
    for sizes in ((8, 10), LARGE):
        x = torch.randn(sizes)
        check(aten.masked_scatter.default, x, x > 0, spread(*sizes))
        check(aten.masked_scatter.default, x, x > 0, x)
        check(aten.masked_scatter_backward.default, x, x < 9, list(sizes))
        check(aten.masked_scatter_backward.default, spread(*sizes), x < 9, list(sizes))


def test_masks_as_indices() -> None:
    x = torch.randn(40, 50)
    mask, rows = x > 0, x[:, 0] > 0
    positions = torch.arange(int(rows.sum()))
    found = x[mask]
    short = positions.int()
    several = [rows, positions], [rows, short], [short, positions], [positions, None], [short]
    for indices in ([mask], [rows], [None, mask[0]], *several):
        out = check_workspace(aten.index.Tensor, torch.randn(40, 50, 3), indices)
        check_workspace(aten.index_put_.default, torch.zeros(40, 50, 3), indices, out)
    for accumulate in (False, True):
        check_workspace(aten.index_put.default, x, [mask], found, accumulate)
        check_workspace(aten._index_put_impl_.default, x.clone(), [mask], found, accumulate, True)
    check_workspace(aten.index_put_.default, x.clone(), [mask], torch.tensor(1.0))
    # Values for all that a mask may select.
    everything = torch.ones(40, dtype=torch.bool)
    check_workspace(aten.index_put_.default, torch.zeros(40, 50), [everything], torch.randn(50))


def test_index_select() -> None:
    for x in (torch.randn(20, 30), spread(20, 30), torch.randn(30, 20).t()):
        for dim in (0, 1, -1):
            for index in (torch.arange(5), torch.arange(10)[::2]):  # of a column, as of beams
                check(aten.index_select.default, x, dim, index)


def test_products() -> None:
    x, vector = torch.randn(40, 50), torch.randn(50)
    for matrix in (x, spread(40, 50), torch.randn(50, 40).t(), torch.randn(40, 100)[:, ::2]):
        check(aten.mv.default, matrix, vector)
    check(aten.addmm_.default, torch.randn(40, 6), spread(40, 50), torch.randn(50, 6))
    for left, right in (
        (x, x.t()),
        (spread(40, 40), x),
        (x[:, ::2], torch.randn(25, 5)),
        (torch.ones(40, 1).expand(40, 50), x.t()),
    ):
        check(aten.mm.default, left, right)
        check(aten.addmm.default, torch.randn(right.shape[1]), left, right)
    check(aten.bmm.default, torch.randn(20, 40, 2).permute(2, 0, 1), torch.randn(2, 40, 60))
    check(aten.bmm.default, torch.randn(2, 4, 5), torch.randn(2, 5, 6))
    for batch in ((), (3,)):
        x, y = torch.randn(*batch, 24, 24), torch.randn(*batch, 30, 24)
        check(aten._euclidean_dist.default, x, y)


def test_complex_products() -> None:
    def lay_out(x: Tensor) -> tuple[Tensor, ...]:
        columns_first = x.mT.contiguous().mT
        wide = torch.cat([x, x], -1)[..., ::2]
        return x, x.conj(), columns_first, columns_first.conj(), wide.conj(), wide

    bias = torch.randn(30, dtype=torch.complex64)
    for left in lay_out(torch.randn(3, 40, 50, dtype=torch.complex64)):
        for right in lay_out(torch.randn(3, 50, 30, dtype=torch.complex64)):
            check(aten.mm.default, left[0], right[0])
            check(aten.addmm.default, bias, left[0], right[0])
            check(aten.bmm.default, left, right)
            check(aten.baddbmm.default, bias, left, right)


def test_complex_numbers_beside_real_tensors() -> None:
    x, z = torch.randn(40, 50), torch.randn(40, 50, dtype=torch.complex64)
    for left, right in ((x, 1j), (z, 2.0), (x.double(), 1j), (x > 0, 1j), (x, z), (z.real, 1j)):
        check(aten.mul.Tensor, left, right)
        check(aten.add.Tensor, left, right)
    check(aten.div.Tensor, z, 1j)
    for y in (z, z.t(), z.real):
        check(aten.abs.default, y)
        check(aten.angle.default, y)


def test_operators_in_place_that_compute_in_a_wider_type() -> None:
    wide = torch.rand(40, 1) + 0.5
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for func in (aten.mul_, aten.add_, aten.sub_, aten.div_, aten.lt_):
            check(func.Tensor, torch.rand(40, 50).to(dtype), wide)


def test_dense_copies_of_transposed_matrices() -> None:
    x = torch.randn(100, 80).t()
    for func in (aten._softmax, aten._log_softmax):
        check(func.default, x, 1, False)
    for func in (aten._softmax_backward_data, aten._log_softmax_backward_data):
        check(func.default, x, x.contiguous(), -1, torch.float32)
        for gradient in (x, x.contiguous()):
            check(func.default, gradient, x, 1, torch.float32)
    check(aten.nll_loss_forward.default, x, torch.arange(80), None, 1, -100)
    rows = torch.randint(0, 50, (90, 80)).t()
    check(aten.embedding_dense_backward.default, torch.randn(80, 90, 4), rows, 50, -1, False)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses(reduction: int) -> None:
    for sizes in ((6, 10), (300, 200)):
        x, target = torch.rand(sizes), torch.rand(sizes)
        for func in (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss):
            check(func.default, x, target, reduction)
        check(aten.binary_cross_entropy.default, x, target, None, reduction)
    x, target = torch.randn(30, 40), torch.rand(30, 40)
    weight = torch.rand(40)
    for weights in ((None, None), (None, weight), (weight, None), (weight, weight)):
        check(aten.binary_cross_entropy_with_logits.default, x, target, *weights, reduction)


def test_log_sigmoid() -> None:
    for lies in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 4, 5, 6).to(memory_format=lies)
        _, buffer = check(aten.log_sigmoid_forward.default, x)  # type: ignore[misc]
        check(aten.log_sigmoid_backward.default, x, x, buffer)


def test_ctc_loss() -> None:
    x = torch.randn(20, 3, 10).log_softmax(2)
    targets, lengths = torch.randint(1, 10, (3, 5)), ([20] * 3, [5] * 3)
    loss, alpha = check(aten._ctc_loss.default, x, targets, *lengths)  # type: ignore[misc]
    rest = (targets, *lengths, loss, alpha, 0)
    check(aten._ctc_loss_backward.default, torch.ones(3), x, *rest)
