"""Suggested lines of code written into a file, as a user would."""

from __future__ import annotations

from collections.abc import Iterable

from fxmem.report.suggestions import Suggestion


def write_suggestions(text: str, suggestions: Iterable[Suggestion]) -> str:
    """The text of a file with suggestions for it written at their lines."""
    lines = text.split("\n")
    for suggestion in sorted(suggestions, key=lambda s: (-s.line, not s.is_added)):
        head = lines[suggestion.line - 1]
        code = head[: len(head) - len(head.lstrip())] + suggestion.code
        start = suggestion.end_line if suggestion.is_added else suggestion.line - 1
        lines[start : suggestion.end_line] = [code]
    return "\n".join(lines)
