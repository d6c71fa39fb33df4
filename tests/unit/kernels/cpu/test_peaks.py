"""Steps of one function take what the allocator of a real step says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from measuring.allocator_peaks import check_peak
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.catalogue import modules  # noqa: F401 - fills the catalogue
from benchmarks.catalogue.core import Apply, make_case
from benchmarks.step import Mode

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = (40, 300)


def weigh(x: Tensor, reduction: str) -> Tensor:
    target, weight = torch.ones(SIZES), torch.ones(SIZES[1])
    return F.binary_cross_entropy_with_logits(x, target, weight, None, None, reduction, weight)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod of a number": lambda x: x.sum().prod(),
    "max of two": lambda x: torch.max(x, x * 2),
    "scaled logits": lambda x: F.binary_cross_entropy_with_logits(
        x, torch.ones(SIZES), torch.ones(SIZES), reduction="none"
    ),
    "weighted logits": lambda x: weigh(x, "mean"),
    "weighted logits, not reduced": lambda x: weigh(x, "none"),
    "sign": lambda x: x.sgn() * x,
    "one hot": lambda x: F.one_hot(x.argmax(1), 300) * x,
}
CATALOGUE = """
    prod prod1 prod_keep cumprod cumprod0 max min trace bce_logits_none roll
    max_pool1d max_pool2d_last max_pool3d max_pool3d_last
    avg_pool2d avg_pool2d_last avg_pool3d avg_pool3d_last
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d
    nearest nearest_exact upsample_bilinear bilinear_last bicubic bilinear_antialias
    bilinear_antialias_up bicubic_antialias grid_sample grid_sample_grid unfold2d fold
    interpolate_linear interpolate_nearest1d interpolate_exact1d bilinear_corners bilinear_down
    bilinear_half nearest_small nearest3d nearest_exact3d trilinear trilinear_down
    embedding_bag embedding_bag_sum embedding_bag_max embedding_bag_offsets embedding_bag_last
    embedding_bag_padding embedding_bag_sum_padding embedding_bag_weighted embedding_bag_scaled
    embedding_bag_half gelu gelu_tanh gelu_half gelu_last
    pixel_shuffle pixel_unshuffle channel_shuffle
    pad_reflect pad_replicate pad2d_reflect pad2d_replicate pad3d_reflect pad3d_replicate
"""


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_own_functions(name: str, mode: Mode) -> None:
    check_peak(Case(name, lambda: Apply(FUNCTIONS[name], (SIZES,))), mode)


@pytest.mark.parametrize("name", CATALOGUE.split())
def test_functions_of_the_catalogue(name: str) -> None:
    check_peak(make_case(name), "train")


@pytest.mark.parametrize(
    "function",
    [
        torch.prod,
        torch.Tensor.max,
        lambda x: x.cumprod(0),
        lambda x: F.binary_cross_entropy_with_logits(x, x.detach() / 2, x.detach()),
        lambda x: F.binary_cross_entropy_with_logits(
            x, x.detach() / 2, None, pos_weight=x[0].detach()
        ),
    ],
)
def test_gradients_are_those_of_autograd(function: Callable[[Tensor], Tensor]) -> None:
    from fxmem.kernels.cpu import CPU
    from fxmem.kernels.functions import lower_functions

    x = torch.rand(4, 5) + 0.5
    plain, lowered = x.clone().requires_grad_(), x.clone().requires_grad_()
    function(plain).sum().backward()
    with lower_functions(CPU):
        function(lowered).sum().backward()
    torch.testing.assert_close(lowered.grad, plain.grad)
