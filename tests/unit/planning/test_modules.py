"""Modules that may be recomputed, and their calls as segments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxmem import analyze
from fxmem.planning.model.index import StepIndex, build_index
from fxmem.planning.model.limits import find_limits
from fxmem.planning.model.modules import ModuleChoice, list_modules, name_spans
from fxmem.planning.model.score import Scorer
from fxmem.planning.model.segments import SegmentRange, nest_spans
from fxmem.planning.model.simulate import simulate_segments


class Mlp(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        active = torch.tanh(hidden)
        return self.down(active)


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def look_up(model: nn.Module, **options: Any) -> tuple[StepIndex, dict[str, ModuleChoice], Any]:
    analysis = analyze(model, ("4x8",), device="cpu", **options)
    step = build_index(analysis.graph, keeps_frames=True)
    choices, reasons = list_modules(step, find_limits(step))
    return step, {choice.fqn: choice for choice in choices}, reasons


def test_modules_of_any_depth_are_choices() -> None:
    model = nn.Sequential(Block(Mlp()), Block(Mlp()), nn.Linear(8, 1))
    step, choices, reasons = look_up(model)
    assert not reasons
    assert list(choices) == [
        *("0", "0.norm", "0.inner", "0.inner.up", "0.inner.down"),
        *("1", "1.norm", "1.inner", "1.inner.up", "1.inner.down", "2"),
    ]
    start, stop = choices["0.inner"].spans[0]
    names = [node.name for node in step.graph.nodes[start:stop]]
    assert names == ["0.inner.up", "0.inner.tanh", "0.inner.down"]


def test_all_calls_of_a_module_go_together() -> None:
    shared = Mlp()
    model = nn.Sequential(Block(shared), Block(shared))
    _, choices, _ = look_up(model)
    assert len(choices["0.inner"].spans) == 2
    assert "1.inner" not in choices  # the same module has one name
    names = name_spans([choices["0.inner"]])
    assert [names[span] for span in choices["0.inner"].spans] == ["0.inner", "0.inner"]


def test_of_modules_that_share_calls_it_is_the_outermost() -> None:
    shared = Mlp()
    for model in (nn.Sequential(Mlp()), shared), (nn.Sequential(shared), shared):
        _, choices, _ = look_up(nn.Sequential(*model, nn.Linear(8, 1)))
        assert "0" in choices
        assert "0.0" not in choices


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(8, generator=self.generator)


class Averaging(nn.Module):
    def __init__(self, reads_first: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.reads_first = reads_first

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean if self.reads_first else x  # type: ignore[operator]
        self.mean.mul_(0.9)  # type: ignore[operator]
        return y + self.mean


class Adding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x.exp()


class Reading(nn.Module):
    """Reads what its parent puts beside its arguments."""

    def __init__(self, beside: list[Tensor]) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, x: Tensor) -> Tensor:
        return x * self.beside[-1]


class Lending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beside: list[Tensor] = []
        self.first, self.reading = nn.Linear(8, 8), Reading(self.beside)

    def forward(self, x: Tensor) -> Tensor:
        self.beside[:] = [self.first(x)]
        return self.reading(x)


kept: list[Tensor] = []


class Keeping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        kept[:] = [super().forward(x)]
        return torch.tanh(kept[0])


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keeping = Keeping(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.keeping(x).sum() + kept.pop().sum()


@pytest.mark.parametrize(
    ("model", "fqn", "reason"),
    [
        (
            nn.Sequential(Block(Drawing()), nn.Linear(8, 1)),
            "0",
            "0.inner.rand draws from a generator of its own, whose state is not restored",
        ),
        (
            nn.Sequential(Averaging(), nn.Linear(8, 8)),
            "0",
            "0.sub reads 0.mean, which 0.mul_ changes in place",
        ),
        (nn.Sequential(nn.Linear(8, 8), Adding()), "1", "1.add_ changes its input in place"),
        (
            Lending(),
            "reading",
            "it uses first, which is computed before it and is none of its arguments",
        ),
        (Taking(), "keeping", "what it makes is held elsewhere than in its result: keeping.linear"),
    ],
    ids=["generator", "buffer", "in place", "reads", "keeps"],
)
def test_modules_that_cannot_be_recomputed(model: nn.Module, fqn: str, reason: str) -> None:
    _, choices, reasons = look_up(model)
    assert fqn not in choices
    assert reasons[fqn] == reason


def test_a_checkpoint_begins_with_a_buffer_as_it_was() -> None:
    _, choices, _ = look_up(nn.Sequential(Averaging(reads_first=False), nn.Linear(8, 8)))
    assert "0" in choices


def test_the_step_as_it_was_is_simulated_as_it_was() -> None:
    class Holding(nn.Module):
        """Its variables hold what it does not use any more."""

        def forward(self, x: Tensor) -> Tensor:
            one = x.exp()
            two = one.exp() + 1
            three = two.repeat(1, 4) * 2
            return three.sum()

    model = nn.Sequential(Block(Mlp()), nn.Linear(8, 8), Holding())
    analysis = analyze(model, ("4x8",), device="cpu")
    step = build_index(analysis.graph, keeps_frames=True)
    assert simulate_segments(step, ()).peak_bytes == analysis.peak_bytes


def test_modules_are_scored_as_they_are_simulated() -> None:
    model = nn.Sequential(Block(Mlp()), Block(Mlp()), nn.Linear(8, 1))
    step, choices, _ = look_up(model)
    scorer = Scorer(step, [1.0] * len(step.graph.operations))
    for names in (["0"], ["0.inner", "1"], ["0", "0.inner", "1.norm"], [*choices]):
        ranges = nest_spans(span for name in names for span in choices[name].spans)
        assert scorer.score(ranges)[0] == simulate_segments(step, ranges).peak_bytes


def test_spans_nest() -> None:
    assert nest_spans([]) == ()
    assert nest_spans([(4, 6), (0, 4), (1, 2), (1, 3)]) == (
        SegmentRange(0, 4, (SegmentRange(1, 3, (SegmentRange(1, 2),)),)),
        SegmentRange(4, 6),
    )
