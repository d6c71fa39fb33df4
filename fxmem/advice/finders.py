"""The findings that are simulated on a recorded step, in order of their codes.

A further one is a function from an analysis to its findings, a line in :data:`FINDERS`, and a
section in ``findings.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fxmem.advice.attention import find_attention
from fxmem.advice.finding import Finding, choose_findings
from fxmem.advice.holding import find_cache, find_gradients, find_held_outputs
from fxmem.advice.upcasts import find_upcasts
from fxmem.advice.vocabulary import find_logits
from fxmem.analysis import Analysis

FINDERS: tuple[Callable[[Analysis], Iterator[Finding]], ...] = (
    find_logits,
    find_upcasts,
    find_attention,
    find_cache,
    find_held_outputs,
    find_gradients,
)
"""Each finds one code; none runs the model again."""


def find_findings(analysis: Analysis) -> tuple[Finding, ...]:
    """Finds what a report lists; nothing in a saved report, which lacks what it takes."""
    if analysis.graph.saved and not analysis.graph.saves:
        return ()
    found = (finding for find in FINDERS for finding in find(analysis))
    return choose_findings(found, analysis.peak_bytes)
