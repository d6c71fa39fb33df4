"""Findings as pure data, and the table of what finds and explains them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxmem.errors import UsageError, suggest_names
from fxmem.graph import SourceLocation

if TYPE_CHECKING:
    from fxmem.analysis import Analysis

_LEAST_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Finding:
    """A change to a step, in a line, with its effect on the peak alone.

    Attributes:
        code: The code that ``fxmem explain`` takes.
        change: The change, in a sentence.
        option: The option or code that makes it.
        cost: Its cost, and what the number rests on.
        source: The line of the user's code that it is about; None for the step as a whole.
    """

    code: str
    change: str
    option: str
    peak_bytes: int
    saving_bytes: int
    cost: str
    source: SourceLocation | None = None

    @property
    def title(self) -> str:
        """The title of the text that explains its code."""
        return TEXTS.get(self.code, f": {self.change}").partition("\n")[0].partition(": ")[2]


Finder = Callable[["Analysis"], Iterable[Finding]]
FINDERS: dict[str, Finder] = {}
"""By code, what finds it in a recorded step; none runs the model again."""

TEXTS: dict[str, str] = {}
"""By code, what ``fxmem explain`` prints: the title in the first line, ``FX101: Logits ...``."""


def register_finding(code: str, find: Finder | None, title: str, text: str = "") -> None:
    """Registers a finding of your own, which reports list and ``fxmem explain`` explains.

    Args:
        code: The code, such as ``"ACME1"``.
        find: Takes an analysis, whose step is not run again, and returns :class:`fxmem.Finding` of
            that code. None registers the text alone.
        title: Why the memory is taken, in a line.
        text: Markdown with what to write instead.
    """
    paragraphs = "\n\n".join(filter(None, (title, text.strip())))
    TEXTS[code] = f"{code}: {paragraphs}\n"
    if find is not None:
        FINDERS[code] = find


def find_findings(analysis: Analysis) -> tuple[Finding, ...]:
    """Finds what a report lists; nothing in a saved report, which lacks what it takes."""
    if analysis.graph.saved and not analysis.graph.saves:
        return ()
    found = (finding for find in FINDERS.values() for finding in find(analysis))
    return choose_findings(found, analysis.peak_bytes)


def choose_findings(found: Iterable[Finding], peak_bytes: int) -> tuple[Finding, ...]:
    """Chooses the findings that save 0.5 % of the peak or more; most first.

    >>> a, b = Finding("FX301", "", "", 996, 4, ""), Finding("FX302", "", "", 995, 5, "")
    >>> [finding.code for finding in choose_findings([a, b], 1000)]
    ['FX302']
    """
    least = max(_LEAST_SHARE * peak_bytes, 1)
    worth = [finding for finding in found if finding.saving_bytes >= least]
    return tuple(sorted(worth, key=lambda finding: -finding.saving_bytes))


def find_code(text: str) -> str | None:
    """Finds a code, in upper or lower case; None where there is none."""
    return next((code for code in TEXTS if code.upper() == text.upper()), None)


def explain_code(code: str) -> str:
    """Finds the text that explains the code of a finding.

    Raises:
        UsageError: There is no such code.
    """
    known = find_code(code)
    if known is None:
        hint = suggest_names(code.upper(), TEXTS, f"one of {', '.join(TEXTS)}")
        raise UsageError(f"unknown finding {code}", hint=hint)
    return TEXTS[known]
