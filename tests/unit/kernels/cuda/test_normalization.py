"""Layer, group and root-mean-square normalization on CUDA, against their kernels' source."""

from __future__ import annotations

import pytest
import torch
from cuda_steps import estimate, made, run_kernel, run_step, saved
from torch import Tensor, nn

from fxmem.graph import Phase
from fxmem.kernels.cuda.gpu import Gpu, use_gpu

aten = torch.ops.aten
F = nn.functional
LAST = torch.channels_last


def leaf(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(sizes, dtype=dtype, requires_grad=True)


class TestLayerNorm:
    """``layer_norm_kernel.cu``."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_saves_statistics_as_floats(self, dtype: torch.dtype) -> None:
        graph = run_step(nn.LayerNorm(8).to(dtype), leaf(2, 6, 8, dtype=dtype))
        assert saved(graph) == [((2, 6, 1), "float32")] * 2
        assert made(graph) == [("native_layer_norm", 96 * dtype.itemsize + 2 * 12 * 4)]
        # The gradient of a sum is one element seen everywhere: a dense copy.
        assert made(graph, Phase.BACKWARD)[-1] == (
            "native_layer_norm_backward",
            (96 + 16 + 96) * dtype.itemsize,
        )

    def test_copies_what_is_not_contiguous(self, gpu: None) -> None:
        x, column = torch.empty(2, 8, 6, 6).permute(0, 2, 3, 1), torch.empty(8)
        statistic = torch.empty(2, 6, 6, 1)
        args = (x, x, [8], statistic, statistic, column, column, [True] * 3)
        outputs, nbytes = run_kernel(aten.native_layer_norm.default, x, [8], column, column, 1e-5)
        assert outputs[0].is_contiguous() and nbytes == 576 * 4
        outputs, nbytes = run_kernel(aten.native_layer_norm_backward.default, *args)
        assert outputs[0].is_contiguous() and nbytes == 2 * 576 * 4

    def test_sums_many_short_rows_in_parts(self, gpu: None) -> None:
        # M = 2 * 2^16 rows of N = 64: two blocks of columns, of the 54 that half of the
        # multiprocessors are; 2^17 / 32 = 4096 blocks of rows, at most 32768 / 2. Their sums, and
        # while those of the weight are added up a new gradient of 64 and the buffer of a sum over
        # (4096, 64): threads 16 x 8, 512 values each, 512 / 16 = 32 blocks: a place for each
        # thread of a row and its vector of 4.
        x, column = torch.empty(2, 65536, 64), torch.empty(64)
        statistic = torch.empty(2, 65536, 1)
        args = (x, x, [64], statistic, statistic, column, column)
        partial, reduction = 4096 * 64 * 4, 4 * 64 * 32 * 16 * 4 + 4
        backward = aten.native_layer_norm_backward.default
        assert estimate(backward, *args, [True] * 3) == 2 * partial + 256 + reduction
        assert estimate(backward, *args, [True, False, False]) == 0
        with use_gpu(Gpu(multiprocessors=4)):  # 64 / 32 columns are enough for two
            assert estimate(backward, *args, [True] * 3) == 0

    def test_no_more_than_65536_rows_at_once(self, gpu: None) -> None:
        x, column = torch.empty(65536, 64), torch.empty(64)
        statistic = torch.empty(65536, 1)
        args = (x, x, [64], statistic, statistic, column, column, [True] * 3)
        assert estimate(aten.native_layer_norm_backward.default, *args) == 0


class TestGroupNorm:
    """``group_norm.cpp`` and ``group_norm_kernel.cu``."""

    def test_scales_by_image_and_channel(self) -> None:
        # Statistics of (2, 4) in the type of the input; scale and shift of (2, 8) floats inside.
        graph = run_step(nn.GroupNorm(4, 8).bfloat16(), leaf(2, 8, 6, 6, dtype=torch.bfloat16))
        assert saved(graph) == [((2, 4), "bfloat16")] * 2
        assert made(graph) == [("native_group_norm", 2 * 576 + 2 * 16 + 2 * 64)]
        # Backward: two sums and a factor by channel, two by group, as floats; three gradients.
        inside = 3 * 64 + 2 * 32
        assert made(graph, Phase.BACKWARD)[-1] == (
            "native_group_norm_backward",
            2 * (576 + 16) + inside,
        )

    def test_without_parameters_it_needs_less(self, gpu: None) -> None:
        x, statistic = torch.empty(2, 8, 6, 6), torch.empty(2, 4)
        sizes = (2, 8, 36, 4)
        assert estimate(aten.native_group_norm.default, x, None, None, *sizes, 1e-5) == 0
        args = (x, x, statistic, statistic, None, *sizes, [True, False, False])
        assert estimate(aten.native_group_norm_backward.default, *args) == 2 * 64 + 2 * 32

    def test_of_one_pixel(self, gpu: None) -> None:
        x, column, statistic = torch.empty(2, 8), torch.empty(8), torch.empty(2, 4)
        sizes = (2, 8, 1, 4)
        assert estimate(aten.native_group_norm.default, x, column, column, *sizes, 1e-5) == 0
        args = (x, x, statistic, statistic, column, *sizes, [True] * 3)
        # ds and db of (2, 8), made before GroupNorm1dBackward is called; its c2 and c3 of (2, 4).
        assert estimate(aten.native_group_norm_backward.default, *args) == 2 * 64 + 2 * 32

    def test_channels_last_is_copied(self) -> None:
        x = leaf(2, 8, 6, 6).detach().to(memory_format=LAST).requires_grad_()
        graph = run_step(nn.GroupNorm(4, 8), x)
        assert made(graph)[0] == ("clone", 576 * 4)
        assert saved(graph)[0] == ((2, 8, 6, 6), "float32")

    def test_autocast_casts_first(self) -> None:
        def function(x: Tensor, weight: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return F.group_norm(x, 4, weight, weight)

        x = torch.zeros(2, 8, 6, 6, dtype=torch.bfloat16).to(memory_format=LAST)
        graph = run_step(function, x, leaf(8))
        # To floats in channels last; those contiguous; then the kernel's result.
        assert [name for name, _ in made(graph)][:2] == ["_to_copy", "clone"]
        assert made(graph)[1] == ("clone", 576 * 4)


class TestRmsNorm:
    """``layer_norm.cpp``, ``rms_norm_symint``, and ``layer_norm_kernel.cu``."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_saves_one_statistic(self, dtype: torch.dtype) -> None:
        graph = run_step(nn.RMSNorm(8).to(dtype), leaf(2, 6, 8, dtype=dtype))
        assert saved(graph) == [((2, 6, 1), "float32")]
        assert made(graph) == [("_fused_rms_norm", 96 * dtype.itemsize + 12 * 4)]
        assert made(graph, Phase.BACKWARD)[-1] == (
            "_fused_rms_norm_backward",
            (96 + 8 + 96) * dtype.itemsize,
        )

    def test_weight_and_input_are_saved_as_they_are(self) -> None:
        graph = run_step(nn.RMSNorm(8), leaf(2, 6, 8))
        residents = [s.name for s in graph.storages if s.born < 0 and s.saved_by]
        assert residents == ["weight", "x"]

    def test_without_a_weight(self) -> None:
        graph = run_step(lambda x: F.rms_norm(x, [8]), leaf(2, 6, 8))
        assert made(graph, Phase.BACKWARD)[-1] == ("_fused_rms_norm_backward", 2 * 384)

    def test_in_inference(self) -> None:
        graph = run_step(nn.RMSNorm(8), torch.zeros(2, 6, 8), mode="infer")
        assert made(graph) == [("_fused_rms_norm", 384 + 48)]

    @pytest.mark.filterwarnings("ignore:Mismatch dtype")
    @pytest.mark.parametrize("mixed", [False, True])
    def test_other_types_and_formats_take_several_kernels(self, mixed: bool) -> None:
        x = torch.zeros(2, 8, 6, 6, dtype=torch.bfloat16 if mixed else torch.float32)
        x = x if mixed else x.to(memory_format=LAST)
        graph = run_step(lambda x, weight: F.rms_norm(x, [6], weight), x, leaf(6))
        assert "_fused_rms_norm" not in {name for name, _ in made(graph)}

    def test_autocast_has_it_in_float(self) -> None:
        def function(x: Tensor, weight: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return F.rms_norm(x, [8], weight)

        graph = run_step(function, leaf(2, 6, 8, dtype=torch.bfloat16), leaf(8))
        assert made(graph) == [("_to_copy", 96 * 4), ("_fused_rms_norm", 96 * 4 + 12 * 4)]

    def test_many_rows(self, gpu: None) -> None:
        x, column = torch.empty(131072, 64), torch.empty(64)
        args = (x, x, [64], torch.empty(131072, 1), column, [True, True])
        expected = 4096 * 64 * 4 + 256 + 4 * 64 * 32 * 16 * 4 + 4
        assert estimate(aten._fused_rms_norm_backward.default, *args) == expected
