"""``fxmem diff``: what grew between two reports, or since a revision of a repository."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import fxmem
from fxmem.cli.shared.output import (
    EXIT_FINDING,
    add_output_options,
    choose_format,
    parse_budget,
    read_bytes,
    read_text,
    show_progress,
    write_line,
    write_result,
)
from fxmem.cli.shared.step import (
    add_step_options,
    analyze_step,
    list_given,
    parse_step,
    write_options,
)
from fxmem.comparison.aligning import align_snapshot
from fxmem.comparison.alignment import Alignment
from fxmem.comparison.changes import Footprint, read_footprint
from fxmem.comparison.comparison import Comparison, compare, measure_allowance
from fxmem.comparison.measured import Measurement, explain_measured
from fxmem.comparison.snapshot import read_snapshot
from fxmem.errors import LoadError, UsageError
from fxmem.graph import is_installed
from fxmem.report.json_report import parse_report
from fxmem.units import format_bytes

_CHILD = "import sys; sys.path.pop(0); from fxmem.cli import main; sys.exit(main(sys.argv[1:]))"
"""Not ``-m fxmem``, which would prefer a folder of that name in the repository."""
_SNAPSHOTS = (".pickle", ".pkl")
_ERROR = "fxmem: error: "
HELP = "what grew between two reports, or since a revision"
DESCRIPTION = """\
Compares the peaks of two steps: their totals, and the modules and storages that grew, with
source lines. BEFORE and AFTER are reports of fxmem analyze --json -o FILE.json; or, with
--git, a TARGET is analysed at a revision and in the working tree."""
_USAGE = """\
fxmem diff BEFORE.json AFTER.json [options]
       fxmem diff REPORT.json SNAPSHOT.pickle [options]
       fxmem diff REPORT.json --measured SIZE [options]
       fxmem diff TARGET --git REVISION [--input SHAPE]... [options]"""
EPILOG = """\
examples:
  fxmem diff before.json after.json
  fxmem diff report.json --measured 17.4GiB
  fxmem diff report.json snapshot.pickle
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
        "--git", metavar="REVISION", help="analyse TARGET at this revision and in the working tree"
    )
    result.add_argument(
        "--measured",
        metavar="SIZE",
        help="compare the report with a peak that was measured, e.g. 17.4GiB, and say what could "
        "make the difference",
    )
    result.add_argument(
        "--fail-above", metavar="GROWTH", help="exit 1 if the peak grows by more: 2%% or 100MiB"
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Compares two steps and writes the result."""
    if arguments.fail_above is not None:
        measure_allowance(arguments.fail_above, 0)
    kind = choose_format(arguments)
    if arguments.target.endswith(_SNAPSHOTS) or (arguments.after or "").endswith(_SNAPSHOTS):
        write_result(_align(arguments), kind, arguments.output)
        return 0
    if arguments.measured is not None:
        write_result(_explain_measured(arguments), kind, arguments.output)
        return 0
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


def _align(arguments: argparse.Namespace) -> Alignment:
    paths = sorted(filter(None, (arguments.target, arguments.after)), key=_is_snapshot)
    if list_given(arguments) or [*map(_is_snapshot, paths)] != [False, True]:
        hint = "fxmem diff snapshot.pickle report.json"
        raise UsageError("a snapshot is compared with one saved report", hint=hint)
    report, name = paths
    with show_progress(f"aligning {name}"):
        snapshot = read_snapshot(read_bytes(name, "snapshot"))
        values = parse_report(read_text(report, "report"))
        return align_snapshot(values, snapshot, (report, name))


def _is_snapshot(path: str) -> bool:
    return path.endswith(_SNAPSHOTS)


def _explain_measured(arguments: argparse.Namespace) -> Measurement:
    path, measured_bytes = arguments.target, parse_budget(arguments.measured)
    if arguments.after is not None or list_given(arguments) or not path.endswith(".json"):
        hint = "fxmem diff report.json --measured 17.4GiB"
        raise UsageError("--measured is compared with one saved report", hint=hint)
    return explain_measured(parse_report(read_text(path, "report")), measured_bytes)


def _compare_reports(arguments: argparse.Namespace) -> Comparison:
    paths = (arguments.target, arguments.after)
    if list_given(arguments) or not all(path and path.endswith(".json") for path in paths):
        hint = "fxmem diff before.json after.json, or fxmem diff TARGET --git main"
        raise UsageError("name two saved reports, or a TARGET and --git", hint=hint)
    root = find_root(os.getcwd())
    reports = [parse_report(read_text(path, "report")) for path in paths]
    return compare(*(read_footprint(report, root) for report in reports), names=paths)


def find_root(folder: str) -> str:
    """Finds the folder of the git repository around a folder; without one, that folder."""
    path = Path(folder).resolve()
    return str(next((each for each in (path, *path.parents) if (each / ".git").exists()), path))


def analyze_revision(target: str, options: Sequence[str], revision: str) -> tuple[Footprint, str]:
    """Analyses a step at a revision, checked out in a temporary folder.

    Args:
        target: The TARGET, which is relative to the current folder.
        options: The options of ``fxmem analyze``.
        revision: The branch, tag or commit.

    Returns:
        The peak, and the revision's name with its commit.

    Raises:
        UsageError: There is no such revision.
        FxmemError: The step cannot be loaded or traced there.
    """
    cwd, root = os.path.realpath(os.getcwd()), find_root(os.getcwd())
    if not os.path.exists(os.path.join(root, ".git")):
        raise UsageError(f"{cwd} is not in a git repository", hint="compare two reports instead")
    found = _run_git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    commit = found.stdout.strip()
    if not commit:
        hint = found.stderr or "is it fetched? In GitHub Actions: fetch-depth: 0"
        raise UsageError(f"git knows no revision {revision!r}", hint=hint)
    name = f"{revision} ({commit[:9]})"
    with tempfile.TemporaryDirectory(prefix="fxmem-") as folder:
        folder = os.path.realpath(folder)
        tree, archive, path = (os.path.join(folder, n) for n in ("tree", "tar", "report.json"))
        made = _run_git(root, "archive", "--format=tar", "-o", archive, commit)
        if made.returncode:
            raise UsageError(f"git cannot check out {revision!r}", hint=made.stderr)
        with tarfile.open(archive) as opened:
            opened.extractall(tree, filter="tar")
        inner = os.path.relpath(cwd, root)
        moved_cwd = os.path.normpath(os.path.join(tree, inner))
        if not os.path.isdir(moved_cwd):
            raise UsageError(f"there is no folder {inner!r} at {revision}")
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, "analyze", target, *options, "--json", "-o", path],
            cwd=moved_cwd,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_move_paths(root, tree))},
            capture_output=True,
            text=True,
        )
        if not os.path.exists(path):
            errors = [line for line in done.stderr.splitlines() if line.startswith(_ERROR)]
            cause = errors[-1].removeprefix(_ERROR) if errors else done.stderr
            raise LoadError(f"at {name}: {cause}")
        with open(path, encoding="utf-8") as file:
            report = parse_report(file.read())
    files = [node["source"]["file"] for node in report["nodes"] if node["source"]]
    strays = [file for file in files if _is_below(file, root) and not is_installed(file)]
    if strays:
        raise LoadError(
            f"at {name}, the model still comes from the working tree, {strays[0]}",
            hint="name its file: path/to/file.py:Model",
        )
    return read_footprint(report, tree), name


def _run_git(root: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise UsageError("git is not installed", hint="compare two reports instead") from None


def _move_paths(root: str, tree: str) -> list[str]:
    """Lists where the revision's code is imported from, also if the repository is installed."""
    own = os.path.dirname(os.path.dirname(os.path.realpath(fxmem.__file__)))
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = [*filter(None, sys.path), os.path.join(root, "src")]
    below = [p for p in places if _is_below(p, root) and os.path.realpath(p) != own]
    moved = [os.path.join(tree, os.path.relpath(os.path.realpath(path), root)) for path in below]
    return [*moved, *(path for path in given if path and path not in below)]


def _is_below(path: str, root: str) -> bool:
    return f"{os.path.realpath(path)}{os.sep}".startswith(f"{root}{os.sep}")
