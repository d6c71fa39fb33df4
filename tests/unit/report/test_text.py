from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from hand_made import add_first_step, make_analysis, make_graph

from fxmem.analysis import Analysis
from fxmem.graph import Phase, SourceLocation
from fxmem.report.tables import measure_width

EVIL = "fc\x1b[2J\n1"


def render(analysis: Analysis, **options: Any) -> str:
    return analysis.to_text(**options)


def move_peak(phase: Phase, node: int | None, reads: tuple[int, ...] = ()) -> Analysis:
    graph = make_graph()
    operations = list(graph.operations)
    operations[5] = dataclasses.replace(operations[5], phase=phase, node=node, reads=reads)
    return make_analysis(dataclasses.replace(graph, operations=tuple(operations)))


def test_the_report_of_an_inference(check_golden: Callable[[str, str], None]) -> None:
    analysis = make_analysis(
        mode="infer",
        optimizer=None,
        frontend="record",
        frontend_reason="len() of a proxy, net.py:12",
    )
    check_golden("hand_made_infer.txt", render(analysis, top=3, width=100))


STEP = "the optimizer step of adam"


@pytest.mark.parametrize(
    ("phase", "node", "reads", "place"),
    [
        (Phase.FORWARD, 1, (), "forward of fc1, net.py:11"),
        (Phase.FORWARD, None, (), "forward"),
        (Phase.LOSS, 4, (), "loss of loss.sum, net.py:14"),
        (Phase.OPTIMIZER, None, (), STEP),
        (Phase.OPTIMIZER, None, (0,), f"{STEP}, updating fc1.weight"),
        (Phase.OPTIMIZER, None, (0, 1, 3), f"{STEP}, updating 2 parameters together"),
    ],
)
def test_the_first_line_is_the_answer(
    phase: Phase, node: int | None, reads: tuple[int, ...], place: str
) -> None:
    line = render(move_peak(phase, node, reads)).splitlines()[0]
    assert line == f"Peak 30.00 MiB in {place}"


@pytest.mark.parametrize(
    ("top", "line"),
    [(0, "... and 11 more, 30.00 MiB"), (9, "... and 2 more, 1.00 MiB"), (11, None), (99, None)],
)
def test_storages_that_are_not_listed_are_summed(top: int, line: str | None) -> None:
    rest = [text for text in render(make_analysis(), top=top).splitlines() if "more," in text]
    assert rest == ([line] if line else [])


def test_names_cannot_drive_the_terminal_or_forge_a_line() -> None:
    graph = make_graph()
    graph = dataclasses.replace(
        graph,
        nodes=tuple(
            dataclasses.replace(n, name=EVIL, target=EVIL, source=SourceLocation(EVIL, 1))
            for n in graph.nodes
        ),
        storages=tuple(dataclasses.replace(s, name=EVIL, dtype=EVIL) for s in graph.storages),
    )
    text = render(
        make_analysis(graph, model=EVIL, inputs=(EVIL,), loss=EVIL, frontend_reason=EVIL),
        nodes=True,
    )
    assert all(line.isprintable() for line in text.splitlines())
    tame = render(make_analysis(loss="mse", frontend_reason="a cache"), nodes=True)
    assert len(text.splitlines()) == len(tame.splitlines())


def lengthen_names() -> Analysis:
    graph = make_graph()
    long = "encoder.layers.11.attention.self.attention."
    source = SourceLocation("/home/me/nets/modeling_transformer.py", 1234)
    return make_analysis(
        dataclasses.replace(
            graph,
            nodes=tuple(
                dataclasses.replace(n, name=f"{long}{n.name}", source=source) for n in graph.nodes
            ),
            storages=tuple(
                dataclasses.replace(s, name=f"{long}{s.name}", shape=(8, 64, 112, 112))
                for s in graph.storages
            ),
        )
    )


@pytest.mark.parametrize(
    ("width", "live", "nodes"),
    [
        (None, "shape dtype saved by source", "target shape dtype output saved"),
        (107, "shape dtype source", "target shape output saved"),
        (80, "source", "output saved"),
    ],
)
def test_the_fewer_columns_the_less_is_shown(width: int | None, live: str, nodes: str) -> None:
    text = render(lengthen_names(), nodes=True, width=width)
    assert width is None or max(map(measure_width, text.splitlines()[1:])) <= width
    for name in ("exp_avg_sq", "weight.grad", "fc1.weight", "lock.relu"):
        assert re.search(rf"  enc\S*{name}(  |$)", text, re.MULTILINE)
    for first, headers in ("bytes", f"bytes category alive at the peak {live}"), ("node", nodes):
        (line,) = (line for line in text.splitlines() if line.split()[:1] == [first])
        assert " ".join(line.split()).startswith(headers if first == "bytes" else f"node {nodes}")


@pytest.mark.parametrize(
    ("state_mib", "line"),
    [
        (1, "lower: 19.00 MiB in forward of block.relu, net.py:12"),
        (30, "higher: 43.00 MiB in the optimizer step of adam"),
        (17, None),
    ],
)
def test_a_first_step_that_peaks_otherwise_is_told(state_mib: int, line: str | None) -> None:
    lines = render(make_analysis(add_first_step(make_graph(), state_mib))).splitlines()
    told = f"The first step peaks {line}; all other figures are the second step's"
    assert lines[2] == ("" if line is None else told)
