"""``fxmem sweep``: a command with each combination of settings."""

from __future__ import annotations

import argparse

import fxmem
from fxmem.cli.shared.output import (
    EXIT_FINDING,
    add_output_options,
    choose_format,
    show_progress,
    write_result,
)
from fxmem.cli.shared.step import add_count
from fxmem.sweeping.executors import connect_dask, make_submitit

HELP = "a command with each combination of settings, in one table"
DESCRIPTION = """\
Runs fxmem analyze, or fxmem run, with each combination of settings that a file
lists, each in a process of its own. A row is kept as soon as it ends: a sweep
that was stopped goes on where it was.

  command = "analyze gpt.py:GPT --input {batch}x512:int64 --gpu {gpu}"

  [grid]
  batch = [1, 2, 4, 8]
  gpu = ["rtx4090", "h100"]
"""
EPILOG = """\
examples:
  fxmem sweep grid.toml
  fxmem sweep grid.toml --jobs 4 -o table.md
  fxmem sweep grid.toml --scheduler tcp://10.0.0.1:8786

exit codes: 0 fine, 1 a row failed, 2 bad usage
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("grid", metavar="GRID", help="the file, NAME.toml")
    parser.add_argument(
        "--rows", metavar="FILE", help="where rows are kept, as JSON lines (default: NAME.jsonl)"
    )
    where = parser.add_mutually_exclusive_group()
    add_count(where, "--jobs", "rows at once on this machine (default: its cores)")
    where.add_argument(
        "--scheduler", metavar="ADDRESS", help="run the rows on a cluster of dask.distributed"
    )
    where.add_argument(
        "--submitit",
        metavar="FOLDER",
        help="submit the rows to Slurm by submitit; logs go to FOLDER",
    )
    add_output_options(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Runs the rows and writes the table."""
    kind, executor = choose_format(arguments), None
    if arguments.scheduler is not None:
        executor = connect_dask(arguments.scheduler)
    elif arguments.submitit is not None:
        executor = make_submitit(arguments.submitit)
    so_far = [""]

    def tell(done: int, count: int) -> None:
        so_far[0] = f", {done} of {count} rows"

    with show_progress(f"sweeping {arguments.grid}", details=lambda: so_far[0]):
        found = fxmem.sweep(
            arguments.grid,
            arguments.rows,
            executor=executor,
            jobs=arguments.jobs,
            progress=tell,
        )
    write_result(found, kind, arguments.output)
    return EXIT_FINDING if found.failed else 0
