"""Advice held against steps that do what it says, written out and analysed on their own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Runs
from torch import nn
from torch.nn import functional as F

import fxmem
from fxmem.advice.advising import advise, halve_inputs
from fxmem.finding import Finding

MIB = 2**20
CODES = {
    "zero_grad": "FX202",
    "foreach": "FX203",
    "fused": "FX204",
    "8bit": "FX205",
    "autocast": "FX301",
    "accumulate": "FX302",
    "fuse_conv_bn": "FX304",
}
"""By a part of the code to write, the code of its finding."""


def make_net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))


def find(advice: tuple[Finding, ...], option: str) -> Finding:
    """The finding whose code to write begins so; its own code is the one that belongs to that."""
    found = next(a for a in advice if a.option.startswith(option))
    assert found.code == next(code for part, code in CODES.items() if part in found.option)
    return found


def list_options(model: nn.Module | str, args: Any, **options: Any) -> list[str]:
    return [a.option for a in advise(model, args, **options) if a.code != "FX201"]


def check_against(model: nn.Module, args: Any, option: str, before: Any, after: Any) -> None:
    """The advice for one step is the difference to another, where both are analysed."""
    advice = find(advise(model, args, **before), option)
    baseline = fxmem.analyze(model, args, **before).peak_bytes
    assert advice.peak_bytes == fxmem.analyze(model, args, **after).peak_bytes
    assert advice.saving_bytes == baseline - advice.peak_bytes > 0
    assert option not in [a.option for a in advise(model, args, **after)]


def test_autocast() -> None:
    net = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU())
    check_against(net, "2048x64", 'autocast="bf16"', {}, {"autocast": "bf16"})


def test_gradients_that_are_freed() -> None:
    net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    before = {"set_to_none": False}
    option = "optimizer.zero_grad(set_to_none=True)"
    check_against(net, "4096x512", option, before, {"set_to_none": True})


@pytest.mark.parametrize(
    ("before", "option", "after"),
    [
        ("adam", "Adam(..., foreach=False)", "adam(foreach=False)"),
        ("adamw(lr=0.1)", "AdamW(..., fused=True)", "adamw(lr=0.1, fused=True)"),
        ("adamw", "bitsandbytes.optim.AdamW8bit", "adam8bit"),
        ("nadam(foreach=True)", "NAdam(..., foreach=False)", "nadam(foreach=False)"),
    ],
)
def test_the_optimizers_implementation(before: str, option: str, after: str) -> None:
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    check_against(net, "8x512", option, {"optimizer": before}, {"optimizer": after})


def test_what_an_optimizer_does_not_take_is_not_proposed() -> None:
    assert not [o for o in list_options(make_net(), "8x512", optimizer="nadam") if "fused" in o]
    assert not list_options(make_net(), "8x512", optimizer=torch.optim.Adam)
    options = list_options(make_net(), "8x512", optimizer="adam(amsgrad=True)")
    assert not [o for o in options if "8bit" in o]


def test_two_micro_batches() -> None:
    net = make_net()
    advice = find(advise(net, ("1024x512",)), "accumulate=2")
    assert advice.peak_bytes == fxmem.analyze(net, ("512x512",), accumulate=2).peak_bytes
    assert "statistics" not in advice.cost
    norms = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32))
    advice = find(advise(norms, (torch.zeros(8, 3, 64, 64),)), "accumulate=2")
    assert advice.peak_bytes == fxmem.analyze(norms, ("4x3x64x64",), accumulate=2).peak_bytes
    assert "Batch normalisation takes its statistics of half the batch" in advice.cost


@pytest.mark.parametrize("inputs", [("1023x512",), ("1024x512", "512x512"), ("1024x512", "scalar")])
def test_no_micro_batches_without_an_even_batch(inputs: tuple[str, ...]) -> None:
    def forward(model: Runs, x: torch.Tensor, y: Any = None) -> torch.Tensor:
        return model.linear(x).tanh().exp()  # type: ignore[no-any-return]

    net = Runs(forward, linear=nn.Linear(512, 512))
    assert not [o for o in list_options(net, inputs) if o.startswith("accumulate")]


def test_half_a_tensor_is_like_the_whole() -> None:
    whole = torch.zeros(8, 3, 6, 6, requires_grad=True)
    last = torch.zeros(8, 3, 6, 6, device="meta").to(memory_format=torch.channels_last)
    inputs = halve_inputs((whole, last, whole), {"scale": 2, "ids": ["8:int64"]})
    assert inputs is not None
    (half, spec, same), named = inputs
    assert (half.shape, half.requires_grad, half.grad_fn) == ((4, 3, 6, 6), True, None)
    assert half is same
    assert spec == fxmem.TensorSpec((4, 3, 6, 6), memory_format="channels_last")
    assert named == {"scale": 2, "ids": [fxmem.TensorSpec((4,), "int64")]}
    assert halve_inputs(torch.zeros(8, 3).to_sparse(), None) is None


def test_no_micro_batches_where_the_loss_is_for_the_whole_batch() -> None:
    labels = torch.zeros(1024, dtype=torch.int64)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, labels.to(output.device))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = list_options(make_net(), ("1024x512",), loss=loss)
    assert "accumulate=2 with half the batch" not in options
    assert 'autocast="bf16"' in options


def make_convs(**options: Any) -> nn.Module:
    conv = nn.Conv2d(3, 64, 1, **options)  # a product of matrices, without a workspace
    return nn.Sequential(conv, nn.BatchNorm2d(64), nn.Conv2d(64, 8, 1))


@pytest.mark.parametrize("bias", [True, False])
def test_folded_batch_normalisations(bias: bool) -> None:
    net, args = make_convs(bias=bias), ("8x3x64x64",)
    advice = find(advise(net, args, mode="infer"), "torch.nn.utils.fusion.fuse_conv_bn_eval")
    assert advice.change == "Fold 1 batch normalisation into the convolution before"
    net.eval()
    conv, norm, last = net.children()
    assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
    folded = nn.Sequential(torch.nn.utils.fusion.fuse_conv_bn_eval(conv, norm), last)
    assert advice.peak_bytes == fxmem.analyze(folded, args, mode="infer").peak_bytes
    assert (conv.bias is not None) == bias  # as the user made it


def test_folding_in_a_model_that_a_target_names(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(3, 64, 1), nn.BatchNorm2d(64))\n"
    )
    advice = advise(f"{tmp_path / 'net.py'}:make", ("8x3x64x64",), mode="infer")
    # The result of the convolution, 8 * 64 * 64 * 64 floats, need not live beside the norm's.
    assert find(advice, "torch.nn.utils.fusion").saving_bytes >= 8 * MIB


def test_what_is_used_otherwise_is_not_folded() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x)
            return self.norm(x) + x

    for net in (Twice(), nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64, affine=False))):
        if isinstance(net, nn.Sequential):
            net[1] = nn.BatchNorm2d(64, track_running_stats=False)
        options = list_options(net, ("8x3x64x64",), mode="infer")
        assert not [option for option in options if "fuse" in option]


def test_most_comes_first_and_little_is_left_out() -> None:
    advice = advise(make_net(), ("1024x512",), optimizer="adam", set_to_none=False)
    savings = [a.saving_bytes for a in advice]
    assert savings == sorted(savings, reverse=True)
    assert len(advice) > 2
    peak = fxmem.analyze(make_net(), ("1024x512",), optimizer="adam", set_to_none=False).peak_bytes
    assert min(savings) >= min(MIB, 0.005 * peak)
