"""One step at a revision of a git repository, analysed in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import fxmem
from fxmem.comparison.footprints import Footprint, read_footprint
from fxmem.errors import LoadError, UsageError
from fxmem.graph import is_installed
from fxmem.report.json_report import parse_report

_CHILD = "import sys; sys.path.pop(0); from fxmem.cli import main; sys.exit(main(sys.argv[1:]))"
"""Not ``-m fxmem``, which would prefer a folder of that name in the repository."""
_ERROR = "fxmem: error: "


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
