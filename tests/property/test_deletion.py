"""Each ``del`` that is proposed can be written there, and lowers the peak by what was said.

``FXMEM_EXAMPLES=2000`` runs more and larger examples, with random seeds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from generated.modules import Program, programs, runs
from generated.steps import analyse
from hypothesis import assume, given
from trials import EXAMPLES, try_examples

from fxmem.memory.timeline import build_timeline
from fxmem.planning.deletion import apply_deletions, find_deletions
from fxmem.planning.model.index import build_index

pytestmark = pytest.mark.filterwarnings("ignore")  # what programs do is theirs
STRICT = try_examples(20, are_slow=True)


@STRICT
@given(programs(most=24 if EXAMPLES else 12))
def test_a_del_in_the_source_does_what_is_said(program: Program) -> None:
    assume(runs(program))
    for mode in ("train", "infer"):
        analysis = analyse(program, mode)
        for point in find_deletions(build_index(analysis.graph)):
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
