"""``fxmem batches``: memory of an epoch whose samples have different sizes."""

from __future__ import annotations

import argparse
from dataclasses import replace

import fxmem
from fxmem.cli.shared.output import (
    EXIT_FINDING,
    add_output_options,
    choose_format,
    show_progress,
    write_line,
    write_result,
)
from fxmem.cli.shared.step import add_count, add_step_options, parse_step, run_user_code

HELP = "the fullest of batches of different sizes, and fragmentation"
DESCRIPTION = """\
Computes the memory of an epoch's batches, whose samples have different sizes: the peaks of half,
90 %, 99 % and all of them; what padding costs against batches that are grouped by size, packed or
cut; and what the allocator reserves after many of them, with several PYTORCH_ALLOC_CONF.

Dimension 0 of the inputs says how many samples a batch has."""
EPILOG = """\
examples:
  fxmem batches gpt.py:GPT --input 8x512:int64 --sizes lengths.json --optimizer adamw --gpu rtx4090
  fxmem batches gpt.py:GPT --input 8x512:int64 --sizes 64-2048 --cap 1024
  fxmem batches unet.py:UNet --input 4x3x256x256 --sizes 256-640 --axis 2,3 --multiple-of 32

exit codes: 0 fine, 1 batches do not fit the GPU, 2 bad usage or a model that cannot be loaded or
traced
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_step_options(parser, checks_fit=False)
    data = parser.add_argument_group("the data")
    data.add_argument(
        "--sizes",
        required=True,
        metavar="SIZES",
        help="a JSON file with a list of the sizes of samples, or an object of how many have each; "
        "or a range such as 64-2048",
    )
    data.add_argument(
        "--axis",
        default="1",
        metavar="DIM",
        help="the dimension that is padded: 1, or 2,3, or NAME:1 of one input (default: 1)",
    )
    add_count(data, "--cap", "cut samples to N in one of the ways (default: longer than 99 %% are)")
    add_count(data, "--multiple-of", "batches are padded to a multiple of N")
    add_count(data, "--replay", "the allocator replays N batches (default: 200)")
    add_output_options(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Computes the memory of the batches and writes it."""
    kind, step = choose_format(arguments), parse_step(arguments)
    given = {name: getattr(arguments, name) for name in ("cap", "multiple_of", "replay")}
    options = {name: value for name, value in given.items() if value is not None}
    options |= {"sizes": arguments.sizes, "axis": arguments.axis, **step.options}
    with show_progress(f"analysing {arguments.target}"), run_user_code(step.target):
        found = fxmem.batches(step.target, step.args, step.kwargs, **options)
    found = replace(found, setup=replace(found.setup, model=arguments.target))
    write_result(found, kind, arguments.output)
    unfitting = found.batchings[0].unfitting
    if not unfitting:
        return 0
    count = len(found.batchings[0].batching.sizes)
    best = min(found.batchings, key=lambda way: way.unfitting or 0)
    others = f"; {best.label}: {best.unfitting:,}" if best is not found.batchings[0] else ""
    write_line(f"fxmem: {unfitting:,} of {count:,} batches do not fit {found.setup.gpu}{others}")
    return EXIT_FINDING
