"""Verdicts as annotations of a workflow of GitHub, and as SARIF."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from fxmem.graph import SourceLocation

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"error": "error", "note": "notice"}
"""SARIF's words for the weight of a verdict, and GitHub's."""
RULES = {
    "peak-growth": "The peak memory of a step grows",
    "over-budget": "The peak memory of a step is over its budget",
    "does-not-fit": "A step does not fit its GPU",
    "not-analysed": "A step cannot be analysed",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A result for people and machines.

    Attributes:
        rule: One of :data:`RULES`.
        message: One or more sentences.
        source: The line to annotate, its file relative to the repository; None for none.
        level: ``"error"`` for a failure, else ``"note"``.
    """

    rule: str
    message: str
    source: SourceLocation | None
    level: str = "error"


def write_annotations(verdicts: Iterable[Verdict]) -> str:
    """Writes the commands by which a workflow of GitHub annotates lines.

    Source: docs.github.com, "Workflow commands"; ``actions/toolkit``, ``core/src/command.ts``.

    >>> source = SourceLocation("net.py", 12)
    >>> write_annotations([Verdict("over-budget", "Peak 2 GiB", source)])
    '::error file=net.py,line=12,title=fxmem over-budget::Peak 2 GiB\\n'
    """
    lines = []
    for verdict in verdicts:
        fields = {"title": f"fxmem {verdict.rule}"}
        if verdict.source is not None:
            file = verdict.source.file.replace(os.sep, "/")
            fields = {"file": file, "line": str(verdict.source.line), **fields}
        texts = (f"{name}={_escape(value, ':,')}" for name, value in fields.items())
        lines.append(f"::{_LEVELS[verdict.level]} {','.join(texts)}::{_escape(verdict.message)}\n")
    return "".join(lines)


def _escape(text: str, others: str = "") -> str:
    for character in f"%\r\n{others}":  # the sign that escapes comes first
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def write_sarif(verdicts: Sequence[Verdict], version: str) -> str:
    """Writes verdicts in the Static Analysis Results Interchange Format, version 2.1.0.

    Args:
        verdicts: In any order.
        version: That of fxmem.
    """
    rules = list(RULES)
    results = []
    for verdict in verdicts:
        result = {
            "ruleId": verdict.rule,
            "ruleIndex": rules.index(verdict.rule),
            "level": verdict.level,
            "message": {"text": verdict.message},
        }
        if verdict.source is not None:
            uri = quote(verdict.source.file.replace(os.sep, "/"))
            artifact = {"uri": uri, "uriBaseId": "%SRCROOT%"}
            region = {"startLine": verdict.source.line}
            place = {"artifactLocation": artifact, "region": region}
            result["locations"] = [{"physicalLocation": place}]
        results.append(result)
    driver = {
        "name": "fxmem",
        "version": version,
        "rules": [{"id": name, "shortDescription": {"text": RULES[name]}} for name in rules],
    }
    run = {"tool": {"driver": driver}, "results": results}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"
