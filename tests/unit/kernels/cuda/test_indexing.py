"""Indexing on CUDA, against ``Indexing.cu``, ``IndexKernel.cpp`` and ``Nonzero.cu``."""

from __future__ import annotations

import pytest
import torch
from cuda_steps import estimate, run_step, workspaces
from torch import Tensor, nn

from fxmem import analyze
from fxmem.graph import NEXT_RESULT
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.sorting import radix_sort_bytes, scan_bytes

aten = torch.ops.aten
MIB = 1 << 20


def indices(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(sizes, dtype=dtype)


def test_reading_needs_indices_of_64_bits(gpu: None) -> None:
    x = torch.empty(100, 16)
    assert estimate(aten.index.Tensor, x, [indices(50)]) == 0
    assert estimate(aten.index.Tensor, x, [indices(50, dtype=torch.int32)]) == 400


def test_adding_sorts_the_indices(gpu: None) -> None:
    # 50 rows of (100, 16): the index in elements, those in order, where they were, 0 to 49; CUB
    # sorts as few in one tile. The values, one row seen everywhere, are made dense.
    x, rows = torch.empty(100, 16), [indices(50)]
    dense, spread = torch.empty(50, 16), torch.empty(16).expand(50, 16)
    put = aten._index_put_impl_.default
    assert estimate(put, x, rows, dense, True, True) == 4 * 400 + 1
    assert estimate(put, x, rows, spread, True, True) == 4 * 400 + 1 + 50 * 16 * 4
    assert estimate(put, x, rows, dense, False, True) == 0


def test_two_indices(gpu: None) -> None:
    # Apart from each other: the indexed dimensions come to the front of a copy.
    x = torch.empty(10, 20, 30)
    pair = [indices(7), None, indices(7)]
    values = torch.empty(7, 20)
    assert estimate(aten.index_put_.default, x, pair, values, True) == 24000 + 4 * 56 + 1
    beside = [indices(7), indices(7)]
    assert estimate(aten.index_put_.default, x, beside, torch.empty(7, 30), True) == 4 * 56 + 1


def test_many_indices_take_cub_s_second_copy(gpu: None) -> None:
    x, rows = torch.empty(100, 16), [indices(100000)]
    values = torch.empty(100000, 16)
    expected = 4 * 800000 + radix_sort_bytes(100000, 8, 8, 7)  # 99 has 7 bits: one pass, no copy
    assert estimate(aten.index_put_.default, x, rows, values, True) == expected
    wide = torch.empty(1000, 16)  # 10 bits
    expected = 4 * 800000 + radix_sort_bytes(100000, 8, 8, 10)
    assert expected > 4 * 800000 + 2 * 800000
    assert estimate(aten.index_put_.default, wide, rows, values, True) == expected


def test_masks_become_positions(gpu: None) -> None:
    # 12 values of (4, 6), found by a mask of two dimensions: 12 * 2 positions.
    x, mask, values = torch.empty(4, 6), torch.empty(4, 6) > 0, torch.empty(12)
    assert estimate(aten.index_put_.default, x, [mask], values) == 12 * 2 * 8
    assert estimate(aten.index_put_.default, x, [mask], torch.empty(())) == 0  # masked_fill_
    found = torch.empty(12)
    select = aten.masked_select.default
    assert CUDA.estimate_workspace_bytes(select, (x, mask), {}, found) == 12 * 2 * 8


def test_scattering_by_a_mask(gpu: None) -> None:
    x, mask = torch.empty(40, 60), torch.empty(40, 60) > 0
    places = 2400 * 8 + scan_bytes(2400, 8)
    assert estimate(aten.masked_scatter_.default, x, mask, x) == places
    assert estimate(aten.masked_scatter_.default, x, mask[:1], x) == 2400 + places


class Reading(nn.Module):
    """Reads a parameter of 4 MiB at indices that the code makes in the host's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 20))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight[torch.arange(1 << 20)] * x).sum()


def test_indices_of_the_host_are_copied_to_the_gpu() -> None:
    # TensorAdvancedIndexingUtils.h, make_info: 8 MiB of indices beside weight and result.
    x = torch.zeros(())
    reading = analyze(Reading(), (x,), device="cuda", mode="infer", alloc_conf="")
    assert reading.peak_bytes == (4 + 8 + 4) * MIB + 512
    (index,) = (o for o in reading.graph.operations if o.name == "aten.index.Tensor")
    assert index.workspace_bytes == 8 * MIB and index.blocks == (
        (0, 8 * MIB),
        (NEXT_RESULT, 0),
        (0, -8 * MIB),
    )
    # Indexing.cu, computeLinearIndex: computed on the host, the index is one copy; then those in
    # order, where they were, their range, and CUB's storage. Beside them lie the weight, its
    # gradient and the result's; x, the loss and its gradient have a block of 512 bytes each.
    adding = analyze(Reading(), (x,), device="cuda", alloc_conf="")
    sort = radix_sort_bytes(1 << 20, 8, 8, 20)
    assert workspaces(adding.graph)["aten.index_put.default"] == 4 * 8 * MIB + sort
    assert adding.peak_bytes == (4 + 4 + 4 + 4 * 8) * MIB + -(-sort // 512) * 512 + 3 * 512


def test_masks_and_narrow_indices_of_the_host(gpu: None) -> None:
    # Positions in a mask are copied as indices are; 32 bits are made 64 on the GPU.
    x, host = torch.empty(100, 16), torch.device("cpu")
    mask = torch.empty(100, device=host) > 0
    assert CUDA.estimate_workspace_bytes(aten.index.Tensor, (x, [mask]), {}, x[:50].clone()) == 400
    narrow = torch.zeros(50, dtype=torch.int32, device=host)
    assert estimate(aten.index.Tensor, x, [narrow]) == 400  # 200 beside 400, before the result
    put = aten._index_put_impl_.default
    wide, values = torch.zeros(50, dtype=torch.int64, device=host), torch.empty(50, 16)
    assert CUDA.estimate_workspace_bytes(put, (x, [wide], values), {}, x) == 400
    adding = (x, [wide], values, True, True)
    assert CUDA.estimate_workspace_bytes(put, adding, {}, x) == 4 * 400 + 1


def test_indices_of_several_dimensions_get_one_layout(gpu: None) -> None:
    # AdvancedIndex: of strides (1, 0) and (0, 1) both become dense, those of one layout stay.
    x = torch.empty(100, 16)
    rows, columns = indices(30, 1), indices(10)
    assert estimate(aten.index.Tensor, x, [rows, columns]) == 2 * 300 * 8
    assert estimate(aten.index.Tensor, x, [indices(30), indices(30)]) == 0


def test_a_step_reads_and_adds() -> None:
    x = torch.zeros(100, 16, requires_grad=True)
    graph = run_step(lambda x, i: x[i].sigmoid(), x, indices(50))
    assert workspaces(graph) == {"aten.index_put.default": 4 * 400 + 1}


@pytest.mark.parametrize("function", [Tensor.index_select, Tensor.gather])
def test_other_gradients_are_added_in_place(function: object) -> None:
    x = torch.zeros(100, 16, requires_grad=True)
    at = indices(50) if function is Tensor.index_select else indices(50, 16)
    graph = run_step(lambda x, i: function(x, 0, i).sigmoid(), x, at)  # type: ignore[operator]
    assert workspaces(graph) == {}


def test_a_mean_counts_what_is_scattered(gpu: None) -> None:
    # scatter_reduce_two: ones like the source, counts like the result, and the mask of zeros.
    x, source = torch.empty(100, 16), torch.empty(50, 16)
    at = torch.empty(50, 16, dtype=torch.int64)
    reduce = aten.scatter_reduce.two
    assert estimate(reduce, x, 0, at, source, "mean") == 800 * 4 + 1600 * 4 + 1600
    assert estimate(reduce, x, 0, at, source, "mean", include_self=False) == 800 * 4 + 1600 * 5
    for other in ("sum", "prod", "amax", "amin"):
        assert estimate(reduce, x, 0, at, source, other) == 0
