from __future__ import annotations

import json

from fxmem.comparison.verdicts import RULES, Verdict, write_annotations, write_sarif
from fxmem.graph import SourceLocation

SOURCE = SourceLocation("my nets/net,v1.py", 12, "forward")


def test_annotations_escape_what_commands_are_made_of() -> None:
    verdicts = [
        Verdict("peak-growth", "2 %\nmore: much", SOURCE),
        Verdict("over-budget", "fine", None, "note"),
    ]
    assert write_annotations(verdicts).splitlines() == [
        "::error file=my nets/net%2Cv1.py,line=12,title=fxmem peak-growth::2 %25%0Amore: much",
        "::notice title=fxmem over-budget::fine",
    ]


def test_sarif_has_what_its_schema_requires() -> None:
    log = json.loads(write_sarif([Verdict("peak-growth", "more", SOURCE)], "1.0"))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    assert run["tool"]["driver"]["name"] == "fxmem"
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(RULES)
    (result,) = run["results"]
    assert (result["ruleId"], result["level"], result["message"]) == (
        "peak-growth",
        "error",
        {"text": "more"},
    )
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == "peak-growth"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "my%20nets/net%2Cv1.py"
    assert place["region"] == {"startLine": 12}


def test_a_finding_without_a_line_has_no_location() -> None:
    log = json.loads(write_sarif([Verdict("not-analysed", "gone", None)], "1.0"))
    assert "locations" not in log["runs"][0]["results"][0]
