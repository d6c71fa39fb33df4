"""A plan as a diff of the user's code: which files may change, and what is said above it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fxmem.cli.output import write_line
from fxmem.units import format_bytes

if TYPE_CHECKING:
    from fxmem.graph import Node
    from fxmem.planning.plan import Plan


def write_plan_diff(plan: Plan, nodes: tuple[Node, ...]) -> str:
    """The changes of a plan to the code in this folder; stderr says how many are not among them.

    Args:
        plan: The plan.
        nodes: Those of the step that it was made for.
    """
    from fxmem.applying.patching import patch_sources
    from fxmem.report.diff import render_diff

    folder = os.path.realpath(os.curdir)
    files = {node.source.file for node in nodes if node.source is not None}
    patches = patch_sources(plan, nodes, dict(_read_files(files, folder)))
    count = len(patches.left_out)
    if count:
        what = "change of the plan is" if count == 1 else "changes of the plan are"
        write_line(f"fxmem: {count} {what} not in the diff: the comments above it say why")
    notes = [
        f"The plan: a peak of {format_bytes(plan.peak_bytes)} in place of"
        f" {format_bytes(plan.baseline_peak_bytes)}{', by fxmem.apply' if plan.segments else ''}.",
        *(f"Not in this diff: {text}." for text in patches.left_out),
    ]
    changed = [
        (os.path.relpath(os.path.realpath(file.path), folder), file.before, file.after)
        for file in patches.files
    ]
    return render_diff(changed, notes)


def _read_files(paths: Iterable[str], folder: str) -> Iterator[tuple[str, str]]:
    """The files that are the user's own: in this folder, and not installed."""
    for path in paths:
        real = os.path.realpath(path)
        if not real.startswith(os.path.join(folder, "")) or "site-packages" in real:
            continue
        try:
            with open(real, encoding="utf-8", newline="") as file:
                yield path, file.read()
        except (OSError, UnicodeDecodeError):  # code that was typed, or in another encoding
            continue
