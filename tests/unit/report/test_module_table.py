from __future__ import annotations

from fxmem.memory.module_tree import Module
from fxmem.report.text import list_modules


def make_block(fqn: str, parameters: int = 4, live_bytes: int = 1024) -> Module:
    linear = Module(f"{fqn}.fc", "Linear", (8, 2), parameters, nodes=(1,), live_bytes=live_bytes)
    return Module(fqn, "Block", (8, 2), parameters, live_bytes=live_bytes, children=(linear,))


def list_cells(model: Module, depth: int = 3) -> list[tuple[str, ...]]:
    table = list_modules(model, "net.py:Net", depth)
    return [tuple(str(row[at]) for at in (0, 1, 3, -1)) for row in table.rows]


MODEL = Module(
    "",
    parameters=15,
    children=(
        Module("h", children=(make_block("h.0"), make_block("h.1", live_bytes=0))),
        make_block("h2", parameters=7),
    ),
)


def test_equal_modules_that_follow_each_other_are_one_row_of_sums() -> None:
    assert list_cells(MODEL) == [
        ("net.py:Net", "", "15", "-"),
        ("- h.0 ... h.1", "2 x Block", "8", "1.00 KiB"),
        ("- - fc", "2 x Linear", "8", "1.00 KiB"),
        ("- h2", "Block", "7", "1.00 KiB"),
        ("- - fc", "Linear", "7", "1.00 KiB"),
    ]
    assert list_modules(MODEL, "Net").rest.endswith("a row of several the sums of all.")


def test_a_depth_leaves_out_what_lies_deeper() -> None:
    assert [row[0] for row in list_cells(MODEL, 1)] == ["net.py:Net", "- h.0 ... h.1", "- h2"]
