"""Plans as JSON: what is written is read again, what is no plan is told."""

from __future__ import annotations

import json

import pytest

from fxmem import UsageError
from fxmem.graph import SourceLocation
from fxmem.planning.plan import (
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


def test_a_plan_written_before_limits_were_has_none() -> None:
    fields = json.loads(make_plan().to_json())
    assert [limit["kind"] for limit in fields.pop("limits")] == ["RECOMPUTE", "BEGIN"]
    assert Plan.from_json(json.dumps(fields)).limits == ()


def test_the_gap_is_what_is_above_the_bound() -> None:
    assert make_plan().gap == pytest.approx(0.05)
    assert Plan("0", 2, 1, overhead=0.1, lower_bound_overhead=0.3).gap == 0.0
    assert Plan("0", 2, 1, overhead=0.1).gap is None


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", '"plan"', "{}", '{"segments": []}'])
def test_what_is_no_plan_is_told(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Plan.from_json(text)
    assert str(caught.value) == "this is no plan of fxmem (fxmem plan -o writes one)"


@pytest.mark.parametrize("version, shown", [(999, "999"), ("1", "'1'"), (None, "None")])
def test_another_version_is_told(version: object, shown: str) -> None:
    fields = {**json.loads(make_plan().to_json()), "plan_version": version}
    with pytest.raises(UsageError) as caught:
        Plan.from_json(json.dumps(fields))
    assert str(caught.value) == (
        f"a plan of version {shown}; this fxmem reads {fields_version()} (make the plan anew)"
    )


def fields_version() -> int:
    version: int = json.loads(make_plan().to_json())["plan_version"]
    return version


def test_a_missing_part_is_told() -> None:
    fields = json.loads(make_plan().to_json())
    del fields["segments"][0]["children"]
    with pytest.raises(UsageError) as caught:
        Plan.from_json(json.dumps(fields))
    assert str(caught.value) == "the plan is damaged: 'children' (make it anew)"


@pytest.mark.parametrize(
    "change",
    [
        {"segments": 3},
        {"segments": [3]},
        {"segments": None},
        {"inplace": [{}]},
        {"dels": "ab"},
        {"unknown": 1},
        {"limits": [{"node": "a", "kind": "NEITHER", "reason": "", "source": None}]},
    ],
)
def test_a_damaged_plan_is_told(change: dict[str, object]) -> None:
    fields = {**json.loads(make_plan().to_json()), **change}
    with pytest.raises(UsageError, match=r"^the plan is damaged: .* \(make it anew\)$"):
        Plan.from_json(json.dumps(fields))
