from __future__ import annotations

from hand_made import make_graph
from pictures import MIB, make_row

from fxmem.graph import RESIDENT, Category, Storage
from fxmem.report.module_tree import ModuleRow, list_modules


def make_parameter(index: int, name: str, nbytes: int) -> Storage:
    return Storage(index, nbytes, Category.PARAMETER, name, (1,), "float32", RESIDENT, None)


def outline(rows: tuple[ModuleRow, ...]) -> list[tuple[int, str]]:
    return [(row.level, row.name) for row in rows]


def test_sums_are_those_of_all_that_is_within() -> None:
    nodes = [
        make_row("up.0.conv", 0, fqn="up.0.conv", op="call_module", saved_bytes=3, live_bytes=7),
        make_row("up.0.relu", 1, forward_flops=5, backward_flops=11),
        make_row("cat", 2, saved_bytes=2),
    ]
    parameters = [
        make_parameter(0, "up.0.conv.weight", 100),
        make_parameter(1, "up.scale", 10),
        make_parameter(2, "head.weight", 1),  # of a module that did not run: the model's
    ]
    rows = list_modules(nodes, parameters)
    assert outline(rows) == [(0, ""), (1, "up"), (2, "0"), (3, "conv"), (3, "relu"), (1, "cat")]
    model, up, block, conv, relu, cat = rows
    assert [row.parameter_bytes for row in rows] == [111, 110, 100, 100, 0, 0]
    assert [row.output_bytes for row in rows] == [3 * MIB, 2 * MIB, 2 * MIB, MIB, MIB, MIB]
    assert (model.saved_bytes, up.saved_bytes, block.saved_bytes) == (5, 3, 3)
    assert (model.live_bytes, conv.live_bytes, cat.live_bytes) == (7, 7, 0)
    assert (model.forward_flops, model.backward_flops) == (5, 11)
    assert [row.node for row in rows] == [None, None, None, 0, 1, 2]
    assert (relu.forward_flops, relu.backward_flops) == (5, 11)


def test_a_module_that_runs_twice_has_a_row_for_each_call() -> None:
    nodes = [
        make_row("act", 0, fqn="act", op="call_module"),
        make_row("fc", 1, fqn="fc", op="call_module"),
        make_row("act_1", 2, fqn="act", op="call_module"),
    ]
    assert outline(list_modules(nodes, [])) == [
        *[(0, ""), (1, "act"), (2, "act"), (2, "act_1")],
        (1, "fc"),
    ]


def test_what_is_handed_in_and_out_is_no_operation() -> None:
    nodes = [make_row("x", 0, op="placeholder"), make_row("output", 1, op="output")]
    assert outline(list_modules(nodes, make_graph().storages)) == [(0, "")]
