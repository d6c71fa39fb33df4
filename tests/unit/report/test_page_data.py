"""The data of the page, against the step that hand_made draws up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hand_made import MIB, make_analysis, make_graph, memory_graphs
from hand_made_plans import make_front, make_plan
from hypothesis import given
from pictures import make_row

from fxmem.analysis import Analysis
from fxmem.graph import MemoryGraph
from fxmem.memory.module_tree import Module
from fxmem.planning.outcome import PlannedStep
from fxmem.report.document import build_document
from fxmem.report.html import NONE, ModuleRow, build_page_data, list_rows


def build(analysis: Analysis | None = None, **more: Any) -> dict[str, Any]:
    analysis = analysis or make_analysis()
    return build_page_data(analysis, build_document(analysis), **more)


def read(data: dict[str, Any], kind: str, field: str) -> list[str]:
    texts = data["texts"]
    return [texts[index] if index != NONE else "" for index in data[kind][field]]


def test_storages_have_their_lives() -> None:
    data = build()
    storages = data["storages"]
    relu = 7  # made by operation 2, last read by its own backward, freed after that of fc1
    assert read(data, "storages", "label")[relu] == "block.relu"
    fields = ("bytes", "born", "died", "saved")
    assert [storages[field][relu] for field in fields] == [4 * MIB, 2, 6, [2, 3]]
    assert data["categories"][storages["category"][relu]] == "ACTIVATION"
    assert [storages["used"][index] for index in (relu, 4, 13)] == [5, 1, NONE]
    assert storages["born"][0] == NONE  # a parameter was there before
    assert storages["died"][0] == NONE  # and is there afterwards


def test_each_text_is_there_once_and_is_printable() -> None:
    graph = make_graph()
    storage = replace(graph.storages[0], name="a\u202eb\x1b\u2028")
    data = build(make_analysis(replace(graph, storages=(storage, *graph.storages[1:]))))
    assert len(set(data["texts"])) == len(data["texts"])
    assert r"a\u202eb\x1b\u2028" in data["texts"]
    assert all(text.isprintable() for text in data["texts"])


def test_a_plan_adds_its_step_its_figures_and_the_trade_offs() -> None:
    analysis = make_analysis()
    steps = len(analysis.graph.operations)
    order = tuple((index, index == 3) for index in range(steps))
    plan = make_plan()
    data = build(analysis, planned=PlannedStep(analysis, order), plan=plan, front=make_front(2))
    assert data["planned"]["operation"] == [*range(steps)]
    assert data["planned"]["again"] == [3]
    assert data["chosen"] == {"peak": 21 * MIB, "overhead": 0.25}
    assert [trade["overhead"] for trade in data["front"]] == [0, 0.04]
    assert [build()[name] for name in ("planned", "chosen", "front")] == [None, None, []]


def sum_lives(storages: dict[str, list[int]], workspace: list[int]) -> list[int]:
    """Adds up live bytes as the script does, the slow way."""
    lives = [*zip(storages["bytes"], storages["born"], storages["died"], strict=True)]
    return [
        held + sum(n for n, born, died in lives if born <= step and (died == NONE or died >= step))
        for step, held in enumerate(workspace)
    ]


@given(memory_graphs())
def test_the_lives_sum_up_to_the_profile(graph: MemoryGraph) -> None:
    analysis = make_analysis(graph)
    data = build(analysis, planned=PlannedStep(analysis, ()))
    workspace = data["operations"]["workspace"]
    expected = [*analysis.timeline.profile()]
    assert sum_lives(data["storages"], workspace) == expected
    assert sum_lives(data["planned"], data["planned"]["workspace"]) == expected
    assert data["peak"] == expected.index(max(expected))


def outline(rows: tuple[ModuleRow, ...]) -> list[tuple[int, str]]:
    return [(row.level, row.name) for row in rows]


def test_modules_and_their_operations_are_in_the_order_in_which_they_ran() -> None:
    nodes = [
        make_row("x", 0, op="placeholder"),  # which is handed in, and no operation
        make_row("up.0.conv", 0, fqn="up.0.conv", op="call_module", live_bytes=7),
        make_row("up.0.relu", 1, forward_flops=5, backward_flops=11),
        make_row("cat", 2, saved_bytes=2),
    ]
    conv = Module("up.0.conv", "Conv2d", parameter_bytes=100, live_bytes=107, nodes=(1,))
    block = Module("up.0", "Block", parameter_bytes=110, nodes=(2,), children=(conv,))
    up = Module("up", children=(block,), saved_bytes=3)
    rows = [*list_rows(Module("", nodes=(3,), children=(up,)), nodes)]
    labels = ["", "up", "0 (Block)", "conv", "relu", "cat"]
    assert outline(rows) == [*zip([0, 1, 2, 3, 3, 1], labels, strict=True)]
    assert [row.sums[0] for row in rows] == [0, 0, 110, 100, 0, 0]
    assert [row.sums[3] for row in rows] == [0, 0, 0, 107, 0, 0]
    assert (rows[1].sums[2], rows[4].sums[4:]) == (3, (5, 11))
    assert [row.node for row in rows] == [NONE, NONE, NONE, 1, 2, 3]
