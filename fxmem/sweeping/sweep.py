"""Sweeps: the rows of a grid, run by an executor, and written as they end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxmem.errors import UsageError
from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.result import Result
from fxmem.report.tables import Bytes, Cell, Table
from fxmem.sweeping.grid import read_grid, run_row

_FIGURES = ("peak", "reserved", "process")


@dataclass(frozen=True, slots=True)
class Sweep(Result):
    """The rows of a grid, in its order.

    Attributes:
        name: The file of the grid.
        rows: Of each its ``command``, its ``values`` by name, ``peak_bytes``, ``reserved_bytes``,
            ``process_bytes`` (the most, to be asked of a scheduler), ``fits``, the ``phase`` and
            ``node`` of the peak, and the ``error``, empty for none.
    """

    name: str
    rows: tuple[Mapping[str, Any], ...]

    @property
    def failed(self) -> int:
        """How many rows have an error."""
        return sum(bool(row["error"]) for row in self.rows)

    def list_blocks(self) -> list[Block]:
        names = list(self.rows[0]["values"])
        rows = [(*row["values"].values(), *_write_figures(row)) for row in self.rows]
        note = [f"{self.failed} of {len(self.rows)} rows failed."] if self.failed else []
        return [
            Heading(f"{len(self.rows)} rows", [self.name]),
            Table([*names, *_FIGURES, "fits"], rows, right=_FIGURES, names=("fits",)),
            Paragraph(note),
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": 1, "rows": [dict(row) for row in self.rows]}


def _write_figures(row: Mapping[str, Any]) -> list[Cell]:
    if row["error"]:
        return ["", "", "", row["error"]]
    sizes = [row[f"{name}_bytes"] for name in _FIGURES]
    fits = {True: "yes", False: "no", None: ""}[row["fits"]]
    return [*("" if size is None else Bytes(size) for size in sizes), fits]


def sweep(
    grid: str,
    output: str | None = None,
    *,
    executor: Executor | None = None,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Sweep:
    """Runs each row of a grid in a process of its own.

    A row is written to a file as soon as it ends. Rows that are there already, without an error,
    do not run again: a sweep that was stopped goes on.

    Args:
        grid: A TOML file: a ``command`` with names in braces, ``"analyze gpt.py:GPT --input
            {batch}x512:int64"``, and a table ``[grid]`` with a list of values for each name.
        output: The file, with a line of JSON for each row. None for the grid's name with
            ``.jsonl``.
        executor: Any executor, such as dask's ``Client.get_executor()``: its workers need fxmem
            and the folder of the grid. None for processes of this machine.
        jobs: How many of these at once. None for as many as there are cores.
        progress: Is told how many rows are done, and how many there are.

    Raises:
        UsageError: The grid cannot be read, or the file is of another grid.
    """
    rows, folder = read_grid(grid), str(Path(grid).resolve().parent)
    path = Path(output or Path(grid).with_suffix(".jsonl"))
    done = {command: found for command, found in _read_rows(path).items() if not found["error"]}
    own = None if executor else ThreadPoolExecutor(jobs or os.cpu_count())
    with path.open("a", encoding="utf-8") as file:
        pool = executor or own
        assert pool is not None
        futures = {
            pool.submit(run_row, command, folder): command for command in rows.keys() - done.keys()
        }
        try:
            for future in as_completed(futures):
                command = futures.pop(future)
                found = {"command": command, "values": rows[command], **_find_result(future)}
                file.write(f"{json.dumps(found)}\n")
                file.flush()
                done[command] = found
                if progress is not None:
                    progress(len(rows) - len(futures), len(rows))
        finally:
            for future in futures:
                future.cancel()
            if own is not None:
                own.shutdown(cancel_futures=True)
    return Sweep(grid, tuple(_NOTHING | done[command] for command in rows))


_NOTHING: dict[str, Any] = dict.fromkeys(
    ("peak_bytes", "reserved_bytes", "process_bytes", "fits", "phase", "node")
)


def _find_result(future: Any) -> dict[str, Any]:
    try:
        result: dict[str, Any] = future.result()
        return result
    except Exception as error:  # of an executor whose worker is gone
        return {"error": f"{type(error).__name__}: {error}".strip(": ")}


def _read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Reads the rows of a file, the last of each command; a line that was cut is passed over."""
    if not path.exists():
        return {}
    found = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for at, line in enumerate(lines):
        try:
            row = json.loads(line)
            found[row["command"]] = row
            row["error"], row["values"]
        except (ValueError, KeyError, TypeError):
            if at < len(lines) - 1:
                raise UsageError(f"{path} is no file of a sweep", hint="-o NAME.jsonl") from None
    if lines and not path.read_text(encoding="utf-8").endswith("\n"):
        path.write_text("".join(f"{json.dumps(row)}\n" for row in found.values()))
    return found
