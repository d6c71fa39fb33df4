"""Which modules may be computed again, and their calls as regions."""

from __future__ import annotations

from typing import Any

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
    facts = build_index(analysis.graph, keeps_frames=True)
    choices, reasons = list_modules(facts, find_limits(facts))
    return facts, {choice.fqn: choice for choice in choices}, reasons


def find_reason(model: nn.Module, fqn: str) -> str:
    _, choices, reasons = look_up(model)
    assert fqn not in choices
    return str(reasons[fqn])


def test_modules_of_any_depth_are_choices() -> None:
    model = nn.Sequential(Block(Mlp()), Block(Mlp()), nn.Linear(8, 1))
    facts, choices, reasons = look_up(model)
    assert not reasons
    assert list(choices) == [
        *("0", "0.norm", "0.inner", "0.inner.up", "0.inner.down"),
        *("1", "1.norm", "1.inner", "1.inner.up", "1.inner.down", "2"),
    ]
    start, stop = choices["0.inner"].spans[0]
    names = [node.name for node in facts.graph.nodes[start:stop]]
    assert names == ["0.inner.up", "0.inner.tanh", "0.inner.down"]


def test_all_calls_of_a_module_go_together() -> None:
    shared = Mlp()
    model = nn.Sequential(Block(shared), Block(shared))
    _, choices, _ = look_up(model)
    assert len(choices["0.inner"].spans) == 2
    assert "1.inner" not in choices  # the same module has one name
    names = name_spans([choices["0.inner"]])
    assert [names[span] for span in choices["0.inner"].spans] == ["0.inner", "0.inner"]


def test_of_modules_that_run_the_same_it_is_the_outermost() -> None:
    _, choices, _ = look_up(nn.Sequential(nn.Sequential(Mlp()), nn.Linear(8, 1)))
    assert "0" in choices
    assert "0.0" not in choices


def test_what_shares_some_calls_with_another_is_left_out() -> None:
    shared = Mlp()
    _, choices, _ = look_up(nn.Sequential(nn.Sequential(shared), shared))
    assert [fqn for fqn in choices if fqn in ("0", "0.0")] == ["0"]


def test_nodes_that_may_not_be_computed_again_are_in_no_choice() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rand(8, generator=self.generator)

    reason = find_reason(nn.Sequential(Block(Drawing()), nn.Linear(8, 1)), "0")
    assert "draws from a generator of its own" in reason


def test_a_module_that_changes_a_buffer_after_it_read_it_is_no_choice() -> None:
    class Averaging(nn.Module):
        def __init__(self, reads_first: bool) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.reads_first = reads_first

        def forward(self, x: Tensor) -> Tensor:
            y = x - self.mean if self.reads_first else x  # type: ignore[operator]
            self.mean.mul_(0.9)  # type: ignore[operator]
            return y + self.mean

    model = nn.Sequential(Averaging(True), nn.Linear(8, 8))
    assert find_reason(model, "0") == "0.sub reads 0.mean, which 0.mul_ changes in place"
    _, choices, _ = look_up(nn.Sequential(Averaging(False), nn.Linear(8, 8)))
    assert "0" in choices  # a checkpoint begins again with what the buffer was


def test_no_choice_begins_where_its_input_is_changed() -> None:
    class Adding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return x.exp()

    assert find_reason(nn.Sequential(nn.Linear(8, 8), Adding()), "1") == (
        "1.add_ changes its input in place"
    )


def test_a_module_that_reads_what_it_is_not_given_is_no_choice() -> None:
    class Reading(nn.Module):
        def __init__(self, source: list[Tensor]) -> None:
            super().__init__()
            self.source = source

        def forward(self, x: Tensor) -> Tensor:
            return x * self.source[-1]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source: list[Tensor] = []
            self.first = nn.Linear(8, 8)
            self.reading = Reading(self.source)

        def forward(self, x: Tensor) -> Tensor:
            self.source[:] = [self.first(x)]
            return self.reading(x)

    assert find_reason(Model(), "reading") == (
        "it uses first, which is computed before it and is none of its arguments"
    )


def test_a_module_whose_values_are_kept_elsewhere_is_no_choice() -> None:
    kept: list[Tensor] = []

    class Keeping(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            kept[:] = [hidden]
            return self.down(torch.tanh(hidden))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keeping = Keeping()

        def forward(self, x: Tensor) -> Tensor:
            y = self.keeping(x)
            total = y.sum() + kept[0].sum()
            kept.clear()
            return total

    assert find_reason(Model(), "keeping") == (
        "what it makes is held elsewhere than in its result: keeping.up"
    )


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
    facts = build_index(analysis.graph, keeps_frames=True)
    assert simulate_segments(facts, ()).peak_bytes == analysis.peak_bytes


def test_modules_are_scored_as_they_are_simulated() -> None:
    model = nn.Sequential(Block(Mlp()), Block(Mlp()), nn.Linear(8, 1))
    facts, choices, _ = look_up(model)
    scorer = Scorer(facts, [1.0] * len(facts.graph.operations))
    for names in (["0"], ["0.inner", "1"], ["0", "0.inner", "1.norm"], [*choices]):
        regions = nest_spans(span for name in names for span in choices[name].spans)
        assert scorer.score(regions)[0] == simulate_segments(facts, regions).peak_bytes


def test_spans_nest() -> None:
    assert nest_spans([]) == ()
    assert nest_spans([(4, 6), (0, 4), (1, 2), (1, 3)]) == (
        SegmentRange(0, 4, (SegmentRange(1, 3, (SegmentRange(1, 2),)),)),
        SegmentRange(4, 6),
    )
