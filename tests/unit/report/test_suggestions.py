"""Suggested lines of code: where a plan's changes can be written, and that the lines are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from steps import are_equal, take_step
from suggested_code import load_net, write_suggestions

import fxmem
from fxmem.graph import Node, SourceLocation
from fxmem.planning.plan import DelPoint, InplaceChange, Plan, Segment
from fxmem.planning.suggestions import Suggestion, suggest_code

CODE = '''"""A model."""

import torch
from torch import nn
from torch.nn import functional as F


class Feed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, 4 * width)
        self.b = nn.Linear(4 * width, width)

    def forward(self, x, scale=1.0):
        y = F.relu(self.a(x))  # größer
        return self.b(torch.sigmoid(y)) * scale


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.feed = Feed(width)

    def forward(self, x):
        y = self.norm(x)
        z = self.feed(y, scale=0.5)
        return x + F.dropout(z, 0.1, self.training)


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.stem = Feed(width)
        self.pair = nn.ModuleList([Feed(width)])
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.tail = nn.Sequential(Feed(width), nn.Tanh(), nn.Linear(width, width), nn.ReLU())
        self.twice = Feed(width)
        self.normed = nn.Sequential(nn.BatchNorm1d(width), nn.GELU())
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        x = self.pair[0](
            x,
        )
        for index, block in enumerate(self.blocks):
            x = block(x)
        x = self.tail(x)
        x = self.twice(self.twice(x))
        return self.head(self.normed(x))
'''
CHECKPOINT = "torch.utils.checkpoint.checkpoint"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(CODE, encoding="utf-8")
    return tmp_path / "net.py"


def analyze(path: Path) -> fxmem.Analysis:
    return fxmem.analyze(f"{path}:Net", ("512x32",), device="cpu")


def make_segment(analysis: fxmem.Analysis, fqn: str, **fields: Any) -> Segment:
    nodes = [n for n in analysis.nodes if f"{n.fqn}.".startswith(f"{fqn}.")]
    return Segment(nodes[0].name, nodes[-1].name, len(nodes), fqn, source=nodes[0].source, **fields)


def make_plan(*segments: Segment, **fields: Any) -> Plan:
    return Plan("0", 2, 1, segments=segments, **fields)


def suggest(analysis: fxmem.Analysis, plan: Plan, path: Path) -> tuple[Suggestion, ...]:
    return suggest_code(plan, analysis.nodes, {str(path): path.read_text(encoding="utf-8")})


def check_results(path: Path, suggestions: tuple[Suggestion, ...]) -> None:
    """Writes suggestions into the file and checks that the model computes the same."""
    x = torch.randn(512, 32, requires_grad=True)
    before = take_step(load_net(path), (x,))
    path.write_text(write_suggestions(path.read_text(encoding="utf-8"), suggestions), "utf-8")
    assert are_equal(before, take_step(load_net(path), (x,)))


def test_calls_of_modules_are_checkpointed(path: Path) -> None:
    before = analyze(path)
    fqns = ["stem", "pair.0", "blocks.0", "blocks.1", "blocks.2", "tail"]
    found = suggest(before, make_plan(*(make_segment(before, fqn) for fqn in fqns)), path)
    assert [*map(str, found)] == [
        f"net.py:43  x = {CHECKPOINT}(self.stem, x, use_reentrant=False)",
        f"net.py:44  x = {CHECKPOINT}(self.pair[0], x, use_reentrant=False)",
        f"net.py:48  x = {CHECKPOINT}(block, x, use_reentrant=False)  # for blocks[0:3]",
        f"net.py:49  x = {CHECKPOINT}(self.tail, x, use_reentrant=False)",
    ]
    check_results(path, found)
    assert analyze(path).saved_bytes < before.saved_bytes / 2


def test_a_segment_within_another_has_a_line_of_its_own(path: Path) -> None:
    analysis = analyze(path)
    feeds = [make_segment(analysis, f"blocks.{i}.feed") for i in (0, 2)]
    blocks = [make_segment(analysis, f"blocks.{i}", children=(f,)) for i, f in enumerate(feeds)]
    found = suggest(analysis, make_plan(*blocks), path)
    assert [(s.line, s.modules) for s in found] == [(27, "blocks[0, 2].feed"), (48, "blocks[0:2]")]
    assert found[0].code == f"z = {CHECKPOINT}(self.feed, y, scale=0.5, use_reentrant=False)"
    check_results(path, found)


def test_segments_without_a_line(path: Path) -> None:
    analysis = analyze(path)
    plan = make_plan(
        make_segment(analysis, "normed", norms=("normed.0",)),  # would update statistics twice
        make_segment(analysis, "twice"),  # two calls
        make_segment(analysis, "tail.0"),  # no code of the user's calls it
        Segment("stem.a", "stem.relu", 2),
    )
    assert suggest(analysis, plan, path) == ()


def test_changes_in_place_and_dels(path: Path) -> None:
    analysis = analyze(path)
    relus = [InplaceChange(n.name, "relu_", n.source) for n in analysis.nodes if n.target == "relu"]
    flag = InplaceChange("tail.3", "ReLU(inplace=True)")
    at = SourceLocation(str(path), 27, "forward")
    dels = tuple(DelPoint(f"blocks.{i}.norm", "y", "z", at) for i in range(3))
    found = suggest(analysis, make_plan(inplace=(*relus, flag), dels=dels), path)
    assert [*map(str, found)] == [
        "the model  model.get_submodule('tail.3').inplace = True",
        "net.py:15  y = self.a(x).relu_()",
        "net.py:27  del y  # after line 27",
    ]
    check_results(path, found[1:])
    assert suggest(analysis, make_plan(inplace=(*relus[1:],)), path) == ()  # stem's is to stay


FUNCTION = """
from torch.nn import functional as F
import torch
from functools import partial

def forward(self, x):
    a = F.relu(x)
{lines}
    return a
"""


@pytest.mark.parametrize(
    ("call", "line", "written"),
    [
        ("relu_", "b = F.relu(x)", "b = x.relu_()"),
        ("relu_", "b = (1 + x).relu()", "b = (1 + x).relu_()"),
        ("relu_", "b = relu(x, inplace=False)", "b = x.relu_()"),
        ("clamp_", "b = torch.clamp(x, min=0)", "b = x.clamp_(min=0)"),
        ("relu_", "b = F.relu(F.relu(x))", ""),
        ("add_", "b = torch.add(x, a)", ""),
        ("F.gelu(inplace=True)", "return F.gelu(x)  # why", "return F.gelu(x, inplace=True)"),
        ("F.dropout(inplace=True)", "b = torch.dropout(x, 0.5, True)", ""),
        ("ReLU(inplace=True)", "b = self.relu(x)", ""),
        ("relu_", "if F.relu(x).sum(): pass", ""),
    ],
)
def test_the_calls_that_are_written_in_place(call: str, line: str, written: str) -> None:
    code = FUNCTION.format(lines=f"    {line}")
    source = SourceLocation("net.py", 8, "forward")
    node = Node(0, "n", "", "call_function", "relu", source=source)
    plan = make_plan(inplace=(InplaceChange("n", call, source),))
    found = suggest_code(plan, [node], {"net.py": code})
    assert [suggestion.code for suggestion in found] == ([written] if written else [])


@pytest.mark.parametrize(
    ("lines", "at", "is_told"),
    [
        (["b = f(x)"], 0, True),
        (["b = f(", "    x)  # why"], 0, True),
        (["c = a; b = f(x)"], 0, False),
        (["if f(x): pass"], 0, False),
        (["if a:", "    f(x)", "else:", "    g(x)"], 1, True),
    ],
)
def test_where_a_variable_can_be_deleted(lines: list[str], at: int, is_told: bool) -> None:
    code = FUNCTION.format(lines="\n".join(f"    {line}" for line in lines))
    point = DelPoint("n", "x", "n", SourceLocation("net.py", 8 + at, "forward"))
    found = suggest_code(make_plan(dels=(point,)), [], {"net.py": code})
    assert [suggestion.code for suggestion in found] == ["del x"] * is_told
    if is_told:
        compile(write_suggestions(code, found), "net.py", "exec")


def test_code_that_cannot_be_read_has_no_suggestion() -> None:
    source = SourceLocation("elsewhere.py", 3, "forward")
    plan = make_plan(
        inplace=(InplaceChange("n", "relu_", source),),
        dels=(DelPoint("n", "x", "n", source), DelPoint("n", "", "n", None)),
    )
    node = Node(0, "n", "", "call_function", "relu", source=source)
    assert suggest_code(plan, [node], {"broken.py": "def"}) == ()
