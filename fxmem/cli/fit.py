"""``fxmem fit``: the meshes of GPUs and the knobs that a step fits."""

from __future__ import annotations

import argparse

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
from fxmem.errors import UsageError

HELP = "the meshes of GPUs, and the knobs, that fit"
DESCRIPTION = """\
Searches device meshes and settings with which one rank's step fits the GPU:
activation checkpointing, resharding, offloading, sharded optimizer state. --input is the batch of
one rank. Without --parallelize, fully_shard and DistributedDataParallel are compared."""
EPILOG = """\
examples:
  fxmem fit gpt.py:GPT --input 4x512:int64 --optimizer adamw --gpu h100 --gpus 64
  fxmem fit gpt.py:GPT --input 4x512:int64 --gpu h100 --gpus 64 --mixed-precision bf16
  fxmem fit gpt.py:GPT --input 4x512:int64 --gpu h100 --gpus 64 --parallelize gpt.py:parallelize \\
    --mesh 'dp=*,tp=*'

exit codes: 0 something fits, 1 nothing does, 2 bad usage or a model that cannot be loaded or traced
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_step_options(parser, checks_fit=False, has_layout=False)
    group = parser.add_argument_group("the GPUs that share it (need not be present)")
    add_count(group, "--gpus", "how many", 8)
    add_count(group, "--gpus-per-node", "how many of them share a node", 8)
    group.add_argument(
        "--parallelize",
        metavar="TARGET",
        help="file.py:function(model, mesh) that parallelizes the model; or fsdp or ddp alone "
        "(default: both)",
    )
    group.add_argument(
        "--mesh",
        metavar="NAME=N,...",
        help="the function's mesh, e.g. 'dp=*,tp=*': sizes left open are tried, the first being "
        "what the others leave (default: dp=*)",
    )
    group.add_argument(
        "--mixed-precision",
        metavar="DTYPE",
        help="MixedPrecisionPolicy(param_dtype=DTYPE, reduce_dtype=torch.float32), e.g. bf16; "
        "under ddp autocast (default: none)",
    )
    parser.set_defaults(rank="0", fsdp=None, ddp=None)
    add_output_options(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Finds what fits and writes it."""
    if arguments.gpu is None:
        raise UsageError("no GPU is given", hint="--gpu h100")
    step = parse_step(arguments)
    step.options.pop("rank")
    kind = choose_format(arguments)
    with show_progress(f"fitting {arguments.target}"), run_user_code(step.target):
        found = fxmem.fit(
            step.target,
            step.args,
            step.kwargs,
            gpus=arguments.gpus,
            gpus_per_node=arguments.gpus_per_node,
            mixed_precision=arguments.mixed_precision,
            **step.options,
        )
    write_result(found, kind, arguments.output)
    if found.best is not None:
        return 0
    write_line(f"fxmem: nothing was found that fits {found.gpus} x {found.gpu}")
    return EXIT_FINDING
