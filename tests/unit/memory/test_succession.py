"""Steps of different sizes in one allocator, against recordings of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.analysis import Analysis
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.memory.interpolation import describe_structure, interpolate_graph
from fxmem.memory.succession import Fragmentation, choose_settings, replay_steps

SIZES = [40, 900, 350, 1200, 610, 75, 1130, 480, 1010, 220, 760, 1190]


def make_net() -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]
    return nn.Sequential(*layers)


def record_steps(sizes: list[int]) -> tuple[list[Analysis], list[int]]:
    """Records a step of each size, and what is reserved after each."""
    net, reserved = make_net(), []
    with fxmem.record(steps=len(sizes)) as recording:
        net.cuda()
        optimizer = torch.optim.AdamW(net.parameters())
        for size in sizes:
            optimizer.zero_grad()
            net(torch.ones(8, size, 512, device="cuda")).sum().backward()
            optimizer.step()
            reserved.append(torch.cuda.max_memory_reserved())
    return list(recording.steps), reserved


def test_computed_steps_reserve_what_recorded_ones_do() -> None:
    steps, reserved = record_steps([200, 800, 200, 600, 1200])
    known = {size: steps[at].graph for at, size in ((2, 200), (3, 600), (4, 1200))}
    assert len({describe_structure(graph) for graph in known.values()}) == 1
    graphs = [interpolate_graph(known, size) for size in SIZES]
    found, *others = replay_steps(steps[0].graph, graphs, AllocatorSettings())
    _, reserved = record_steps(SIZES)
    assert found.reserved_bytes == pytest.approx(reserved[-1], rel=0.01)
    assert found.unused_bytes > 0.3 * found.reserved_bytes
    expandable = next(each for each in others if each.alloc_conf == "expandable_segments:True")
    assert expandable.reserved_bytes < 0.8 * found.reserved_bytes
    assert choose_settings([found, *others]) is expandable


def test_steps_of_one_size_reserve_what_one_does() -> None:
    step = fxmem.analyze(make_net(), "8x300x512", optimizer="adamw", device="cuda")
    found, *_ = replay_steps(step.graph, [step.graph] * 3, AllocatorSettings())
    assert found.steps == 3 and found.failed is None
    assert found.reserved_bytes == pytest.approx(step.reserved_bytes, rel=0.01)
    assert found.reserved_bytes - found.unused_bytes == step.peak_bytes


def test_the_step_that_does_not_fit_is_told() -> None:
    sizes = {size: analyze_size(size) for size in (100, 400)}
    graphs = [sizes[size].graph for size in (100, 100, 400, 100)]
    limits: dict[str, Any] = {"capacity_bytes": sizes[100].reserved_bytes + 2**20}
    found, *_ = replay_steps(graphs[0], graphs, AllocatorSettings(), **limits)
    assert found.failed == 3
    found, *_ = replay_steps(graphs[0], graphs, AllocatorSettings(), capacity_bytes=2**20)
    assert found.failed == 1  # the model itself


def analyze_size(size: int) -> Analysis:
    return fxmem.analyze(make_net(), f"8x{size}x512", optimizer="adamw", device="cuda")


@pytest.mark.parametrize(
    ("reserved", "failed", "chosen"),
    [((100, 99.5, 80), (None,) * 3, 2), ((100, 99.5), (None,) * 2, 0), ((1, 2), (1, 1), None)],
)
def test_the_first_of_the_best_settings_is_chosen(
    reserved: tuple[int, ...], failed: tuple[int | None, ...], chosen: int | None
) -> None:
    found = [
        Fragmentation(str(at), 9, nbytes, 0, 0, step)
        for at, (nbytes, step) in enumerate(zip(reserved, failed, strict=True))
    ]
    assert choose_settings(found) is (None if chosen is None else found[chosen])
