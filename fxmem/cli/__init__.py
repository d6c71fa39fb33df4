"""The command line: parses, calls fxmem, writes the result to stdout and the rest to stderr."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn, Protocol

import fxmem
from fxmem.cli import (
    analyze,
    batches,
    check,
    diff,
    doctor,
    explain,
    fit,
    max_batch,
    pipeline,
    plan,
    render,
    run,
    sweep,
    verify,
)
from fxmem.cli.shared.output import EXIT_USAGE, keep_stdout, write_line
from fxmem.errors import FxmemError, suggest_names, summarize_error
from fxmem.plugins import load_plugins
from fxmem.report.tables import escape_controls


class Command(Protocol):
    """The module of a command."""

    HELP: str
    DESCRIPTION: str
    EPILOG: str  # explains the exit codes too

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Adds what the command takes."""

    def run_command(self, arguments: argparse.Namespace) -> int:
        """Checks the arguments before torch is imported, runs, and returns the exit code.

        Raises:
            FxmemError: For bad usage, and where a model cannot be loaded or traced.
        """


COMMANDS: dict[str, Command] = {
    "analyze": analyze,
    "plan": plan,
    "max-batch": max_batch,
    "batches": batches,
    "fit": fit,
    "pipeline": pipeline,
    "render": render,
    "verify": verify,
    "diff": diff,
    "check": check,
    "explain": explain,
    "run": run,
    "sweep": sweep,
    "doctor": doctor,
}
_TARGET = """\
TARGET is package.module:name or path/to/file.py:name; the name is an nn.Module class or
instance, or a callable that returns one. Literals may be passed: 'nets.py:resnet(depth=50)'.
"""
_WITHOUT_TARGET = ("check", "run", "sweep", "doctor")
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count

_EPILOG = """\
examples:
  fxmem analyze resnet.py:ResNet18 --input 8x3x224x224 --optimizer adam
  fxmem analyze gpt.py:'GPT(layers=24)' --input 4x512:int64 --budget 8GiB
  fxmem analyze nets.vit:build --input 1x3x224x224 --mode infer --json
  fxmem run train.py --batch-size 64
  fxmem plan gpt.py:GPT --input 4x512:int64 --optimizer adamw --budget 8GiB
  fxmem max-batch gpt.py:GPT --input 4x512:int64 --optimizer adamw --gpu rtx4090
  fxmem batches gpt.py:GPT --input 8x512:int64 --optimizer adamw --sizes lengths.json
  fxmem render gpt.py:GPT --input 4x512:int64 -o peak.svg
  fxmem explain FX101

exit codes:
  0  fine
  1  a finding: a peak over its budget or grown too much, no plan within a budget, or a plan
     that changes results
  2  bad usage, or a model that cannot be loaded or traced
"""
_NEGATIVE = re.compile(r"-\.?\d")


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, like every other error of fxmem."""

    def error(self, message: str) -> NoReturn:
        hint = f"try {self.prog} --help"
        if "--mode" in message and "'eval'" in message:
            hint = "did you mean infer?"
        self.exit(EXIT_USAGE, f"{_write_error(message, hint)}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments after the program's name; None takes the process's own.

    Returns:
        The exit code: 0 fine, 1 a finding, 2 bad usage or a model that cannot be analysed.
    """
    if sys.stderr is None:  # closed; what is written there is for nobody
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    # argparse takes a negative value for an option unless ``=`` stands before it.
    joined: list[str] = []
    for text in sys.argv[1:] if argv is None else argv:
        if _NEGATIVE.match(text) and joined and joined[-1].startswith("--"):
            joined[-1] += f"={text}"
        else:
            joined.append(text)
    load_plugins()
    parser = _build_parser()
    if joined and not joined[0].startswith("-") and joined[0] not in COMMANDS:
        write_line(_explain_command(joined[0]))
        return EXIT_USAGE
    arguments = argparse.Namespace(debug=False)
    try:
        arguments, unknown = parser.parse_known_args(joined)
        if unknown:
            write_line(_explain_unknown(unknown, arguments.parser))
            return EXIT_USAGE
        with keep_stdout():
            code: int = arguments.run(arguments)
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if arguments.debug:
            # Of an error that fxmem explains, what it explains: its own text comes below.
            traceback.print_exception(error.__cause__ or error)
        if isinstance(error, FxmemError):
            write_line(_write_error(error.cause, error.hint))
            return error.exit_code
        cause = f"internal error: {summarize_error(error)}"
        write_line(_write_error(cause, "" if arguments.debug else "rerun with --debug"))
        return EXIT_USAGE


def _explain_command(name: str) -> str:
    if close := suggest_names(name, COMMANDS):
        hint = close
    elif ":" in name or name.endswith(".py"):
        hint = f"write fxmem analyze {name}"
    else:
        hint = f"use {', '.join(COMMANDS)}"
    return _write_error(f"unknown command {name!r}", hint)


def _explain_unknown(unknown: list[str], parser: argparse.ArgumentParser) -> str:
    name = unknown[0].partition("=")[0]
    close = suggest_names(name, parser._option_string_actions)
    if name.startswith("--batch-"):
        hint = "the batch is the first size of each --input; fxmem max-batch finds the largest"
    elif name in parser._option_string_actions:
        hint = f"write {parser.prog} {name}"
    elif name.startswith("-") and close:
        hint = close
    elif name[:1].isdigit():
        hint = f"a shape is given as --input {name}"
    else:
        hint = f"try {parser.prog} --help"
    return _write_error(f"unrecognized arguments: {' '.join(unknown)}", hint)


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fxmem",
        description="Predicts the memory of a PyTorch training step, and plans for less.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fxmem {fxmem.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        about = "" if name in _WITHOUT_TARGET else f"\n\n{_TARGET}"
        added = commands.add_parser(
            name,
            help=command.HELP,
            description=command.DESCRIPTION + about,
            epilog=command.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=command.run_command, parser=added)
        command.add_options(added)
    return parser


def _write_error(cause: str, hint: str) -> str:
    text = f"{cause} ({hint})" if hint else cause
    return f"fxmem: error: {escape_controls(' '.join(text.split()))}"
