"""The largest size that fits, against all sizes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxmem
from fxmem.batching.sizes import resolve_margin
from fxmem.gpus import CONTEXT_BYTES
from fxmem.memory.interpolation import describe_structure, interpolate_graph
from fxmem.planning.outcome import find_shortage

MIB = 2**20


class Attention(nn.Module):
    """Keeps scores that grow with the square of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, dim=-1)
        return torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v


class Halving(nn.Module):
    """Takes images of even size alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        small = F.max_pool2d(self.conv(x), 2)
        return F.interpolate(small, scale_factor=2.0) + x.mean(1, keepdim=True)


class Positions(nn.Module):
    """Has positions for sequences up to 40."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(40, 64))
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.positions[: x.shape[1]])


def make_net(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), *(middle or (nn.ReLU(),)), nn.Linear(256, 64))


def scan(analyze: Callable[[int], fxmem.Analysis], sizes: range, memory: int) -> int:
    """Finds the largest size that fits by analysing all."""
    best = 0
    for size in sizes:
        try:
            analysis = analyze(size)
        except fxmem.TraceError:
            continue
        context_bytes = 0 if analysis.settings is None else max(CONTEXT_BYTES)
        if not find_shortage(analysis, None, memory, context_bytes):
            best = size
    return best


@pytest.mark.parametrize(
    ("model", "spec", "axis", "memory", "options"),
    [
        (Attention(), "16x128x32", 0, 800 * MIB, {"optimizer": "adam"}),
        (Attention(), "2x16x32", 1, MIB // 2, {"device": "cpu"}),
        (Halving(), "1x3x8x8", "2,3", MIB // 4, {"device": "cpu", "mode": "infer"}),
    ],
)
def test_the_answer_is_that_of_a_scan(
    model: nn.Module, spec: str, axis: Any, memory: int, options: dict[str, Any]
) -> None:
    def analyze(size: int) -> fxmem.Analysis:
        shape = [int(n) for n in spec.split("x")]
        for dim in map(int, str(axis).split(",")):
            shape[dim] = size
        return fxmem.analyze(model, "x".join(map(str, shape)), **options)

    found = fxmem.max_batch(model, spec, memory=memory, axis=axis, margin=0, **options)
    assert found.is_exact and found.analyses <= 6
    assert found.next_batch is not None and found.peak_bytes is not None
    near = range(max(1, found.batch - 2), found.next_batch + 2)
    assert found.batch == scan(analyze, near, memory)
    assert analyze(found.batch).peak_bytes == found.peak_bytes
    assert analyze(found.next_batch).peak_bytes == found.next_peak_bytes


@pytest.mark.usefixtures("quick_search")
def test_a_plan_makes_room_for_more() -> None:
    net = nn.Sequential(nn.Linear(8, 64), *[nn.Tanh() for _ in range(8)], nn.Linear(64, 1))
    options: dict[str, Any] = {"device": "cpu", "margin": 0}
    found = fxmem.max_batch(net, "64x8", memory="64MiB", max_overhead=0.3, **options)
    planned = found.planned
    assert planned is not None and planned.plan is not None
    assert planned.batch > 1.3 * found.batch and planned.is_exact
    assert planned.peak_bytes == planned.plan.peak_bytes <= 64 * MIB
    assert planned.plan.overhead <= 0.3
    analysis = fxmem.analyze(net, f"{planned.next_batch}x8", device="cpu")
    assert fxmem.plan(analysis, max_overhead=0.3).peak_bytes > 64 * MIB
    values = json.loads(found.to_json())
    assert values["planned"]["plan"]["peak_bytes"] == planned.peak_bytes
    assert (values["batch"], values["is_exact"]) == (found.batch, True)


def test_sizes_that_the_model_refuses_end_the_search() -> None:
    """Above, a lack of positions; below, batch normalisation of one value per channel."""
    found = fxmem.max_batch(Positions(), "2x16x64", memory="1GiB", axis=1, device="cpu")
    assert (found.batch, found.next_batch, found.next_peak_bytes) == (40, 41, None)
    assert "41" in found.next_cause
    net = make_net(nn.BatchNorm1d(256))
    found = fxmem.max_batch(net, "8x64", memory="250KiB", device="cpu")
    assert (found.batch, found.peak_bytes, found.next_batch) == (0, None, 2)


def test_multiples_are_what_is_looked_among() -> None:
    found = fxmem.max_batch(make_net(), "6x64", memory="3MiB", multiple_of=8, device="cpu")
    assert found.batch % 8 == 0 and found.next_batch == found.batch + 8
    assert found.multiple_of == 8


def test_the_margin_and_the_context_stay_free() -> None:
    gpu = fxmem.max_batch(make_net(), "4096x64", gpu="rtx3070")
    assert gpu.context_bytes == max(CONTEXT_BYTES)
    assert gpu.margin_bytes == int(0.02 * gpu.memory_bytes)
    less = fxmem.max_batch(make_net(), "4096x64", gpu="rtx3070", margin="1GiB")
    assert less.batch < gpu.batch
    with pytest.raises(fxmem.UsageError, match=r"^'x%' is not a margin \(5% or 1GiB\)"):
        resolve_margin("x%", MIB)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "the largest batch for which memory? (gpu='rtx4090' or memory='24GiB')"),
        ({"memory": "512MiB"}, "a memory of 512.00 MiB is less than the 610.24 MiB kept for "),
        ({"memory": "1GiB", "margin": "1GiB"}, "a margin of 1.00 GiB leaves nothing of 1.00 GiB"),
        ({"memory": "1GiB", "margin": "500%"}, "a margin of 5.00 GiB leaves nothing of 1.00 GiB"),
        ({"memory": "1GiB", "multiple_of": 0}, "a size cannot be a multiple of 0 (1 or more)"),
        (
            {"memory": "1GiB", "mode": "infer", "max_overhead": 0.1},
            "inference recomputes nothing (leave max_overhead out)",
        ),
        (
            {"memory": "1GiB", "mesh": {"dp": 2}, "parallelize": "ddp", "max_overhead": 0.1},
            "the batch of a rank is not searched with plans (leave max_overhead out, then plan at",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fxmem.UsageError) as caught:
        fxmem.max_batch(make_net(), "8x64", **options)
    assert str(caught.value).startswith(message)


def test_a_graph_between_others_is_as_if_recorded() -> None:
    graphs = {
        size: fxmem.analyze(Attention(), f"2x{size}x32", optimizer="adam").graph
        for size in (32, 64, 96, 160)
    }
    wanted = graphs.pop(160)
    computed = interpolate_graph(graphs, 160)
    assert describe_structure(computed) == describe_structure(wanted)
    pairs = zip(computed.storages, wanted.storages, strict=True)
    assert all(ours.nbytes == theirs.nbytes for ours, theirs in pairs)
    flops = [[operation.flops for operation in graph.operations] for graph in (computed, wanted)]
    assert flops[0] == flops[1]


def test_a_warning_comes_once() -> None:
    class Warns(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("old", stacklevel=1)
            return super().forward(x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fxmem.max_batch(Warns(64, 64), "8x64", memory="1MiB", device="cpu")
    alone = len(caught)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fxmem.analyze(Warns(64, 64), "8x64", device="cpu")
    assert alone == len(caught)
