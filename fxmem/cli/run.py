"""``fxmem run``: the steps of a training script, run as it is."""

from __future__ import annotations

import argparse
import contextlib
import sys

import fxmem
from fxmem.cli.analyze import add_step_output, check_fit
from fxmem.cli.shared.output import choose_format, show_progress, write_line, write_result
from fxmem.cli.shared.step import (
    add_compile_options,
    add_count,
    add_gpu_options,
    add_routing,
    add_size_hint,
    parse_size_hint,
)
from fxmem.errors import FxmemError, UsageError
from fxmem.scripts.script_run import Progress

HELP = "the steps of a training script, run as it is"
DESCRIPTION = """\
Runs a training script as it is, where no GPU is: what it puts on cuda becomes
fake tensors, which take no memory, and data sets, loaders and files stay real.
Ends it after some steps of its optimizers, and reports the largest and the first.
"""
EPILOG = """\
examples:
  fxmem run train.py configs/small.yaml
  fxmem run --gpu rtx4090 --steps 5 train.py configs/small.yaml
  fxmem run -o report.html -m package.train configs/small.yaml
  fxmem run --world-size 8 train_fsdp.py
  fxmem run -- torchrun --nproc-per-node 8 train_fsdp.py

exit codes: 0 fine, 1 over --budget or too large for the --gpu, 2 bad usage or a script
that fails
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", metavar="SCRIPT", help="the script, as for python, or a launcher")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="its arguments"
    )
    add_count(
        parser,
        "--steps",
        "end the script when each optimizer has stepped N times (default: 3, or 2 where a "
        "step has more than 100,000 operators)",
    )
    parser.add_argument(
        "--until",
        type=lambda text: int(text) if text.isdecimal() else text,
        metavar="WHAT",
        help="go on until the script has evaluated its model (evaluation) or saved (save), its "
        "loader has ended (epoch), or N steps have run; of more steps, larger ones are kept",
    )
    parser.add_argument(
        "--fullest",
        action="store_true",
        help="read the loader of the steps to its end, and give them its largest batches",
    )
    add_count(
        parser,
        "--world-size",
        "run as one of N processes, as torchrun --nproc-per-node=N starts (default: as "
        "many as the script starts)",
    )
    add_count(parser, "--rank", "which of them", 0)
    add_gpu_options(parser, "; exit 1 if a step does not fit it")
    add_size_hint(parser, "how many elements nonzero() and boolean masks find (default: all)")
    add_routing(parser)
    add_count(parser, "--new", "transformers' generate() ends after N tokens (default: its limit)")
    add_compile_options(parser, can_ask=False)
    add_step_output(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Runs a script and writes the result; what the script prints goes to stderr."""
    if arguments.top < 0:
        raise UsageError(f"--top must be 0 or more, got {arguments.top}")
    kind = choose_format(arguments)
    progress = Progress()
    details = lambda: progress.describe()  # noqa: E731 - another one, once the script runs
    shown = show_progress(f"running {arguments.script}", details=details)
    names = "is_module steps until fullest device gpu reserve attention alloc_conf compile".split()
    names += ["activation_memory_budget", "world_size", "rank", "routing"]
    try:
        with shown, contextlib.redirect_stdout(sys.stderr):
            run = fxmem.run(
                arguments.script,
                arguments.arguments,
                size_hint=parse_size_hint(arguments.size_hint),
                new_tokens=arguments.new,
                progress=progress,
                **{name: getattr(arguments, name) for name in names},
            )
    except KeyboardInterrupt:
        write_line("fxmem: interrupted before a step was recorded: no report")
        raise
    except FxmemError:
        if progress.recorded is not None:
            write_result(progress.recorded, kind, arguments.output, top=arguments.top)
        raise
    write_result(run, kind, arguments.output, top=arguments.top)
    code = check_fit(run.largest, arguments.budget)
    if run.partial:
        raise KeyboardInterrupt
    return code
