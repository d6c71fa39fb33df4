"""Values that the user's code holds too long, and the effect of a ``del`` in real steps."""

from __future__ import annotations

import pytest
import torch
from deletion_nets import INPUT, PAIRS
from torch import Tensor, nn

from benchmarks.cases import Case
from benchmarks.measure import measure_allocator
from benchmarks.step import Mode
from fxmem.api import analyze
from fxmem.graph import SourceLocation
from fxmem.memory.timeline import build_timeline
from fxmem.planning.dels.deletion import apply_deletions, find_deletions
from fxmem.planning.dels.variables import find_last_read
from fxmem.planning.model.index import build_index
from fxmem.planning.plan import DelPoint

TWINS = [(name, mode) for name, pair in PAIRS.items() for mode in pair[-1]]


@pytest.mark.parametrize(("name", "mode"), TWINS)
def test_the_peak_falls_by_what_is_said(name: str, mode: Mode) -> None:
    build, build_changed, value, variable, _ = PAIRS[name]
    case, changed = Case(name, build, INPUT), Case(name, build_changed, INPUT)
    analysis = analyze(case.model(), case.inputs()[0], device="cpu", mode=mode)
    first = find_deletions(build_index(analysis.graph))[0]
    assert (first.value, first.variable) == (value, variable)
    before = measure_allocator(case, mode)["peak_bytes"]
    after = measure_allocator(changed, mode)["peak_bytes"]
    assert before - after > before / 20
    assert first.saving_bytes == pytest.approx(before - after, abs=before / 100)
    # And the whole step becomes that of the module that is written that way.
    written = analyze(changed.model(), changed.inputs()[0], device="cpu", mode=mode)
    applied = build_timeline(apply_deletions(analysis.graph, [first])).profile()
    assert applied == written.timeline.profile()


class Net(nn.Module):
    """Where a linear layer's result, four times as wide, is needed only for its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 512, bias=False)
        self.drop = nn.Dropout()
        self.kept: list[Tensor] = []

    def finish(self, y: Tensor) -> Tensor:
        return y.repeat(1, 400).cos().sum()


def find(model: nn.Module, mode: str = "infer") -> dict[str, DelPoint]:
    analysis = analyze(model, torch.zeros(32, 8), device="cpu", mode=mode)
    return {point.value: point for point in find_deletions(build_index(analysis.graph))}


class Plain(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.wide(x)
        y = h.mean(1, keepdim=True)
        return self.finish(y)


def test_the_point_is_named() -> None:
    point = find(Plain())["wide"]
    assert (point.variable, point.after) == ("h", "mean")
    assert point.saving_bytes == 32 * 512 * 4
    assert point.source is not None
    assert point.source.file == __file__
    assert point.source.function == "forward"
    assert point.source.line == Plain.forward.__code__.co_firstlineno + 2


class Returned(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.wide(x).detach()
        y = x.mean(1, keepdim=True).requires_grad_()
        return self.finish(y), h


class Viewed(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.wide(x)
        g = h.view(-1, 4)
        g.abs_()
        y = h.mean(1, keepdim=True)
        return self.finish(y)


class Passed(Net):
    """It is read last by a function that is given it."""

    def pool(self, h: Tensor) -> Tensor:
        return h.mean(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.wide(x)
        y = self.pool(h)
        return self.finish(y)


class Both(Net):
    """An inner function returned it, beside what it computed of it."""

    def make(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.wide(x)
        return h.mean(1, keepdim=True), h

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.make(x)
        assert h is not None
        return self.finish(y)


class Skipped(Net):
    """Dropout returns its input where it does nothing."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.wide(x)
        g = self.drop(h)
        y = h.mean(1, keepdim=True)
        assert g is not None
        return self.finish(y)


class Argument(Net):
    """The caller holds what it passes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.wide(x))

    def use(self, h: Tensor) -> Tensor:
        y = h.mean(1, keepdim=True)
        return self.finish(y)


@pytest.mark.parametrize("kind", [Viewed, Passed, Both, Skipped, Argument])
def test_no_variable_is_named_where_del_would_not_do(kind: type[Net]) -> None:
    point = find(kind().eval())["wide"]
    assert point.variable == ""
    assert point.after.startswith("mean")
    assert point.saving_bytes >= 32 * 512 * 2


def test_an_output_that_nothing_reads_is_listed_in_training() -> None:
    point = find(Returned(), "train")["wide"]
    assert (point.variable, point.after) == ("", "detach")
    assert point.saving_bytes == 32 * 512 * 4
    assert "wide" not in find(Returned())  # what inference returns is its result


class Saved(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.wide(x)
        y = h.square().mean(1, keepdim=True)
        return self.finish(y)


class DeadEnd(Net):
    """Autograd holds it for a value that backward does not come through."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.wide(x)
        y = h.mean(1, keepdim=True)
        g = h.sin().mean()
        assert g is not None
        return self.finish(y)


@pytest.mark.parametrize("kind", [Saved, DeadEnd])
def test_nothing_is_proposed_where_autograd_holds_it(kind: type[Net]) -> None:
    assert find(kind())["wide"].variable == "h"
    assert "wide" not in find(kind(), "train")


def test_code_that_cannot_be_read_has_no_variables() -> None:
    assert find_last_read(SourceLocation("/nowhere/net.py", 3, "forward")) is None
    scope: dict[str, object] = {"Net": Net}
    code = (
        "class Made(Net):\n def forward(self, x):\n  h = self.wide(x)\n  y = h.mean(1)[:, None]\n"
    )
    exec(compile(code + "  return self.finish(y)\n", "/nowhere/made.py", "exec"), scope)
    assert find(scope["Made"]())["wide"].variable == ""  # type: ignore[operator]
