"""Plans written into code: the diff is applied, and the model computes the same in less memory."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.applying.patching import Patches, patch_sources
from fxmem.graph import SourceLocation
from fxmem.planning.plan import DelPoint, InplaceChange, Plan, Segment
from fxmem.report.diff import render_diff

CODE = '''"""A model."""

from __future__ import annotations

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
        self.pair = nn.ModuleList([Feed(width), Feed(width)])
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.tail = nn.Sequential(Feed(width), nn.Tanh())
        self.twice = Feed(width)
        self.normed = nn.Sequential(nn.BatchNorm1d(width), nn.GELU())
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        x = self.pair[1](self.pair[0](
            x,
        ))
        for index, block in enumerate(self.blocks):
            x = block(x)
        x = self.tail(x)
        x = self.twice(self.twice(x))
        return self.head(self.normed(x))
'''
INPUT = "512x32"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(path: Path) -> nn.Module:
    spec = importlib.util.spec_from_file_location(f"net_{id(path)}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.Net()


def analyze(path: Path) -> fxmem.Analysis:
    return fxmem.analyze(f"{path}:Net", (INPUT,), device="cpu")


def make_segment(analysis: fxmem.Analysis, fqn: str, **fields: Any) -> Segment:
    nodes = [n for n in analysis.nodes if f"{n.fqn}.".startswith(f"{fqn}.")]
    return Segment(nodes[0].name, nodes[-1].name, len(nodes), fqn, source=nodes[0].source, **fields)


def make_plan(*segments: Segment, **fields: Any) -> Plan:
    return Plan("0", 2, 1, segments=segments, **fields)


def patch(analysis: fxmem.Analysis, plan: Plan, path: Path) -> Patches:
    return patch_sources(plan, analysis.nodes, {str(path): path.read_text(encoding="utf-8")})


def apply_diff(patches: Patches, folder: Path, command: Sequence[str]) -> None:
    (file,) = patches.files
    diff = render_diff([("net.py", file.before, file.after)], ["a comment", *patches.left_out])
    (folder / "plan.diff").write_text(diff, encoding="utf-8")
    done = subprocess.run([*command, "plan.diff"], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "net.py").read_text(encoding="utf-8") == file.after


def run(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(512, 32, requires_grad=True)
    output = model(x)
    output.sum().backward()
    return [output, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("command", [["git", "apply"], ["patch", "-p1", "--input"]])
def test_calls_of_modules_are_checkpointed(folder: Path, command: list[str]) -> None:
    before = analyze(folder / "net.py")
    fqns = ["stem", "pair.0", "pair.1", *(f"blocks.{i}" for i in range(3)), "tail"]
    plan = make_plan(*(make_segment(before, fqn) for fqn in fqns))
    patches = patch(before, plan, folder / "net.py")
    assert patches.left_out == ()
    results = run(load(folder / "net.py"))
    apply_diff(patches, folder, command)
    code = (folder / "net.py").read_text(encoding="utf-8")
    assert "import checkpoint\n" in code
    assert "        x = checkpoint(self.stem, x, use_reentrant=False)\n" in code
    assert "            x = checkpoint(block, x, use_reentrant=False)\n" in code
    again = run(load(folder / "net.py"))
    assert all(a.equal(b) for a, b in zip(results, again, strict=True))
    assert analyze(folder / "net.py").saved_bytes < before.saved_bytes / 2


@pytest.mark.parametrize(
    ("fqns", "left_out"),
    [
        (["blocks.0"], "compute blocks.0 again (net.py:28): the same line calls blocks.1, which"),
        (["blocks.0.feed"], "compute blocks.0.feed again (net.py:17): the same line calls blocks."),
        (["twice"], "compute twice again (net.py:17): its call was not found, or more than one"),
        (["tail.0"], "compute tail.0 again (net.py:17): its call was not found, or more than one"),
    ],
)
def test_what_is_not_one_call_of_its_own_is_left_out(
    folder: Path, fqns: list[str], left_out: str
) -> None:
    analysis = analyze(folder / "net.py")
    plan = make_plan(*(make_segment(analysis, fqn) for fqn in fqns))
    patches = patch(analysis, plan, folder / "net.py")
    assert patches.files == ()
    assert patches.left_out[0].startswith(left_out)


def test_a_line_that_all_blocks_share_is_written_for_all(folder: Path) -> None:
    analysis = analyze(folder / "net.py")
    plan = make_plan(*(make_segment(analysis, f"blocks.{i}.feed") for i in range(3)))
    results = run(load(folder / "net.py"))
    patches = patch(analysis, plan, folder / "net.py")
    assert patches.left_out == ()
    apply_diff(patches, folder, ["git", "apply"])
    code = (folder / "net.py").read_text(encoding="utf-8")
    assert "z = checkpoint(self.feed, y, scale=0.5, use_reentrant=False)\n" in code
    again = run(load(folder / "net.py"))
    assert all(a.equal(b) for a, b in zip(results, again, strict=True))


def test_what_torchs_checkpoint_would_get_wrong_is_left_out(folder: Path) -> None:
    analysis = analyze(folder / "net.py")
    plan = make_plan(
        make_segment(analysis, "normed", norms=("normed.0",)),
        Segment("stem.a", "stem.relu", 2),
    )
    assert patch(analysis, plan, folder / "net.py").left_out == (
        f"compute normed again ({analysis.nodes[-3].source}): its batch normalisations would "
        "update their statistics twice",
        "compute stem.a .. stem.relu again: it is not the call of one module",
    )


def test_a_segment_within_another_is_written_with_it(folder: Path) -> None:
    analysis = analyze(folder / "net.py")
    feeds = [make_segment(analysis, f"blocks.{i}.feed") for i in range(3)]
    blocks = [make_segment(analysis, f"blocks.{i}", children=(feeds[i],)) for i in range(3)]
    patches = patch(analysis, make_plan(*blocks), folder / "net.py")
    assert patches.left_out == ()
    assert patches.files[0].after.count("checkpoint(") == 2
    patches = patch(analysis, make_plan(*blocks[:1]), folder / "net.py")
    assert (patches.files, len(patches.left_out)) == ((), 2)
    without = Segment("stem.a", "stem.b", 2, children=(make_segment(analysis, "stem"),))
    assert (
        patch(analysis, make_plan(without), folder / "net.py")
        .left_out[1]
        .endswith(": what it lies in is left out")
    )


def test_changes_in_place_and_dels(folder: Path) -> None:
    analysis = analyze(folder / "net.py")
    path = str(folder / "net.py")
    relus = [n for n in analysis.nodes if n.target == "relu"]
    norms = [n for n in analysis.nodes if n.target == "LayerNorm"]
    changes = [InplaceChange(n.name, "relu_", n.source) for n in relus]
    at = SourceLocation(path, 29, "forward")
    dels = [DelPoint(n.name, "y", "z", at) for n in norms]
    results = run(load(folder / "net.py"))
    plan = make_plan(inplace=tuple(changes), dels=tuple(dels))
    patches = patch(analysis, plan, folder / "net.py")
    assert patches.left_out == ()
    apply_diff(patches, folder, ["git", "apply"])
    code = (folder / "net.py").read_text(encoding="utf-8")
    assert "        y = F.relu_(self.a(x))  # größer\n" in code
    assert "scale=0.5)\n        del y\n        return" in code
    assert code.count("del y") == 1
    again = run(load(folder / "net.py"))
    assert all(a.equal(b) for a, b in zip(results, again, strict=True))
    some = patch(analysis, make_plan(inplace=tuple(changes[1:])), folder / "net.py")
    assert some.left_out[0] == (
        "compute pair.0.relu by relu_ (net.py:17): the same line computes stem.relu, which is to "
        "stay"
    )


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
        ("relu_", "b = F.relu(x)", "b = F.relu_(x)"),
        ("relu_", "b = (1 + x).relu()", "b = (1 + x).relu_()"),
        ("abs_", "b = torch.abs(x)", "b = torch.abs_(x)"),
        ("sigmoid_", "b = F.sigmoid(x)", ""),  # there is no F.sigmoid_
        ("relu_", "b = F.relu(F.relu(x))", ""),
        ("relu_", "b = F.relu(x, inplace=False)", ""),
        ("relu_", "b = relu(x)", ""),
        ("add_", "b = torch.add(x, a)", ""),
        ("F.gelu(inplace=True)", "b = F.gelu(x)  # why", "b = F.gelu(x, inplace=True)  # why"),
        ("F.gelu(inplace=True)", "b = F.gelu(x, inplace=False)", ""),
        ("F.gelu(inplace=True)", "b = F.gelu((x))", ""),
        ("ReLU(inplace=True)", "b = self.relu(x)", ""),
        ("torch.tanh_", "b = self.tanh(x)", ""),
    ],
)
def test_the_calls_that_are_written_in_place(call: str, line: str, written: str) -> None:
    code = FUNCTION.format(lines=f"    {line}")
    source = SourceLocation("net.py", 8, "forward")
    node = fxmem.graph.Node(0, "n", "", "call_function", "relu", source=source)
    plan = make_plan(inplace=(InplaceChange("n", call, source),))
    patches = patch_sources(plan, [node], {"net.py": code})
    assert [file.after for file in patches.files] == (
        [FUNCTION.format(lines=f"    {written}")] if written else []
    )
    assert len(patches.left_out) == (not written)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["b = f(x)"], ""),
        (["b = f(", "    x)  # why"], ""),
        (["b = f(x)", "x = a"], ""),
        (["b = f(x)", "x = x + 1"], "its variable is used again"),
        (["b = f(x)", "x += 1"], "its variable is used again"),
        (["b = f(x)", "if a:", "    x = 1", "f(x)"], "its variable is used again"),
        (["x = f(x)"], "its variable is used again"),
        (["b = f(x); c = a"], "nothing can follow its line"),
        (["c = a; b = f(x)"], "nothing can follow its line"),
        (["if f(x): pass"], "nothing can follow its line"),
        (["return f(x)"], "nothing can follow its line"),
        (["b = partial(lambda: x)"], "its variable is used again"),
        (["b = f(x)", "def g():", "    return x"], "its variable is used again"),
    ],
)
def test_where_a_variable_can_be_deleted(lines: list[str], reason: str) -> None:
    check_del(lines, 0, reason)


@pytest.mark.parametrize(
    ("lines", "at", "reason"),
    [
        (["for i in a:", "    f(x)"], 1, "its variable is used again"),
        (["for i in a:", "    x = i", "    f(x)"], 2, ""),
        (
            ["for i in a:", "    if i:", "        x = i", "    f(x)"],
            3,
            "its variable is used again",
        ),
        (["for i in a:", "    f(x)", "    x = i", "    f(x)"], 3, "its variable is used again"),
        (["for i in a:", "    x = i", "    f(x)", "f(x)"], 2, "its variable is used again"),
        (["while g(x):", "    x = a", "    f(x)"], 2, "its variable is used again"),
        (["if a:", "    f(x)", "else:", "    g(x)"], 1, ""),
        (["try:", "    f(x)", "finally:", "    g(x)"], 1, "its variable is used again"),
    ],
)
def test_where_a_variable_can_be_deleted_in_a_block(lines: list[str], at: int, reason: str) -> None:
    check_del(lines, at, reason)


def check_del(lines: list[str], at: int, reason: str) -> None:
    code = FUNCTION.format(lines="\n".join(f"    {line}" for line in lines))
    point = DelPoint("n", "x", "n", SourceLocation("net.py", 8 + at, "forward"))
    patches = patch_sources(make_plan(dels=(point,)), [], {"net.py": code})
    if reason:
        assert patches.left_out == (f"del x (net.py:{8 + at}): {reason}",)
        assert patches.files == ()
    else:
        (file,) = patches.files
        new = [line for line in file.after.split("\n") if line not in code.split("\n")]
        assert [line.strip() for line in new] == ["del x"]


def test_what_has_no_code_here_is_left_out() -> None:
    source = SourceLocation("elsewhere.py", 3, "forward")
    node = fxmem.graph.Node(0, "n", "", "call_function", "relu", source=source)
    plan = make_plan(
        inplace=(InplaceChange("n", "relu_", source),),
        dels=(DelPoint("n", "x", "n", source), DelPoint("n", "", "n", source)),
    )
    assert patch_sources(plan, [node], {"broken.py": "def"}).left_out == (
        "compute n by relu_ (elsewhere.py:3): it has no line in this folder",
        "del x (elsewhere.py:3): it has no line in this folder",
        "del n (elsewhere.py:3): no variable of its own holds it",
    )


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ("self.m(x, *more, k=1)", "checkpoint(self.m, x, *more, k=1, use_reentrant=False)"),
        ("self.m( x , )", "checkpoint(self.m, x, use_reentrant=False , )"),
        ("self.m()", "checkpoint(self.m, use_reentrant=False)"),
        ("self.m(debug=x)", ""),
        ("self.m(**x)", ""),
        ("self.m((x))", ""),
        ("self.m(i for i in x)", ""),
        ("(self.m)(x)", ""),
    ],
)
def test_how_a_call_is_wrapped(call: str, written: str) -> None:
    code = (
        "from torch.utils.checkpoint import checkpoint\n"
        f"class Net:\n    def forward(self, x):\n        return {call} * 2\n"
    )
    source = SourceLocation("net.py", 4, "forward")
    node = fxmem.graph.Node(0, "m", "m", "call_module", "Linear", source=source)
    plan = make_plan(Segment("m", "m", 1, "m"))
    patches = patch_sources(plan, [node], {"net.py": code})
    if written:
        assert patches.files[0].after == code.replace(call, written)
    else:
        assert patches.left_out == ("compute m again: its call is written in an unusual way",)


@pytest.mark.parametrize(
    ("top", "imported"),
    [
        ("import torch", "import torch\nfrom torch.utils.checkpoint import checkpoint\n"),
        (
            "import torch\ncheckpoint = 'net.pt'",
            "import torch\nfrom torch.utils.checkpoint import checkpoint as torch_checkpoint\n",
        ),
        ('"""Text."""\n', '"""Text."""\n\nfrom torch.utils.checkpoint import checkpoint\n'),
        ("import torch; import os\r\n", "from torch.utils.checkpoint import checkpoint\n\nimport"),
    ],
)
def test_checkpoint_is_imported(top: str, imported: str) -> None:
    code = f"{top}\nclass Net:\n    def forward(self, x):\n        return self.m(x)\n"
    line = code.split("\n").index("        return self.m(x)") + 1
    source = SourceLocation("net.py", line, "forward")
    node = fxmem.graph.Node(0, "m", "m", "call_module", "Linear", source=source)
    patches = patch_sources(make_plan(Segment("m", "m", 1, "m")), [node], {"net.py": code})
    assert patches.files[0].after.startswith(imported)


def test_a_file_that_would_be_no_python_stays_as_it_was() -> None:
    code = (
        "from __future__ import annotations; import torch\n"
        "class Net:\n    def forward(self, x):\n        return self.m(x)\n"
    )
    source = SourceLocation("net.py", 4, "forward")
    node = fxmem.graph.Node(0, "m", "m", "call_module", "Linear", source=source)
    patches = patch_sources(make_plan(Segment("m", "m", 1, "m")), [node], {"net.py": code})
    assert patches == Patches((), ("all of net.py: its code is written in an unusual way",))


def test_a_file_without_a_newline_at_its_end_and_with_others(tmp_path: Path) -> None:
    before = "import torch\r\n\ndef forward(x):\r\n    y = f(x)\r\n    g(y)\r\n    return 1\x0c"
    point = DelPoint("n", "y", "n", SourceLocation("net.py", 5, "forward"))
    patches = patch_sources(make_plan(dels=(point,)), [], {"net.py": before})
    (file,) = patches.files
    (tmp_path / "net.py").write_bytes(before.encode())
    diff = render_diff([("net.py", file.before, file.after)])
    (tmp_path / "plan.diff").write_bytes(diff.encode())
    subprocess.run(["git", "apply", "plan.diff"], cwd=tmp_path, check=True)
    assert (tmp_path / "net.py").read_bytes() == file.after.encode()
    assert file.after.endswith("    g(y)\r\n    del y\r\n    return 1\x0c")
