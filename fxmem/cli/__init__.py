"""The command line: parses, calls fxmem, writes the result to stdout and the rest to stderr."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import fxmem
from fxmem.cli import analyze
from fxmem.errors import FxmemError
from fxmem.report.cells import escape_controls

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count

_EPILOG = """\
examples:
  fxmem analyze resnet.py:ResNet18 --input 8x3x224x224 --optimizer adam
  fxmem analyze gpt.py:'GPT(layers=24)' --input 4x512:int64 --budget 8GiB
  fxmem analyze nets.vit:build --input 1x3x224x224 --mode infer --json

exit codes:
  0  fine
  1  a finding, such as a peak over --budget
  2  bad usage, or a model that cannot be loaded or traced
"""


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, like every other error of fxmem."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{_write_error(message, f'try {self.prog} --help')}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments after the program's name; None takes the process's own.

    Returns:
        The exit code: 0 fine, 1 a finding, 2 bad usage or a model that cannot be analysed.
    """
    arguments = _build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        return _report_error(error, arguments.debug)


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fxmem",
        description="How much memory a PyTorch training step takes, before the run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fxmem {fxmem.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    analyze.add_parser(commands)
    return parser


def _report_error(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, FxmemError):
        line, code = _write_error(error.cause, error.hint), error.exit_code
    else:
        cause = f"internal error: {type(error).__name__}: {error}"
        line, code = _write_error(cause, "" if debug else "rerun with --debug"), EXIT_USAGE
    print(line, file=sys.stderr)
    return code


def _write_error(cause: str, hint: str) -> str:
    text = f"{cause} ({hint})" if hint else cause
    return f"fxmem: error: {escape_controls(' '.join(text.split()))}"
