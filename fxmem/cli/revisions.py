"""One step at two revisions of a git repository, each analysed in a process of its own."""

from __future__ import annotations

import contextlib
import difflib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fxmem
from fxmem.comparison.changes import LineMap
from fxmem.comparison.footprints import Footprint, read_footprint
from fxmem.errors import LoadError, UsageError
from fxmem.graph import SourceLocation, is_installed
from fxmem.report.json_report import parse_report

_CHILD = "import sys; sys.path.pop(0); from fxmem.cli import main; sys.exit(main(sys.argv[1:]))"
"""Not ``-m fxmem``, which would prefer a folder of that name in the repository."""
_ERROR = "fxmem: error: "
_OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


@dataclass(frozen=True, slots=True)
class Revision:
    """A revision of a repository.

    Attributes:
        name: As the user names it, with its commit.
        root: The folder in which it is checked out.
        cwd: The folder in it that the user is in.
    """

    name: str
    root: str
    cwd: str


def find_root(folder: str) -> str:
    """Finds the folder of the git repository around a folder; without one, that folder."""
    root = os.path.realpath(folder)
    while not os.path.exists(os.path.join(root, ".git")):
        if root == os.path.dirname(root):
            return os.path.realpath(folder)
        root = os.path.dirname(root)
    return root


def locate_target(target: str, root: str) -> SourceLocation | None:
    """Locates a TARGET's file, for findings that have no line of the repository."""
    where = target.partition(":")[0]
    inner = where.replace(".", os.sep)
    for name in (where, f"{inner}.py", os.path.join(inner, "__init__.py")):
        for path in map(os.path.realpath, (name, os.path.join("src", name))):
            if path.endswith(".py") and os.path.isfile(path) and _is_below(path, root):
                return SourceLocation(os.path.relpath(path, root), 1)
    return None


def analyze_revisions(
    target: str, options: Sequence[str], revisions: str
) -> tuple[list[Footprint], LineMap, tuple[str, str]]:
    """Analyses a step at two revisions, at the same time.

    Args:
        target: The TARGET.
        options: The options of ``fxmem analyze``.
        revisions: ``REVISION``, to compare the working tree with, or ``REVISION..REVISION``.

    Returns:
        The two peaks, the lines that the revisions share, and the names of the two.

    Raises:
        UsageError: There is no such revision.
        FxmemError: A step cannot be loaded or traced, with the revision.
    """
    cwd, root = os.getcwd(), find_root(os.getcwd())
    if not os.path.exists(os.path.join(root, ".git")):
        raise UsageError(f"{cwd} is not in a git repository", hint="compare two reports instead")
    old, separator, new = revisions.partition("..")
    if not old or (separator and not new) or new.startswith("."):
        hint = "write main, or main..HEAD"
        raise UsageError(f"{revisions!r} does not name one or two revisions", hint=hint)
    where, colon, rest = target.partition(":")
    if os.path.isfile(where) and not _is_below(where, root):  # the same for both
        target = f"{os.path.realpath(where)}{colon}{rest}"
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(_check_out(root, old))]
        tree = Revision("working tree", root, os.path.realpath(cwd))
        sides.append(stack.enter_context(_check_out(root, new)) if new else tree)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fxmem-"))
        started = []
        for at, side in enumerate(sides):
            path = os.path.join(folder, f"{at}.json")
            arguments = [target, *options, "--json", "-o", path]
            process = stack.enter_context(_start(side, root, arguments))
            started.append((side, path, process))
        try:
            reports = [_finish(root, *each) for each in started]
        finally:
            for _, _, process in started:
                process.kill()
        files = {n["source"]["file"] for n in reports[1]["nodes"] if n["source"]}
        lines = map_lines(sides[0].root, sides[1].root, files)
        peaks = [read_footprint(r, side.root) for r, side in zip(reports, sides, strict=True)]
    return peaks, lines, (sides[0].name, sides[1].name)


@contextlib.contextmanager
def _check_out(root: str, revision: str) -> Iterator[Revision]:
    found = _run_git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    commit = found.stdout.strip()
    if not commit:
        cause = f"git knows no revision {revision!r}"
        hint = found.stderr or "is it fetched? In GitHub Actions: fetch-depth: 0"
        raise UsageError(cause, hint=hint)
    with tempfile.TemporaryDirectory(prefix="fxmem-") as folder:
        tree = os.path.join(os.path.realpath(folder), os.path.basename(root))
        try:
            # No hooks of the user's run, and no weights are downloaded by Git LFS.
            hooks = ["-c", "core.hooksPath=/dev/null"]
            made = _run_git(root, *hooks, "worktree", "add", "--quiet", "--detach", tree, commit)
            if made.returncode:
                raise UsageError(f"git cannot check out {revision!r}", hint=made.stderr)
            inner = os.path.relpath(os.path.realpath(os.getcwd()), root)
            cwd = os.path.normpath(os.path.join(tree, inner))
            if not os.path.isdir(cwd):
                raise UsageError(f"there is no folder {inner!r} at {revision}")
            yield Revision(f"{revision} ({commit[:9]})", tree, cwd)
        finally:
            _run_git(root, "worktree", "remove", "--force", tree)


def _run_git(root: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # In a hook, git names the index of the commit in the making, which a worktree would overwrite.
    environment = {k: v for k, v in os.environ.items() if k not in _OF_HOOKS}
    environment["GIT_LFS_SKIP_SMUDGE"] = "1"
    command = ["git", "-C", root, *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, env=environment)
    except FileNotFoundError:
        raise UsageError("git is not installed", hint="compare two reports instead") from None


def _start(side: Revision, root: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Starts an analysis that imports the revision's code, also if the repository is installed."""
    own = os.path.dirname(os.path.dirname(os.path.realpath(fxmem.__file__)))

    def is_of_tree(path: str) -> bool:
        return _is_below(path, root) and os.path.realpath(path) != own

    places = [*filter(is_of_tree, filter(None, sys.path)), os.path.join(root, "src")]
    moved = [os.path.join(side.root, os.path.relpath(os.path.realpath(p), root)) for p in places]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [*moved, *(path for path in given if path and not is_of_tree(path))]
    return subprocess.Popen(
        [
            *(sys.executable, "-c", _CHILD, "analyze"),
            *(text.replace(f"{root}{os.sep}", f"{side.root}{os.sep}") for text in arguments),
        ],
        cwd=side.cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(root: str, side: Revision, path: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    _, err = process.communicate()
    if not os.path.exists(path):
        errors = [line for line in err.splitlines() if line.startswith(_ERROR)]
        raise LoadError(f"at {side.name}: {errors[-1].removeprefix(_ERROR) if errors else err}")
    with open(path, encoding="utf-8") as file:
        report = parse_report(file.read())
    files = [node["source"]["file"] for node in report["nodes"] if node["source"]]
    strays = [file for file in files if _is_below(file, root) and not is_installed(file)]
    if strays and side.root != root:
        raise LoadError(
            f"at {side.name}, the model still comes from the working tree, {strays[0]}",
            hint="name its file: path/to/file.py:Model",
        )
    return report


def _is_below(path: str, root: str) -> bool:
    return f"{os.path.realpath(path)}{os.sep}".startswith(f"{root}{os.sep}")


def map_lines(old_root: str, new_root: str, files: Iterable[str]) -> dict[str, Mapping[int, int]]:
    """Finds the lines that two checkouts share.

    Args:
        old_root: The folder of the one.
        new_root: The folder of the other.
        files: Files of the other.

    Returns:
        By file, relative to its folder: the new numbers of lines by their old ones.
    """
    found: dict[str, Mapping[int, int]] = {}
    for file in files:
        name, texts = os.path.relpath(file, new_root), []
        for root in (old_root, new_root):
            path = os.path.join(root, name)
            if not name.startswith(os.pardir) and os.path.isfile(path):
                with open(path, encoding="utf-8", errors="replace") as opened:
                    texts.append(opened.read().splitlines())
        if len(texts) == 2:
            matcher = difflib.SequenceMatcher(None, texts[0], texts[1], autojunk=False)
            blocks = matcher.get_matching_blocks()
            found[name] = {a + i + 1: b + i + 1 for a, b, size in blocks for i in range(size)}
    return found
