"""The peak that a plan promises is what a real step with the plan takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxmem


def normalise_weight(layer: nn.Module) -> nn.Module:
    """As HiFi-GAN's and Encodec's convolutions are made, to this day."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


def run_hook(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, arguments, result: None)
    return layer


class Generator(nn.Module):
    """Residual blocks of convolutions between leaky ReLUs, as in HiFi-GAN's generator."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.up = wrap(nn.ConvTranspose1d(16, 16, 4, 2, 1))
        self.blocks = nn.ModuleList(wrap(nn.Conv1d(16, 16, 3, padding=1)) for _ in range(4))
        self.last = wrap(nn.Conv1d(16, 1, 7, padding=3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(F.leaky_relu(x, 0.1))
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            y = first(F.leaky_relu(x, 0.1))
            x = second(F.leaky_relu(y, 0.1)) + x
        return self.last(F.leaky_relu(x)).tanh()


@pytest.mark.parametrize(
    ("wrap", "runs_in_place"),
    [
        (normalise_weight, True),
        (nn.utils.spectral_norm, True),
        (run_hook, False),
    ],
)
def test_what_runs_in_place_beside_hooks(
    wrap: Callable[[nn.Module], nn.Module], runs_in_place: bool
) -> None:
    model = Generator(wrap)
    step = "4x16x512"
    plan = fxmem.plan(fxmem.analyze(model, step, device="cpu", mode="infer"))
    report = fxmem.verify(model, fxmem.apply(model, plan), step, steps=1, mode="infer")
    assert report.equal
    assert report.promise is not None
    assert report.promise.is_plans_own and abs(report.promise.deviation) < 1e-3
    assert bool(plan.inplace) is runs_in_place


def test_a_model_whose_blocks_have_hooks_gets_a_plan_that_calls_them() -> None:
    """As code that looks at features registers them."""
    model, step = nn.Sequential(Generator(lambda layer: layer), nn.Tanh()), "4x16x512"
    seen: list[tuple[int, ...]] = []
    model[0].register_forward_hook(lambda module, arguments, result: seen.append(result.shape))
    analysis = fxmem.analyze(model, step, device="cpu")
    assert analysis.setup.frontend_reason == "0 has hooks, which no graph calls"
    plan = fxmem.plan(analysis, max_overhead_flops=0.2)
    assert plan.style == "modules"
    planned = fxmem.apply(model, plan)
    assert not seen  # tracing leaves what hooks change as it was
    report = fxmem.verify(model, planned, step, steps=1)
    assert report.promise is not None and report.promise.is_kept
    seen.clear()  # of the real steps that were compared
    planned(torch.zeros(4, 16, 512)).sum().backward()
    assert seen == [(4, 1, 1024)]


@pytest.mark.parametrize("style", ["graph", "modules"])
def test_what_runs_in_place_on_views(style: str) -> None:
    """Instance normalisation before a ReLU in place, as in RAFT's and MONAI's encoders."""
    blocks = [
        nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1),
            nn.InstanceNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        for _ in range(3)
    ]
    model, step = nn.Sequential(*blocks), "2x8x32x32"
    analysis = fxmem.analyze(model, step, device="cpu")
    plan = fxmem.plan(analysis, max_overhead_flops=0.3, style=style, time_limit_s=0.3)
    report = fxmem.verify(model, fxmem.apply(model, plan), step, steps=1)
    assert report.equal
    assert plan.segments
    assert report.promise is not None
    assert report.promise.is_plans_own and abs(report.promise.deviation) < 1e-3


class Remembers(nn.Module):
    """Keeps what it computed last on a module, as RAFT's correlation pyramid."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)]
        )
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        self.seen = [y * 2]
        return self.seen[0]


def test_what_the_other_model_s_steps_left_is_not_measured() -> None:
    model, step = Remembers(), "512x16"
    analysis = fxmem.analyze(model, step, device="cpu")
    plan = fxmem.plan(analysis, max_overhead_flops=0.3, style="modules", time_limit_s=0.3)
    report = fxmem.verify(model, fxmem.apply(model, plan), step, steps=1)
    assert plan.segments
    assert report.promise is not None
    assert report.promise.is_plans_own and abs(report.promise.deviation) < 1e-3
    assert report.baseline.peak_bytes == pytest.approx(analysis.peak_bytes, rel=0.005)
