"""Plans as JSON: written, read again, and refused where the text is something else."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace

import pytest
from hand_made import make_analysis

from fxmem import UsageError
from fxmem.graph import SourceLocation
from fxmem.planning.plan import (
    PLAN_VERSION,
    DelPoint,
    InplaceChange,
    Limit,
    LimitKind,
    Plan,
    Segment,
)

SOURCE = SourceLocation("/home/me/nets/net.py", 12, "forward")


def make_plan() -> Plan:
    inner = Segment("b", "c", 2, "block.0", SOURCE, random=True, norms=("block.norm",))
    return Plan(
        "0123456789abcdef",
        300,
        200,
        overhead=0.25,
        overhead_flops=0.125,
        segments=(Segment("a", "d", 4, children=(inner,), saving_bytes=100), Segment("f", "f", 1)),
        inplace=(InplaceChange("relu", "relu_", SOURCE, 50, "conv"),),
        dels=(DelPoint("x", "x", "add", None, 10),),
        lower_bound_overhead=0.2,
        limits=(
            Limit("rand", LimitKind.RECOMPUTE, "draws", "noise", SOURCE),
            Limit("exp", LimitKind.BEGIN, "changed"),
        ),
        fx_graph=object(),
    )


def test_what_is_written_is_read_again() -> None:
    plan = make_plan()
    for indent in (None, 2):
        read = Plan.from_json(plan.to_json(indent))
        assert read == plan
        assert read.fx_graph is None
        assert hash(read.segments) == hash(plan.segments), "tuples and no lists"


def test_a_plan_is_copied_and_pickled_without_its_analysis() -> None:
    plan = replace(make_plan(), fx_graph=None, analysis=make_analysis())
    for read in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert (read, read.analysis) == (plan, None)


def test_the_gap_is_what_is_above_the_bound() -> None:
    assert make_plan().gap == pytest.approx(0.05)
    assert Plan("0", 2, 1, overhead=0.1, lower_bound_overhead=0.3).gap == 0.0
    assert Plan("0", 2, 1, overhead=0.1).gap is None


OTHER = "this is not an fxmem plan (fxmem plan -o writes one)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, OTHER) for text in ("", "{", "[]", "1", "null", '"plan"', '{"segments": []}')),
        (
            json.dumps({**json.loads(make_plan().to_json()), "plan_version": "1"}),
            f"a plan of version '1'; this fxmem reads {PLAN_VERSION} (make a new plan)",
        ),
    ],
)
def test_another_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Plan.from_json(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "change",
    [
        {"segments": 3},
        {"segments": [3]},
        {"segments": None},
        {"segments": [{"first": "a", "last": "b", "nodes": 2, "source": None}]},
        {"inplace": [{}]},
        {"dels": "ab"},
        {"unknown": 1},
        {"limits": [{"node": "a", "kind": "NEITHER", "reason": "", "source": None}]},
    ],
)
def test_a_damaged_plan_is_refused(change: dict[str, object]) -> None:
    fields = {**json.loads(make_plan().to_json()), **change}
    with pytest.raises(UsageError, match=r"^the plan is damaged: .* \(make a new one\)$"):
        Plan.from_json(json.dumps(fields))
