"""Each ``del`` that is proposed can be written there, and lowers the peak by what was said.

``FXMEM_EXAMPLES=2000`` runs more examples, with random seeds.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
from generated_modules import Program, programs, runs
from hypothesis import HealthCheck, Phase, assume, given, settings

from fxmem.analysis import Analysis
from fxmem.api import analyze
from fxmem.planning.deletion import apply_deletions, find_deletions
from fxmem.planning.facts import gather_facts
from fxmem.timeline import build_timeline

EXAMPLES = int(os.environ.get("FXMEM_EXAMPLES", "0"))
STRICT = settings(
    max_examples=EXAMPLES or 20,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if EXAMPLES else [])],
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What the generated programs do is theirs: PyTorch warns of some of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def analyse(program: Program, mode: str) -> Analysis:
    case = program.case()
    result: Analysis = analyze(case.model(), case.inputs()[0], device="cpu", mode=mode)
    return result


@STRICT
@given(programs())
def test_a_del_in_the_source_does_what_is_said(program: Program) -> None:
    assume(runs(program))
    for mode in ("train", "infer"):
        analysis = analyse(program, mode)
        for point in find_deletions(gather_facts(analysis.graph)):
            applied = build_timeline(apply_deletions(analysis.graph, [point])).profile()
            assert max(applied) == analysis.peak_bytes - point.saving_bytes
            if not point.variable:
                continue
            assert point.source is not None
            if not point.source.file.startswith("generated"):
                continue
            lines = program.source.splitlines()
            line = lines[point.source.line - 1].strip()
            at = point.source.line - lines.index("        xs = []") - 1
            assert program.statements[at - 1] == line
            statements = (*program.statements[:at], f"del {point.variable}")
            shorter = replace(program, statements=(*statements, *program.statements[at:]))
            assert runs(shorter)
            written = analyse(shorter, mode)
            profile = written.timeline.profile()
            if any(save.released is None for save in analysis.graph.saves):
                # What no backward runs through goes with what was computed from it.
                assert all(a <= b for a, b in zip(profile, applied, strict=True))
            else:
                assert profile == applied
