"""``fxmem diff``: what grew between two reports, or since a revision of a repository."""

from __future__ import annotations

import argparse
import os

from fxmem.cli.output import (
    EXIT_FINDING,
    add_output_options,
    choose_format,
    read_text,
    show_progress,
    write_line,
    write_result,
)
from fxmem.cli.revisions import analyze_revision, find_root
from fxmem.cli.step import (
    add_step_options,
    analyze_step,
    list_given,
    parse_step,
    write_options,
)
from fxmem.comparison.comparison import Comparison, compare, measure_allowance
from fxmem.comparison.footprints import read_footprint
from fxmem.errors import UsageError
from fxmem.report.json_report import parse_report
from fxmem.units import format_bytes

HELP = "what grew between two reports, or since a revision"
DESCRIPTION = """\
Compares the peaks of two steps: their totals, and the modules and storages that grew, with
source lines. BEFORE and AFTER are reports of fxmem analyze --json -o FILE.json; or, with
--git, a TARGET is analysed at a revision and in the working tree."""
_USAGE = """\
fxmem diff BEFORE.json AFTER.json [options]
       fxmem diff TARGET --git REVISION [--input SHAPE]... [options]"""
EPILOG = """\
examples:
  fxmem diff before.json after.json
  fxmem diff net.py:Net --input 8x64 --git main --fail-above 2%
  fxmem diff net.py:Net --input 8x64 --git origin/main --fail-above 100MiB --format markdown

exit codes: 0 fine, 1 the peak grew by more than --fail-above, 2 bad usage or a model that
cannot be loaded or traced
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.usage = _USAGE
    add_step_options(parser, checks_fit=False)
    parser.add_argument("after", metavar="AFTER", nargs="?", help="the report to compare with")
    result = add_output_options(parser, has_format=True)
    result.add_argument(
        "--git",
        metavar="REVISION",
        help="analyse TARGET at this revision and in the working tree",
    )
    result.add_argument(
        "--fail-above", metavar="GROWTH", help="exit 1 if the peak grows by more: 2%% or 100MiB"
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Compares two steps and writes the result."""
    if arguments.fail_above is not None:
        measure_allowance(arguments.fail_above, 0)
    kind = choose_format(arguments)
    comparison = (_compare_with_revision if arguments.git else _compare_reports)(arguments)
    before, growth = comparison.before.peak_bytes, comparison.growth_bytes
    limit = arguments.fail_above
    fails = limit is not None and growth > measure_allowance(limit, before)
    write_result(comparison, kind, arguments.output)
    if fails:
        write_line(f"fxmem: the peak grows by {format_bytes(growth)}, more than {limit}")
    return EXIT_FINDING if fails else 0


def _compare_with_revision(arguments: argparse.Namespace) -> Comparison:
    if arguments.after is not None:
        hint = f"leave {arguments.after} out"
        raise UsageError("with --git, one TARGET is compared with itself", hint=hint)
    step = parse_step(arguments)
    values = {name: getattr(arguments, dest) for dest, name in arguments.step_options.items()}
    target, revision = arguments.target, arguments.git
    with show_progress(f"comparing {target} with {revision}"):
        before, name = analyze_revision(target, write_options(values), revision)
        after = read_footprint(analyze_step(step).to_dict(), find_root(os.getcwd()))
    return compare(before, after, names=(name, "working tree"))


def _compare_reports(arguments: argparse.Namespace) -> Comparison:
    paths = (arguments.target, arguments.after)
    if list_given(arguments) or not all(path and path.endswith(".json") for path in paths):
        hint = "fxmem diff before.json after.json, or fxmem diff TARGET --git main"
        raise UsageError("name two saved reports, or a TARGET and --git", hint=hint)
    root = find_root(os.getcwd())
    reports = [parse_report(read_text(path, "report")) for path in paths]
    return compare(*(read_footprint(report, root) for report in reports), names=paths)
