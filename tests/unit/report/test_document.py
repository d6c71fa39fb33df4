"""Content of a report, and of one that was saved."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hand_made import MIB, make_analysis, make_graph, memory_graphs
from hypothesis import given, settings

from fxmem.analysis import Analysis
from fxmem.errors import UsageError
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


# -- saved, and read again -------------------------------------------------------------------------


@settings(max_examples=20)
@given(memory_graphs())
def test_a_saved_report_draws_as_the_analysis_itself(graph: MemoryGraph) -> None:
    analysis = make_analysis(graph)
    saved = Analysis.from_json(analysis.to_json())
    assert saved.to_graphviz().source == analysis.to_graphviz().source
    assert (saved.setup, saved.graph) == (analysis.setup, graph)


def test_fields_of_a_later_fxmem_are_passed_over() -> None:
    report = make_analysis().to_dict()
    report["nodes"][0]["colour"] = report["colour"] = "blue"
    assert Analysis.from_json(json.dumps(report)).graph == make_analysis().graph


@pytest.mark.parametrize("text", ["no", "[]", "{}"])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Analysis.from_json(text)
    assert str(caught.value) == (
        "this is not an fxmem report (fxmem analyze --json -o FILE writes one)"
    )


def test_another_version_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        Analysis.from_json(json.dumps({**make_analysis().to_dict(), "schema_version": 9}))
    assert str(caught.value) == (
        "the report has version 9; this fxmem reads 2 (write it again with fxmem analyze --json)"
    )


def test_a_damaged_report_is_refused() -> None:
    report = make_analysis().to_dict()
    del report["operations"]
    with pytest.raises(UsageError) as caught:
        Analysis.from_json(json.dumps(report))
    assert str(caught.value) == "the report is damaged: 'operations' (write it again)"
