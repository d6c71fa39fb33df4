"""``fxmem check``: the steps that ``[tool.fxmem]`` lists, and whether they keep their budgets."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fxmem.cli.configuration import FILE, Check, read_checks
from fxmem.cli.diff import add_format_options, choose_kind
from fxmem.cli.output import EXIT_FINDING, EXIT_USAGE, write_result
from fxmem.cli.progress import show_progress
from fxmem.cli.revisions import find_root
from fxmem.cli.step import add_command, analyze_step
from fxmem.comparison.changes import find_guilty_line, match_storages
from fxmem.comparison.footprints import Footprint, read_footprint
from fxmem.comparison.texts import list_storages
from fxmem.errors import FxmemError
from fxmem.graph import SourceLocation
from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.result import Report
from fxmem.report.tables import Bytes, Cell, Table
from fxmem.report.text import write_headline
from fxmem.units import format_bytes

SCHEMA_VERSION = 1
_TOP = 10

_DESCRIPTION = f"""\
Analyses the steps that the nearest {FILE} lists, and reports the ones over their
budgets.

  [tool.fxmem]
  optimizer = "adamw"

  [[tool.fxmem.checks]]
  target = "nets/gpt.py:GPT"
  input = ["4x512:int64"]
  budget = "8GiB"

Keys are the options of fxmem analyze. Keys of [tool.fxmem] itself hold for all checks."""
_EPILOG = """\
exit codes: 0 fine, 1 a step is over its budget or does not fit its GPU, 2 bad usage or a model
that cannot be loaded or traced
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A problem of a step: ``over-budget``, ``does-not-fit`` or ``not-analysed``."""

    rule: str
    message: str  # one or more sentences
    source: SourceLocation | None = None  # the line that takes most, relative to the repository


@dataclass(frozen=True, slots=True)
class Outcome:
    """A check, the peak of its step if that could be analysed, and what is wrong with it."""

    check: Check
    peak: Footprint | None
    verdict: Verdict | None = None


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command."""
    help = f"whether the steps that {FILE} lists keep their budgets"
    parser = add_command(commands, "check", run_check, help, _DESCRIPTION, _EPILOG)
    parser.add_argument("-q", "--quiet", action="store_true", help="show failures alone")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="list the largest storages of every step"
    )
    add_format_options(parser)


def run_check(arguments: argparse.Namespace) -> int:
    """Runs the checks of a project and writes what they find."""
    kind = choose_kind(arguments)
    output = arguments.output and os.path.abspath(arguments.output)
    started_in = os.getcwd()
    project, checks = read_checks(started_in)
    os.chdir(project)  # which targets are relative to
    try:
        results = [_run_one(check, find_root(project)) for check in checks]
    finally:
        os.chdir(started_in)
    verdicts = [result.verdict for result in results if result.verdict is not None]
    count = f"{len(results)} check{'s' if len(results) > 1 else ''}"
    title = f"{len(verdicts)} of {count} failed" if verdicts else f"{count} passed"
    shown = [result for result in results if result.verdict is not None or not arguments.quiet]
    head = [Heading(title)] if shown else []
    values = {"schema_version": SCHEMA_VERSION, "checks": [*map(_list_values, results)]}
    write_result(Report([*head, *_list_blocks(shown, arguments.verbose)], values), kind, output)
    if any(verdict.rule == "not-analysed" for verdict in verdicts):
        return EXIT_USAGE
    return EXIT_FINDING if verdicts else 0


def _run_one(check: Check, root: str) -> Outcome:
    try:
        with show_progress(f"checking {check.name}"):
            report = analyze_step(check.step).to_dict()
    except FxmemError as error:
        return Outcome(check, None, Verdict("not-analysed", f"{check.name}: {error}"))
    peak = read_footprint(report, root)
    problems = _judge(check, peak)
    if not problems:
        return Outcome(check, peak)
    message = f"{check.name}: {write_headline(peak.headline)}, {', '.join(problems.values())}"
    line = find_guilty_line(match_storages((), peak.live))
    return Outcome(check, peak, Verdict(next(iter(problems)), message, line))


def _judge(check: Check, peak: Footprint) -> dict[str, str]:
    """Finds what is wrong with a step, by rule."""
    problems, budget = {}, check.budget_bytes
    if budget is not None and peak.peak_bytes > budget:
        over = format_bytes(peak.peak_bytes - budget)
        problems["over-budget"] = f"{over} over the budget of {format_bytes(budget)}"
    if peak.misfit:
        problems["does-not-fit"] = peak.misfit
    return problems


def _list_blocks(results: Sequence[Outcome], is_verbose: bool) -> Iterator[Block]:
    rows: list[Sequence[Cell]] = []
    for result in results:
        budget, peak = result.check.budget_bytes, result.peak
        verdict, outcome = result.verdict, "ok"
        if verdict is not None:
            where = f", {verdict.source}" if verdict.source else ""
            outcome = f"{verdict.rule.replace('-', ' ')}{where}"
        sizes = [None if peak is None else peak.peak_bytes, budget]
        shown = ("" if size is None else Bytes(size) for size in sizes)
        rows.append((result.check.name, *shown, outcome))
    yield Table(["check", "peak", "budget", "result"], rows, ["peak", "budget"], ["check"])
    for result in results:
        title = result.verdict.message if result.verdict is not None else ""
        if result.peak is None:
            yield Paragraph([title])
        elif title or is_verbose:
            name = f"{result.check.name}: {write_headline(result.peak.headline)}"
            yield list_storages(result.peak, _TOP, title=title or name)


def _list_values(result: Outcome) -> dict[str, Any]:
    peak = result.peak
    return {
        "name": result.check.name,
        "target": result.check.step.target,
        "budget_bytes": result.check.budget_bytes,
        "peak_bytes": peak and peak.peak_bytes,
        "reserved_bytes": peak and peak.reserved_bytes,
        "phase": peak and peak.headline.phase.value,
        "verdict": result.verdict and asdict(result.verdict),
    }
