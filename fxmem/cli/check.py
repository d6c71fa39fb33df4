"""``fxmem check``: the steps that ``[tool.fxmem]`` lists, and whether they keep their budgets."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fxmem.cli.diff import find_root
from fxmem.cli.shared.output import (
    EXIT_FINDING,
    EXIT_USAGE,
    add_output_options,
    choose_format,
    parse_budget,
    show_progress,
    write_result,
)
from fxmem.cli.shared.step import (
    StepChoice,
    add_step_options,
    analyze_step,
    parse_step,
    write_options,
)
from fxmem.comparison.changes import (
    Footprint,
    find_guilty_line,
    list_storages,
    match_storages,
    read_footprint,
)
from fxmem.errors import FxmemError, UsageError, suggest_names
from fxmem.graph import SourceLocation
from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.result import Report
from fxmem.report.tables import Bytes, Cell, Table
from fxmem.report.text import write_headline
from fxmem.units import format_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "pyproject.toml"
SCHEMA_VERSION = 1
_EXAMPLE = "add [[tool.fxmem.checks]] with target, input and budget"
_TOP = 10

HELP = f"whether the steps that {FILE} lists keep their budgets"
DESCRIPTION = f"""\
Analyses the steps that the nearest {FILE} lists, and reports the ones over their
budgets.

  [tool.fxmem]
  optimizer = "adamw"

  [[tool.fxmem.checks]]
  target = "nets/gpt.py:GPT"
  input = ["4x512:int64"]
  budget = "8GiB"

Keys are the options of fxmem analyze. Keys of [tool.fxmem] itself hold for all checks."""
EPILOG = """\
exit codes: 0 fine, 1 a step is over its budget or does not fit its GPU, 2 bad usage or a model
that cannot be loaded or traced
"""


@dataclass(frozen=True, slots=True)
class Check:
    """A step that is to stay within a budget.

    Attributes:
        name: Its name, else its target.
        step: The step.
        budget_bytes: The most that its peak may be; None for any.
    """

    name: str
    step: StepChoice
    budget_bytes: int | None


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("-q", "--quiet", action="store_true", help="show failures alone")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="list the largest storages of every step"
    )
    add_output_options(parser, has_format=True)


def run_command(arguments: argparse.Namespace) -> int:
    """Runs the checks of a project and writes what they find."""
    kind = choose_format(arguments)
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
    peak, budget, problems = read_footprint(report, root), check.budget_bytes, dict[str, str]()
    if budget is not None and peak.peak_bytes > budget:
        over = format_bytes(peak.peak_bytes - budget)
        problems["over-budget"] = f"{over} over the budget of {format_bytes(budget)}"
    if peak.misfit:
        problems["does-not-fit"] = peak.misfit
    if not problems:
        return Outcome(check, peak)
    message = f"{check.name}: {write_headline(peak.headline)}, {', '.join(problems.values())}"
    line = find_guilty_line(match_storages((), peak.live))
    return Outcome(check, peak, Verdict(next(iter(problems)), message, line))


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


def read_checks(folder: str) -> tuple[str, list[Check]]:
    """Reads the checks of the nearest pyproject.toml that has ``[tool.fxmem]``.

    Options of the table itself hold for every check that does not set them.

    Args:
        folder: Where to look first, before the folders above it.

    Returns:
        The folder of the file, and its checks.

    Raises:
        UsageError: There is no such file, or a mistake in it; names the key.
    """
    found = os.path.realpath(folder)
    while (table := _read_table(os.path.join(found, FILE))) is None:
        if found == os.path.dirname(found):
            raise UsageError(f"no {FILE} here or above has [tool.fxmem]", hint=_EXAMPLE)
        found = os.path.dirname(found)
    entries = table.pop("checks", None) if isinstance(table, dict) else None
    is_list = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not entries or not is_list:
        raise UsageError(f"{FILE}: tool.fxmem.checks lists no checks", hint=_EXAMPLE)
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_step_options(parser)
    parser.add_argument("--budget", type=parse_budget)
    checks: list[Check] = []
    for number, entry in enumerate(entries, 1):
        place = f"{FILE}: tool.fxmem.checks[{number}]"
        try:
            checks.append(_read_check(parser, table, entry))
        except UsageError as error:
            raise UsageError(f"{place}.{error.cause}", hint=error.hint) from None
    return found, checks


def _read_table(path: str) -> Any:
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        try:
            return tomllib.load(file).get("tool", {}).get("fxmem")
        except ValueError as error:
            raise UsageError(f"{path} is not TOML: {error}") from None


def _read_check(
    parser: argparse.ArgumentParser, table: Mapping[str, Any], entry: Mapping[str, Any]
) -> Check:
    values = {key.replace("_", "-"): value for key, value in {**table, **entry}.items()}
    target = values.pop("target", None)
    if not isinstance(target, str):
        raise UsageError("target is missing", hint="write path/to/file.py:name")
    name = values.pop("name", target)
    options = {a.option_strings[-1][2:]: a for a in parser._actions if a.option_strings}
    arguments: dict[str, list[str]] = {}
    for key, value in values.items():
        if key not in options or key == "help":
            hint = suggest_names(key, options, "an option of fxmem analyze, without --")
            raise UsageError(f"{key} is not known", hint=hint)
        if isinstance(value, dict):  # input = { ids = "8x128:int64" }
            value = [f"{argument}={spec}" for argument, spec in value.items()]
        is_flag, is_list = options[key].nargs == 0, isinstance(value, list)
        if is_flag != isinstance(value, bool):
            kind = "true or false" if is_flag else "a text or a number"
            raise UsageError(f"{key} must be {kind}, got {value!r}")
        if is_list and not isinstance(options[key], argparse._AppendAction):
            raise UsageError(f"{key} takes one value, got {value!r}")
        arguments[key] = write_options({f"--{key}": value})
        try:
            parse_step(parser.parse_args([target, *arguments[key]]))
        except argparse.ArgumentError as error:
            raise UsageError(f"{key}: {error.message}") from None
        except UsageError as error:
            raise UsageError(f"{key}: {error.cause}", hint=error.hint) from None
    given = [text for texts in arguments.values() for text in texts]
    parsed = parser.parse_args([target, *given])
    return Check(str(name), parse_step(parsed), parsed.budget)
