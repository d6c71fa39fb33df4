"""Grids of settings, and one analysis of a grid in a process of its own."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import string
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxmem.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_COMMANDS = ("analyze", "run")
_EXAMPLE = 'command = "analyze gpt.py:GPT --input {batch}x512:int64", and batch = [1, 2] in [grid]'
_ERROR = "fxmem: error: "


def read_grid(path: str) -> dict[str, dict[str, str]]:
    """Reads a grid: a ``command`` with names in braces, and ``[grid]`` with the values of each.

    Returns:
        By command, the values in it, in the order of the grid; the last name changes fastest.

    Raises:
        UsageError: The file cannot be read, or is no grid.
    """
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the grid {path!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}", hint=_EXAMPLE) from error
    command, grid = found.get("command"), found.get("grid")
    if not isinstance(command, str) or not isinstance(grid, dict) or found.keys() - {*_KEYS}:
        raise UsageError(f"{path} is no grid", hint=_EXAMPLE)
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(command) if name is not None}
    except ValueError as error:
        raise UsageError(f"{path}: {error} in the command", hint=_EXAMPLE) from error
    for name in sorted(names ^ grid.keys()):
        where = "[grid] has no" if name in names else "the command does not use"
        raise UsageError(f"{path}: {where} {name!r}", hint=_EXAMPLE)
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"{path}: {name} must be a list of values", hint=_EXAMPLE)
    if command.split()[:1] not in [[each] for each in _COMMANDS]:
        raise UsageError(f"{path}: the command must be analyze or run", hint=_EXAMPLE)
    rows = (
        dict(zip(grid, map(str, values), strict=True))
        for values in itertools.product(*grid.values())
    )
    return {command.format(**row): row for row in rows}


_KEYS = ("command", "grid")


def run_row(command: str, folder: str) -> dict[str, Any]:
    """Runs a command of a grid in a process of its own, and reads the figures of its report.

    What any executor runs: arguments and result are plain. A process that is killed, as by a
    machine that is out of memory, is started once more.

    Args:
        command: The command, without ``fxmem``.
        folder: The folder to run in.
    """
    name, *words = shlex.split(command)
    with tempfile.TemporaryDirectory(prefix="fxmem-") as scratch:
        path = os.path.join(scratch, "report.json")
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-m", "fxmem", name, "--json", "-o", path, *words],
                cwd=folder,
                capture_output=True,
                text=True,
            )
            if done.returncode >= 0:
                break
        if not os.path.exists(path):
            return {"error": _find_error(done)}
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    return read_figures(report)


def read_figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the figures of a row from the values of a report."""
    peak, process = report["peak"], report["process_bytes"]
    return {
        "peak_bytes": report["peak_bytes"],
        "reserved_bytes": report["reserved_bytes"],
        "process_bytes": process and process[1],
        "fits": report["fits"],
        "phase": peak["phase"],
        "node": peak["node"],
        "error": "",
    }


def _find_error(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}, twice"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    return (errors or lines)[-1]
