"""The page of the planner's results, of which a run may measure some models only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

ANSWERS = "By hand and by plan"
"""The title of the section with the rows of all models."""
_TITLE = re.compile(r"^## (.*)$", re.MULTILINE)


def update_page(path: Path, page: str, names: Sequence[str]) -> None:
    """Replaces a page at once, and keeps what it had of models that were not measured.

    Args:
        path: Of the page; there may be none yet.
        page: What was measured, as a page.
        names: All models, in the page's order.
    """
    text = merge_pages(path.read_text(), page, names) if path.exists() else page
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def merge_pages(older: str, newer: str, names: Sequence[str]) -> str:
    """A page, with the rows and sections of an older one for models that it lacks.

    Args:
        older: The older page.
        newer: The page.
        names: All models, in the page's order.
    """
    was, now = _split_page(older), _split_page(newer)
    for title in ("", ANSWERS):
        now[title] = _merge_table(was.get(title, ""), now[title], names)
    kept = {name: (now if name in now else was).get(name) for name in names}
    models = {name: body for name, body in kept.items() if body is not None}
    sections = {ANSWERS: now[ANSWERS], **models}
    parts = [now[""], *(f"## {title}\n\n{body}" for title, body in sections.items())]
    return "\n\n".join(parts) + "\n"


def _split_page(page: str) -> dict[str, str]:
    """Splits a page by its titles of the second level."""
    first, *rest = _TITLE.split(page)
    titles = zip(rest[::2], rest[1::2], strict=True)
    return {"": first.strip(), **{title: body.strip() for title, body in titles}}


def _merge_table(older: str, newer: str, names: Sequence[str]) -> str:
    """A text whose table has the rows of an older one's for models that it lacks."""
    rows = _read_table(newer)
    measured = {row["model"] for row in rows}
    rows += [row for row in _read_table(older) if row["model"] not in measured]
    rows.sort(key=lambda row: names.index(row["model"]) if row["model"] in names else len(names))
    text = newer.partition("\n|")[0] if not newer.startswith("|") else ""
    table = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)
    return f"{text}\n{table}".strip()


def _read_table(text: str) -> list[Mapping[str, str]]:
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]
