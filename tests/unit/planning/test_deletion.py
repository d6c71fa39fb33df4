"""Values that the user's code holds too long, and the step without them."""

from __future__ import annotations

import inspect
import linecache
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from running import Runs
from torch import Tensor, nn

from fxmem import analyze
from fxmem.graph import SourceLocation
from fxmem.memory.timeline import build_timeline
from fxmem.planning.deletion import apply_deletions, find_deletions, find_last_read
from fxmem.planning.model.index import build_index
from fxmem.planning.plan import DelPoint

Run = Callable[[Any, Tensor], object]


class Wide(nn.Module):
    """Makes its input wide and narrow again, in a frame of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 512, bias=False)
        self.down = nn.Linear(512, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def hold_in_rounds(net: Any, x: Tensor) -> Any:
    """Each round holds the value of the one before until it makes its own."""
    for _ in range(3):
        hidden = net.first(x) + 1.0
        y = hidden.view(-1, 24, 64).amax(1)
        x = torch.cat([y] * 48).cos()[: len(x)]
    return net.wide(x)


def add_del(run: Run) -> Run:
    """Writes ``del hidden`` after the line that reads it last."""
    lines = inspect.getsource(run).splitlines()
    at = max(index for index, line in enumerate(lines) if "= hidden.view" in line)
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    names: dict[str, Run] = {}
    exec("\n".join([*lines[: at + 1], f"{indent}del hidden", *lines[at + 1 :]]), globals(), names)
    return names[run.__name__]


def test_a_loop_becomes_that_of_the_module_with_a_del() -> None:
    first_layer, x = nn.Linear(64, 1536, bias=False), torch.zeros(256, 64)
    analysis, written = (
        analyze(Runs(each, first=first_layer, wide=Wide()), x, device="cpu", mode="infer")
        for each in (hold_in_rounds, add_del(hold_in_rounds))
    )
    first = find_deletions(build_index(analysis.graph))[0]
    assert (first.value, first.variable) == ("add", "hidden")
    assert first.saving_bytes == analysis.peak_bytes - written.peak_bytes > 0
    applied = build_timeline(apply_deletions(analysis.graph, [first])).profile()
    assert applied == written.timeline.profile()


def finish(y: Tensor) -> Tensor:
    return y.repeat(1, 400).cos().sum()


def pool(h: Tensor) -> Tensor:
    return h.mean(1, keepdim=True)


def find(run: Run, mode: str = "infer") -> dict[str, DelPoint]:
    """Finds points where a linear layer's result, much wider, is needed for a while."""
    net = Runs(run, wide=nn.Linear(8, 512, bias=False), drop=nn.Dropout())
    analysis = analyze(net.eval(), torch.zeros(32, 8), device="cpu", mode=mode)
    return {point.value: point for point in find_deletions(build_index(analysis.graph))}


def run_plain(net: Any, x: Tensor) -> Tensor:
    h = net.wide(x)
    y = h.mean(1, keepdim=True)
    return finish(y)


def test_the_point_is_named() -> None:
    point = find(run_plain)["wide"]
    assert (point.variable, point.after) == ("h", "mean")
    assert point.saving_bytes == 32 * 512 * 4
    line = run_plain.__code__.co_firstlineno + 2
    assert point.source == SourceLocation(__file__, line, "run_plain")


def hold_a_view(net: Any, x: Tensor) -> Tensor:
    h = net.wide(x)
    g = h.view(-1, 4)
    g.abs_()
    y = h.mean(1, keepdim=True)
    return finish(y)


def pass_it_on(net: Any, x: Tensor) -> Tensor:
    """A function that is given it reads it last."""
    h = net.wide(x)
    y = pool(h)
    return finish(y)


def make_both(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = net.wide(x)
    return h.mean(1, keepdim=True), h


def hold_what_was_returned(net: Any, x: Tensor) -> Tensor:
    y, h = make_both(net, x)
    assert h is not None
    return finish(y)


def hold_what_dropout_returns(net: Any, x: Tensor) -> Tensor:
    h = net.wide(x)
    g = net.drop(h)  # which is its input, where it does nothing
    y = h.mean(1, keepdim=True)
    assert g is not None
    return finish(y)


def hold_an_argument(net: Any, x: Tensor) -> Tensor:
    def use(h: Tensor) -> Tensor:
        y = h.mean(1, keepdim=True)
        return finish(y)

    return use(net.wide(x))


@pytest.mark.parametrize(
    "run",
    [
        hold_a_view,
        pass_it_on,
        hold_what_was_returned,
        hold_what_dropout_returns,
        hold_an_argument,
    ],
)
def test_no_variable_is_named_where_del_would_not_do(run: Any) -> None:
    point = find(run)["wide"]
    assert point.variable == ""
    assert point.after.startswith("mean")
    assert point.saving_bytes >= 32 * 512 * 2


def test_an_output_that_nothing_reads_is_listed_in_training() -> None:
    def run(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = net.wide(x).detach()
        y = x.mean(1, keepdim=True).requires_grad_()
        return finish(y), h

    point = find(run, "train")["wide"]
    assert (point.variable, point.after) == ("", "detach")
    assert point.saving_bytes == 32 * 512 * 4
    assert "wide" not in find(run)  # what inference returns is its result


def save(net: Any, x: Tensor) -> Tensor:
    h = net.wide(x)
    y = h.square().mean(1, keepdim=True)
    return finish(y)


def come_to_nothing(net: Any, x: Tensor) -> Tensor:
    """Autograd holds it for a value that backward does not come through."""
    h = net.wide(x)
    y = h.mean(1, keepdim=True)
    g = h.sin().mean()
    assert g is not None
    return finish(y)


@pytest.mark.parametrize("run", [save, come_to_nothing])
def test_nothing_is_proposed_where_autograd_holds_it(run: Any) -> None:
    assert find(run)["wide"].variable == "h"
    assert "wide" not in find(run, "train")


def test_code_that_cannot_be_read_has_no_variables() -> None:
    assert find_last_read(SourceLocation("/nowhere/net.py", 3, "forward")) is None


def find_line(code: str) -> int | None:
    """Finds the last line that reads what the first one assigns to ``h``, counted from that one."""
    text = "def forward(self, x):\n" + "".join(f"    {line}\n" for line in code.split("\n"))
    file = f"written_{zlib.crc32(text.encode())}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    line = next(
        i for i, t in enumerate(text.splitlines(), 1) if t.strip().startswith(("h = ", "h, "))
    )
    found = find_last_read(SourceLocation(file, line, "forward"))
    return None if found is None else (found.code.end_lineno or 0) - line


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("h = f(x)\ny = g(h)\nreturn y", 1),
        ("h = f(x)\ny = g(\n  h,\n)\nreturn y", 3),
        ("h = f(x)\ny = torch.cat([h, x])\nreturn y", 1),
        ("h = f(x)\nreturn x", 0),  # nothing reads it
        ("h = f(x)\ny = g(h)\nh = f(y)\nreturn h", 1),  # another value of that name
        ("for m in ms:\n  h = f(x)\n  x = g(h)\nreturn x", 1),
        ("with torch.no_grad():\n  h = f(x)\n  x = g(h)\nreturn x", 1),
        ("if h is None:\n  h = f(x)\nx = g(h)\nreturn x", 1),
        *(
            (code, None)  # where del would not do
            for code in (
                "h = f(x)\nh = g(h)\nreturn h",
                "h = f(x)\nreturn g(h)",
                "h = f(x)\ny = g(h)\ndel h\nreturn y",
                "h = f(x); y = g(h)\nreturn y",
                "h = f(x)\nfor m in ms:\n  x = m(h)\nreturn x",  # each round reads it
                "for m in ms:\n  x = g(h)\n  h = f(x)\nreturn x",  # the next round reads it
                "h = f(x)\nif h.any():\n  x = x + 1\nreturn x",
                "h = f(x)\nself.kept = h\nreturn x",
                "h = f(x)\ng = h\nreturn g(x)",
                "h = f(x)\nfound.append(h)\nreturn x",
                "h = f(x)\ny = (lambda: g(h))()\nreturn y",
                "h, y = f(x), x\ny = g(h)\nreturn y",
                "for m in ms:\n  h = f(x)\nx = g(h)\nreturn x",
                "h = f(x)\nkept = {'h': h}\nreturn x",
                "h = f(x)\nkept = x if x else h\nreturn x",
                "h = f(x)\nkept += [h]\nreturn x",
                "h = f(x)\ncache.update(h)\nreturn x",
                "h = f(x)\nout = Output(hidden=h)\nreturn x",
                "h = f(x)\ny = [g(h) for _ in x]\nreturn x",
                "global h\nh = f(x)\ny = g(h)\nreturn x",
                "h = k = f(x)\ny = g(h)\nreturn x",
                "try:\n  h = f(x)\n  x = g(h)\nfinally:\n  print(h)\nreturn x",
            )
        ),
    ],
)
def test_the_last_line_that_reads(code: str, last: int | None) -> None:
    assert find_line(code) == last
