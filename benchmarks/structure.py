"""Counts lines, files, functions and frames of the project itself.

    python -m benchmarks.structure [--json]

Lines and files are those of the work tree. Calls are those of one `fxmem.analyze` of the README's
ResNet-18, which enters files and functions of fxmem, and reaches the ledger of storages through
some depth of frames.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).parents[1]
CODE = ("fxmem", "tests")
MOST_FILES = 16
MOST_LINES = 70
LEDGER = "recording/ledger.py"
_NO_FUNCTIONS = ("<module>", "<listcomp>", "<dictcomp>", "<setcomp>")


@dataclass(frozen=True)
class Calls:
    """Calls of one analysis.

    Attributes:
        files: Files of fxmem that are entered.
        functions: Functions of fxmem that are entered.
        calls: Calls of these functions.
        frames: Frames of fxmem from `analyze` to the call in the ledger that has most of them.
        all_frames: Frames of any code from `analyze` to the deepest call in the ledger.
        stack: The functions of `frames`, from `analyze` on.
    """

    files: int
    functions: int
    calls: int
    frames: int
    all_frames: int
    stack: tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """Counts of the work tree and of an analysis.

    Attributes:
        lines: Lines of Python, by folder of code.
        crowded: Folders with more than `MOST_FILES` files side by side, and how many.
        long: Functions of more than `MOST_LINES` lines, and how many.
        calls: Calls of one analysis.
    """

    lines: dict[str, int]
    crowded: dict[str, int]
    long: dict[str, int]
    calls: Calls


def count_lines(root: Path = ROOT) -> dict[str, int]:
    """Counts the lines of Python in each folder of code."""
    return {
        folder: sum(len(path.read_text().splitlines()) for path in (root / folder).rglob("*.py"))
        for folder in CODE
    }


def find_crowded_folders(root: Path = ROOT) -> dict[str, int]:
    """Finds the folders of code with more than `MOST_FILES` files of Python side by side."""
    paths = (path for folder in CODE for path in (root / folder).rglob("*.py"))
    counts = Counter(path.parent.relative_to(root).as_posix() for path in paths)
    return {folder: count for folder, count in sorted(counts.items()) if count > MOST_FILES}


def find_long_functions(root: Path = ROOT) -> dict[str, int]:
    """Finds the functions of more than `MOST_LINES` lines, without decorators and docstring."""
    found = {}
    for path in sorted(path for folder in CODE for path in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    count -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                if count > MOST_LINES:
                    found[f"{path.relative_to(root).as_posix()}:{node.name}"] = count
    return found


def count_calls(function: Callable[[], Any], package: Path = ROOT / "fxmem") -> Calls:
    """Counts the calls that a function makes within a package.

    Code of modules and of comprehensions is left out: the one runs at an import, the other is a
    part of its function from Python 3.12 on.
    """
    codes: Counter[CodeType] = Counter()
    prefix, ledger = f"{package}/", str(package / LEDGER)
    stack: list[str] = []
    all_frames = 0

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal stack, all_frames
        code = frame.f_code
        if event != "call" or not _is_counted(code, prefix):
            return
        codes[code] += 1
        if code.co_filename == ledger:
            frames = list(_iterate_frames(frame, function.__code__))
            own = [each for each in frames if _is_counted(each.f_code, prefix)]
            stack = max(stack, [each.f_code.co_name for each in reversed(own)], key=len)
            all_frames = max(all_frames, len(frames))

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    files = {code.co_filename for code in codes}
    return Calls(len(files), len(codes), codes.total(), len(stack), all_frames, tuple(stack))


def _is_counted(code: CodeType, prefix: str) -> bool:
    return code.co_filename.startswith(prefix) and code.co_name not in _NO_FUNCTIONS


def _iterate_frames(frame: FrameType | None, end: CodeType) -> Iterator[FrameType]:
    while frame is not None and frame.f_code is not end:
        yield frame
        frame = frame.f_back


def count_calls_of_analysis() -> Calls:
    """Counts the calls of `fxmem.analyze` of the README's ResNet-18."""
    import fxmem
    from examples.resnet import ResNet18

    fxmem.analyze("torch:nn.Linear(1, 1)", "1x1", optimizer="adam")  # imports what it needs
    model = ResNet18()

    def analyze() -> None:
        fxmem.analyze(model, ("8x3x224x224",), optimizer="adam")

    return count_calls(analyze)


def format_structure(structure: Structure) -> str:
    """Returns a table in Markdown."""
    calls = structure.calls
    rows: list[tuple[str, int]] = [
        *((f"lines of {folder}/", count) for folder, count in structure.lines.items()),
        *(
            (f"files side by side in {folder}/", count)
            for folder, count in structure.crowded.items()
        ),
        *((f"lines of {function}", count) for function, count in structure.long.items()),
        ("files of fxmem that `analyze` enters", calls.files),
        ("functions of fxmem that `analyze` enters", calls.functions),
        ("calls of these functions", calls.calls),
        ("frames of fxmem from `analyze` to the ledger", calls.frames),
        ("frames of any code from `analyze` to the ledger", calls.all_frames),
    ]
    return tabulate(rows, headers=("what", "count"), tablefmt="github", intfmt=",")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    structure = Structure(
        count_lines(), find_crowded_folders(), find_long_functions(), count_calls_of_analysis()
    )
    print(json.dumps(asdict(structure)) if options.json else format_structure(structure))


if __name__ == "__main__":
    main()
