"""Plans of steps that accumulate gradients, against the planned model's own step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

import fxmem
from fxmem.graph import MemoryGraph
from fxmem.memory.allocation import trace_blocks
from fxmem.planning.model.index import build_index
from fxmem.planning.model.simulate import build_graph, simulate_segments
from fxmem.planning.outcome import take_last_micro_batch, trace_plan

INPUT = "256x32"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)
        self.norm, self.drop = nn.BatchNorm1d(128), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.drop(self.norm(self.wide(x)).tanh()).sigmoid())


def make_model() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(2)), nn.Linear(32, 8))


@pytest.mark.parametrize(
    ("device", "style", "loop", "options"),
    [
        ("cpu", "modules", "plain(accumulate=4)", {"hold_outputs": True, "set_to_none": False}),
        ("cpu", "graph", "huggingface(accumulate=2)", {"autocast": "bf16"}),
        ("cuda", "graph", "huggingface(accumulate=4)", {"autocast": "fp16"}),
        ("cuda", "modules", "lightning(accumulate=4)", {}),
    ],
)
def test_the_planned_step_takes_what_the_plan_says(
    device: str, style: str, loop: str, options: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"device": device, "loop": loop, "optimizer": "adam", **options}
    search = "schedules" if style == "graph" else "modules"
    analysis, model = fxmem.analyze(make_model(), INPUT, **settings), make_model()
    plan = fxmem.plan(analysis, max_overhead=0.5, style=style, strategy=search)
    assert plan.peak_bytes < plan.baseline_peak_bytes == analysis.peak_bytes
    again = fxmem.analyze(fxmem.apply(model, plan), INPUT, **settings)
    assert again.peak_bytes == plan.peak_bytes
    planned = trace_plan(analysis, plan)
    assert planned is not None
    assert (planned.analysis.peak.phase, planned.analysis.peak.operation.name) == (
        again.peak.phase,
        again.peak.operation.name,
    )
    operations, ran = analysis.graph.operations, planned.analysis.graph.operations
    assert [operations[at].name for at, _ in planned.order] == [each.name for each in ran]


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"set_to_none": False}])
def test_blocks_lie_between_gradients_as_in_the_recorded_step(options: dict[str, Any]) -> None:
    step: dict[str, Any] = {"optimizer": "adam", **options}
    analysis = fxmem.analyze("examples/unet.py:UNet", "2x3x64x64", **step)
    plain = fxmem.pareto(analysis, strategy=lambda problem: [])[0]
    assert plain.peak_bytes == plain.baseline_peak_bytes


def test_the_overhead_is_that_of_all_micro_batches() -> None:
    once, often = (
        fxmem.pareto(
            fxmem.analyze(make_model(), INPUT, device="cpu", accumulate=times),
            strategy=lambda problem: [[(1, 12)]],
        )[-1]
        for times in (2, 6)
    )
    # Without an optimizer, a step is its micro-batches.
    assert 0 < once.overhead_flops == pytest.approx(often.overhead_flops)
    assert 0 < once.overhead == pytest.approx(often.overhead)
    (once_segment,), (often_segment,) = once.segments, often.segments
    assert 3 * once_segment.recompute_s == pytest.approx(often_segment.recompute_s)
    assert 3 * once_segment.recompute_flops == often_segment.recompute_flops > 0


def move_to_side(graph: MemoryGraph) -> MemoryGraph:
    """Puts everything on another stream than the default one."""
    names = {name if name is not None else -(10**6) for name, _ in graph.warmup}
    return replace(
        graph,
        storages=tuple(replace(storage, stream=5) for storage in graph.storages),
        operations=tuple(replace(operation, stream=5) for operation in graph.operations),
        warmup=tuple((-(10**6) if name is None else name, n) for name, n in graph.warmup),
        warmup_streams=tuple((name, 5) for name in names if name < 0),
    )


@pytest.mark.parametrize("loop", ["plain", "plain(accumulate=2)"])
def test_a_rewritten_step_keeps_its_streams(loop: str) -> None:
    analysis = fxmem.analyze(make_model(), INPUT, device="cuda", loop=loop, optimizer="adam")
    moved = replace(analysis, graph=move_to_side(analysis.graph))
    cut = take_last_micro_batch(moved).graph
    for graph in (moved.graph, cut, build_graph(simulate_segments(build_index(cut), ()))):
        # Segments of the default stream would stay, even of one block that is gone.
        assert {segment.stream for segment in trace_blocks(graph, analysis.settings).segments} == {
            5
        }
