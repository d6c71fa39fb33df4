"""Regions under checkpoints: the memory that was promised, and the same numbers bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest
import torch
from planned_models import PLANNED
from torch import Tensor, nn

from fxmem import analyze
from fxmem.planning.describe import describe_segments
from fxmem.planning.facts import StepFacts, gather_facts
from fxmem.planning.limits import Limits, find_limits
from fxmem.planning.regions import Region
from fxmem.planning.simulation import simulate_regions
from fxmem.recording.losses import resolve_loss
from fxmem.timeline import build_timeline
from fxmem.tracing.fxgraph import iterate_tensors
from fxmem.transform.checkpointing import build_module

SEEDS = range(6)


def draw_regions(
    rng: random.Random, limits: Limits, start: int, stop: int, depth: int = 0
) -> Iterator[Region]:
    """Regions at random that may be computed again."""
    at = start
    while at < stop:
        end = min(stop, at + rng.randint(1, max(1, (stop - start) // (2 if depth else 1))))
        free = not any(node in limits.fixed for node in range(at, end))
        if rng.random() < 0.7 and free and at not in limits.starts:
            deeper = depth < 2 and rng.random() < 0.5
            inner = tuple(draw_regions(rng, limits, at, end, depth + 1)) if deeper else ()
            if all(child.stop - child.start < end - at for child in inner):
                yield Region(at, end, inner)
        at = end


def draw_plan(name: str, seed: int, facts: StepFacts) -> tuple[Region, ...]:
    rng = random.Random(f"{name} {seed}")
    placeholders = sum(node.op == "placeholder" for node in facts.graph.nodes)
    return tuple(draw_regions(rng, find_limits(facts), placeholders, facts.nodes))


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return PLANNED[name][0]()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PLANNED)
def test_the_rewritten_step_takes_what_was_computed(name: str, device: str) -> None:
    model, spec = make_model(name), PLANNED[name][1]
    analysis = analyze(model, (spec,), device=device)
    assert analysis.frontend == "fx"
    facts = gather_facts(analysis.graph, counts_host=device == "cpu")
    costs = [0.0] * len(analysis.graph.operations)
    for seed in SEEDS:
        regions = draw_plan(name, seed, facts)
        simulation = simulate_regions(facts, regions)
        planned = build_module(model, analysis.fx_graph, describe_segments(facts, regions, costs))
        recorded = analyze(planned, (spec,), device=device)
        peak_bytes = max(build_timeline(recorded.graph).profile())
        # What a function takes out of a region goes a moment before the sum of its bias.
        assert peak_bytes <= simulation.peak_bytes <= peak_bytes * 1.00002, regions


@pytest.mark.parametrize("name", PLANNED)
def test_the_rewritten_step_computes_the_same(name: str) -> None:
    model, spec = make_model(name), PLANNED[name][1]
    analysis = analyze(model, (spec,), device="cpu")
    facts = gather_facts(analysis.graph, counts_host=True)
    costs = [0.0] * len(analysis.graph.operations)
    expected = train(copy.deepcopy(model), name)
    for seed in SEEDS:
        other = make_model(name)
        segments = describe_segments(facts, draw_plan(name, seed, facts), costs)
        planned = build_module(other, analysis.fx_graph, segments)
        found = train(planned, name)
        assert [*planned.state_dict()] == [*model.state_dict()]
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def train(model: nn.Module, name: str) -> list[Tensor]:
    """What two steps leave behind: losses, gradients, buffers and the next random number."""
    torch.manual_seed(1)
    sizes, _, dtype = PLANNED[name][1].partition(":")
    shape = [int(size) for size in sizes.split("x")]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = resolve_loss(None)
    left = []
    for _ in range(2):
        x = torch.randint(0, 50, shape) if dtype else torch.randn(shape)
        optimizer.zero_grad()
        loss = loss_of.compute(model(x), None)
        loss.backward()
        optimizer.step()
        left += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [*left, *iterate_tensors(model.state_dict()), torch.rand(1)]
