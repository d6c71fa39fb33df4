from __future__ import annotations

import json

import pytest
from hand_made import make_analysis, memory_graphs
from hypothesis import given, settings

from fxmem.analysis import Analysis
from fxmem.errors import UsageError
from fxmem.graph import MemoryGraph


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
        "the report has version 9; this fxmem reads 1 (write it again with fxmem analyze --json)"
    )


def test_a_damaged_report_is_refused() -> None:
    report = make_analysis().to_dict()
    del report["operations"]
    with pytest.raises(UsageError) as caught:
        Analysis.from_json(json.dumps(report))
    assert str(caught.value) == "the report is damaged: 'operations' (write it again)"
