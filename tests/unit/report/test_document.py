"""Content of a report."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hand_made import MIB, make_analysis, make_graph, memory_graphs
from hypothesis import given

from fxmem.graph import MemoryGraph, Phase
from fxmem.report.document import build_document


def test_totals_that_are_zero_are_left_out() -> None:
    graph = make_graph()
    document = build_document(make_analysis(MemoryGraph((), (), graph.operations[:1], ())))
    assert (document.totals, document.breakdown, document.live) == ({}, {}, ())


@pytest.mark.parametrize(
    ("setup", "notes"),
    [
        (
            {"optimizer": None},
            (
                "No loss given: the sum of the output's floating-point tensors is used.",
                "No optimizer given: the step ends after backward.",
            ),
        ),
        ({"mode": "infer", "optimizer": None}, ()),
        (
            {"frontend": "record", "frontend_reason": "a cache", "loss": "mse"},
            (
                "Traced by record, not fx: a cache. The memory figures do not depend on the "
                "tracer; plans cover whole modules only.",
            ),
        ),
    ],
)
def test_the_notes_say_what_was_assumed(setup: dict[str, Any], notes: tuple[str, ...]) -> None:
    assert build_document(make_analysis(**setup)).notes == notes


def test_a_loss_that_the_model_computes_is_its_own() -> None:
    graph = make_graph()
    operations = tuple(
        dataclasses.replace(each, phase=Phase.FORWARD) if each.phase is Phase.LOSS else each
        for each in graph.operations
    )
    notes = build_document(make_analysis(dataclasses.replace(graph, operations=operations))).notes
    assert notes == ("No loss given: the model's own is used.",)


@given(memory_graphs())
def test_breakdown_and_live_rows_sum_to_the_peak(graph: MemoryGraph) -> None:
    document = build_document(make_analysis(graph))
    peak_bytes = document.headline.peak_bytes
    assert sum(document.breakdown.values()) == peak_bytes
    assert sum(row.nbytes for row in document.live) == peak_bytes
    for sizes in ([*document.breakdown.values()], [row.nbytes for row in document.live]):
        assert sizes == sorted(sizes, reverse=True) and 0 not in sizes


def test_a_node_has_what_is_alive_of_it_at_the_peak() -> None:
    rows = build_document(make_analysis()).nodes
    # The input; of the ReLU its result, the gradient that its backward makes and the workspace;
    # of fc2 its result and the gradient of its weight.
    alive = {row.name: row.live_bytes for row in rows}
    assert alive == {
        "x": 2 * MIB,
        "fc1": 0,
        "block.relu": 12 * MIB,
        "fc2": 5 * MIB,
        "loss.sum": 4,
    }
