"""One finding, as pure data, and the page that explains its code."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fxmem.errors import UsageError
from fxmem.graph import SourceLocation

_LEAST_BYTES = 1 << 20
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
        """The code's title on the page of findings."""
        return read_sections()[self.code].partition("\n")[0].partition(": ")[2]


def choose_findings(found: Iterable[Finding], peak_bytes: int) -> tuple[Finding, ...]:
    """Chooses the findings that save 1 MiB or 0.5 % of the peak, whichever is less; most first.

    >>> a, b = Finding("FX301", "", "", 996, 4, ""), Finding("FX302", "", "", 995, 5, "")
    >>> [finding.code for finding in choose_findings([a, b], 1000)]
    ['FX302']
    """
    least = min(_LEAST_BYTES, _LEAST_SHARE * peak_bytes)
    worth = [finding for finding in found if finding.saving_bytes >= max(least, 1)]
    return tuple(sorted(worth, key=lambda finding: -finding.saving_bytes))


@cache
def read_sections() -> Mapping[str, str]:
    """Reads the sections of the page of findings, by code, without the marks of headings."""
    page = (files("fxmem.advice") / "findings.md").read_text(encoding="utf-8")
    sections = re.split(r"^## (?=FX\d)", page, flags=re.MULTILINE)[1:]
    return {section[:5]: section.rstrip() + "\n" for section in sections}


def explain_code(code: str) -> str:
    """Finds the text that explains the code of a finding.

    Raises:
        UsageError: There is no such code.
    """
    sections = read_sections()
    if code.upper() not in sections:
        close = difflib.get_close_matches(code.upper(), sections, n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(sections)}"
        raise UsageError(f"unknown finding {code}", hint=hint)
    return sections[code.upper()]
