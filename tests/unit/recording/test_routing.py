"""Mixtures of experts, whose routing is taken as even, against steps that route so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measuring.profiled import measure_peaks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import record_function

import fxmem
from fxmem.recording.routing import choose_experts
from fxmem.recording.size_hints import read_routing
from fxmem.units import format_bytes

WIDTH, EXPERTS, CHOICES, TOKENS = 16, 8, 2, 4096
INPUT = f"{TOKENS}x{WIDTH}"
Route = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Mixture(nn.Module):
    """Experts whose router's offsets decide, so that a real step sends tokens to each in turn."""

    offsets: Tensor

    def __init__(self, route: Route) -> None:
        super().__init__()
        self.route = route
        self.router = nn.Linear(WIDTH, EXPERTS)
        layers = [
            nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))
            for _ in range(EXPERTS)
        ]
        self.experts = nn.ModuleList(layers)
        self.named = nn.ModuleDict({f"expert_{i}": layer for i, layer in enumerate(layers)})
        turns = (torch.arange(TOKENS * CHOICES) % EXPERTS).view(TOKENS, CHOICES)
        self.register_buffer("offsets", torch.zeros(TOKENS, EXPERTS).scatter_(1, turns, 50.0))

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.router(x) * 0.01 + self.offsets).softmax(-1)
        weights, chosen = scores.topk(CHOICES, dim=-1)
        return self.route(self, x, weights, chosen)


def route_as_transformers(net: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Mixtral and most others (transformers 5.23), with the names that Switch has."""
    result = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(chosen, num_classes=EXPERTS + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert in hit:
        expert = expert[0]
        if expert == EXPERTS:
            continue
        rank, token = torch.where(mask[expert])
        made = net.named[f"expert_{expert}"](x[token]) * weights[token, rank, None]
        result.index_add_(0, token, made)
    return result


def route_as_mistral(net: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """mistral-inference, moe.py."""
    result = torch.zeros_like(x)
    for i, expert in enumerate(net.experts):
        token, rank = torch.where(chosen == i)
        result[token] += weights[token, rank, None] * expert(x[token])
    return result


def route_by_masks(net: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for i, expert in enumerate(net.experts):
        mask = (chosen == i).any(-1)
        if mask.any():
            result[mask] += expert(x[mask])
    return result * weights.sum(-1, keepdim=True)


def route_by_counts(net: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """JetMoe (transformers): tokens sorted by their experts, and split."""
    flat = chosen.flatten()
    order = flat.argsort()
    rows = x[order // CHOICES].split(flat.bincount(minlength=EXPERTS).tolist())
    made = torch.cat([expert(part) for expert, part in zip(net.experts, rows, strict=True)])
    made = made * weights.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, order // CHOICES, made)


COUNTS = [2000, 92, 1600, 1400, 1200, 900, 600, 400]
ROUTES = {
    route_as_transformers: "record",
    route_as_mistral: "fx",  # its graph serves any routing
    route_by_masks: "record",
    route_by_counts: "record",
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("routing", "other"), [("balanced", "worst"), ("worst", "balanced"), (COUNTS, "worst")]
)
def test_the_peak_is_that_of_the_routing(route: Route, routing: Any, other: str) -> None:
    options: dict[str, Any] = {"device": "cpu", "optimizer": "sgd"}
    analysis = fxmem.analyze(Mixture(route), INPUT, **options, routing=routing)
    assert analysis.frontend == ROUTES[route]
    peak = format_bytes(fxmem.analyze(Mixture(route), INPUT, **options, routing=other).peak_bytes)
    notes = [note for note in analysis.setup.notes if f"--routing {other}" in note]
    assert len(notes) == 1 and notes[0].endswith(f"the peak is {peak}.")

    def run() -> None:
        model, x = Mixture(route), torch.randn(TOKENS, WIDTH)
        if routing == "worst":
            same = (torch.arange(TOKENS * CHOICES) % CHOICES).view(TOKENS, CHOICES)
            model.offsets.zero_().scatter_(1, same, 50.0)
            del same
        elif routing is COUNTS:
            model.offsets.zero_()
            experts = [expert for expert, count in enumerate(COUNTS) for _ in range(count)]
            for at, expert in enumerate(experts):
                model.offsets[at % TOKENS, expert] = 50.0
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for mark in ("first", "second"):
            with record_function(mark):
                optimizer.zero_grad()
                output = model(x)
                loss = output.sum()
                loss.backward()
                optimizer.step()
                del output, loss

    assert analysis.peak_bytes == pytest.approx(measure_peaks(run, ["second"])[0], rel=1e-4)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        ("all", "unknown routing 'all' (balanced, worst, or a number for each expert, such as 4,2"),
        ([], "bad routing [] (balanced"),
        ("1,-1", "bad routing '1,-1' (balanced"),
        ("3,1", "the routing has 2 shares, and the model 8 experts (balanced, worst, or a number"),
    ],
)
def test_what_is_no_routing_is_refused(routing: Any, message: str) -> None:
    with pytest.raises(fxmem.FxmemError) as error:
        fxmem.analyze(Mixture(route_as_transformers), INPUT, device="cpu", routing=routing)
    assert str(error.value).startswith(message)


def test_experts_that_are_not_wanted_get_what_is_left_over_one_by_one() -> None:
    shares = read_routing([0, 0, 1, 0])
    chosen = choose_experts(20, 2, 4, shares).view(10, 2)
    assert {*chosen.flatten().tolist()} == {0, 2}


@given(st.integers(1, 40), st.data())
def test_shares_are_those_of_the_choices(tokens: int, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(any))
    width = data.draw(st.integers(1, len(counts)))
    shares = read_routing(counts)
    chosen = choose_experts(tokens * width, width, len(counts), shares).view(tokens, width)
    assert all(len({*row}) == width for row in chosen.tolist())
    if tokens * max(shares) * width <= tokens:  # where no token would choose one twice
        found = chosen.flatten().bincount(minlength=len(counts)) / chosen.numel()
        assert (found - torch.tensor(shares)).abs().max() < len(counts) / chosen.numel()


def find_line(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"test_routing.py:{next(n for n, line in enumerate(lines, 1) if text in line)}"


def test_the_lines_that_routing_decides_are_noted() -> None:
    analysis = fxmem.analyze(Mixture(route_as_transformers), INPUT, device="cpu")
    hit, where = find_line("hit = torch.greater"), find_line("rank, token = torch.where")
    assert analysis.setup.notes[:1] == (
        f"The routing of tokens decides at {hit}, {where}: taken as even over the experts"
        f" (--size-hint {where}=N for another size).",
    )


@pytest.mark.parametrize("route", [route_as_transformers, route_by_masks])
def test_a_line_can_have_a_size_of_its_own(route: Route) -> None:
    text = "torch.where(mask[" if route is route_as_transformers else "expert(x[mask])"
    line = find_line(f" {text}" if route is route_as_transformers else text)
    model, shapes = Mixture(route), {}
    for size in (0, 3000):
        hint = {line: size, "other.py:1": 7, "": 5}
        analysis = fxmem.analyze(model, INPUT, device="cpu", size_hint=hint)
        shapes[size] = {node.shape for node in analysis.nodes if "experts" in node.fqn}
        note = f"Sizes that depend on data are taken as {size:,} at {line}, 7 at other.py:1, 5 else"
        assert analysis.setup.notes[0].startswith(note)
    assert shapes == {size: {(size, 64), (size, WIDTH)} for size in shapes}


def test_a_planned_mixture_computes_the_same() -> None:
    model = Mixture(route_as_mistral)
    plan = fxmem.plan(
        fxmem.analyze(model, INPUT, device="cpu"), max_overhead=1.0, strategy="schedules"
    )
    assert plan.segments
    assert fxmem.verify(model, fxmem.apply(model, plan), INPUT, steps=1).equal


def count_on_a_gpu(net: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Grouped products in transformers: a histogram of integers has a kernel for GPUs alone."""
    counts = torch.histc(chosen.int(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    return net.experts[0](x) * counts.cumsum(0)[-1]  # type: ignore[no-any-return]


def test_values_that_the_host_cannot_compute_are_unknown() -> None:
    analysis = fxmem.analyze(Mixture(count_on_a_gpu), INPUT)
    assert (analysis.frontend, analysis.setup.notes) == ("fx", ())


def choose_one(net: Any, x: Tensor) -> Tensor:
    return x[: net.router(x).argmax(0)[0]]


def choose_words(net: Any, x: Tensor) -> Tensor:
    return x[(x @ x.new_zeros(WIDTH, 2000)).argmax(-1) == 0]


@pytest.mark.parametrize("choose", [choose_one, choose_words])
def test_other_choices_are_refused(choose: Callable[[Any, Tensor], Tensor]) -> None:
    model = Mixture(lambda net, x, weights, chosen: choose(net, x))
    with pytest.raises(fxmem.DataDependentError):
        fxmem.analyze(model, INPUT, device="cpu")
