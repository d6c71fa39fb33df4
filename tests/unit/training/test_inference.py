"""``torch.inference_mode`` in a recording, against the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import measure_peak
from running import Runs
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import fxmem
from fxmem.errors import UsageError
from fxmem.report.text import write_subject
from fxmem.training.isolation import replace_inference_mode
from fxmem.units import format_bytes
from fxmem.versions.fallbacks import keeps_casts_in_inference

Use = Callable[[], None]
BF16 = torch.bfloat16


def chunk(layer: nn.Linear, x: Tensor) -> Tensor:
    first, second = x.chunk(2)
    return layer(first) + layer(second)


def unbind(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(torch.stack([row * 2 for row in x.unbind()]))


def split_in_place(layer: nn.Linear, x: Tensor) -> Tensor:
    y = x * 2
    y.narrow(0, 0, 32).add_(layer(x[:32]))
    return y.split(16)[1].clone()


def analyze(model: nn.Module, **options: Any) -> fxmem.Analysis:
    return fxmem.analyze(model, ("64x64",), mode="infer", **options)


@pytest.mark.parametrize("run", [chunk, unbind, split_in_place])
def test_the_peak_is_that_of_real_inference_mode(
    run: Callable[[nn.Linear, Tensor], Tensor],
) -> None:
    # As ``Sam2VideoModel.forward`` of transformers is decorated.
    infer, layer = torch.inference_mode()(run), nn.Linear(64, 64, bias=False)
    model, x = Runs(lambda net, x: infer(net.layer, x), layer=layer), torch.ones(64, 64)
    resident = 2 * 64 * 64 * 4
    assert analyze(model, device="cpu").peak_bytes - resident == measure(lambda: model(x))


@pytest.mark.parametrize("inference_mode", [False, True])
def test_under_autocast_the_peak_is_the_real_one_in_either(inference_mode: bool) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)), nn.ReLU())
    x = torch.ones(64, 64)

    def infer() -> Tensor:
        context = torch.inference_mode() if inference_mode else torch.no_grad()
        with context, torch.autocast("cpu", BF16):
            return model(x)  # type: ignore[no-any-return]

    analysis = analyze(model, device="cpu", autocast="bf16", inference_mode=inference_mode)
    assert analysis.peak_bytes - 4 * 64 * 64 * 4 == measure(infer)


@pytest.mark.skipif(keeps_casts_in_inference(), reason="the two are one before 2.11")
def test_a_report_says_for_which_of_the_two_it_is_and_the_other_s_peak() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    no_grad, inference = (
        analyze(model, autocast="bf16", inference_mode=inference_mode)
        for inference_mode in (False, True)
    )
    # Inference mode has one cast at a time, no_grad all three in the end.
    assert no_grad.peak_bytes - inference.peak_bytes == 2 * 64 * 64 * 2
    assert no_grad.setup.notes == (
        "Under torch.inference_mode() (inference_mode=True, --inference-mode) the peak is"
        f" {format_bytes(inference.peak_bytes)}: autocast keeps no casts of weights there.",
    )
    assert inference.setup.notes == (
        f"Under torch.no_grad() the peak is {format_bytes(no_grad.peak_bytes)}:"
        " autocast keeps its casts of weights there.",
    )
    assert inference.setup.inference_mode
    for analysis, context in ((no_grad, "no_grad()"), (inference, "inference_mode()")):
        subject = write_subject(analysis.setup)
        assert subject == f"Sequential; 64x64:float32; infer under {context}; cuda; autocast bf16"


def test_without_casts_of_weights_the_two_are_one() -> None:
    model = nn.Linear(64, 64, bias=False)
    no_grad, inference = (analyze(model, inference_mode=mode) for mode in (False, True))
    assert no_grad.graph == inference.graph
    assert no_grad.setup.notes == inference.setup.notes == ()
    assert write_subject(no_grad.setup) == "Linear; 64x64:float32; infer; cuda"
    frozen = analyze(model.requires_grad_(False), autocast="bf16")
    assert frozen.setup.notes == ()


def test_inference_mode_is_for_inference() -> None:
    with pytest.raises(UsageError) as caught:
        fxmem.analyze(nn.ReLU(), ("4",), inference_mode=True)
    assert str(caught.value) == "inference_mode with mode='train' (mode='infer' (--mode infer))"


def measure(call: Callable[[], object]) -> int:
    """The most that a second call allocates at once."""
    call()
    return measure_peak(call)[0]


def plain(use: Use) -> None:
    with torch.inference_mode():
        use()
    use()


def left_inside(use: Use) -> None:
    """As interatomic potentials leave it, which need gradients (Lightning's validation)."""
    with torch.inference_mode():
        with torch.inference_mode(False):
            use()
            with torch.no_grad():
                use()
        use()


def with_gradients(use: Use) -> None:
    with torch.inference_mode():
        with torch.enable_grad():
            use()
        with torch.set_grad_enabled(True), torch.no_grad():
            use()
        use()
    use()


def in_autocast(use: Use) -> None:
    with torch.autocast("cpu", BF16):
        with torch.inference_mode():
            use()
            with torch.inference_mode(False):
                use()
        use()


def around_autocast(use: Use) -> None:
    cast = torch.autocast("cpu", BF16)(use)  # made outside, as a decorator is
    with torch.inference_mode():
        cast()
        with torch.autocast("cpu", BF16, cache_enabled=True):
            use()
    cast()


def observe(scenario: Callable[[Use], None]) -> list[object]:
    """By use: whether it is inference mode, whether autograd records, and how often is cast."""
    log: list[object] = []
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)

    def use() -> None:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            y = functional.linear(functional.linear(x, weight), weight)
        names = [event.name for event in profiler.events() or ()]
        log.append((torch.is_inference_mode_enabled(), y.requires_grad))
        log.append(names.count("aten::_to_copy"))

    scenario(use)
    log.append((torch.is_grad_enabled(), torch.is_autocast_cache_enabled()))
    return log


SCENARIOS = [plain, left_inside, with_gradients, in_autocast, around_autocast]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_it_does_as_the_real_one_does(scenario: Any) -> None:
    real = observe(scenario)
    with replace_inference_mode():
        replaced = observe(scenario)
    assert replaced == real
