"""``fxmem pipeline``: the memory of each rank of a pipeline."""

from __future__ import annotations

import argparse
from typing import Any

import fxmem
from fxmem.cli.shared.output import (
    EXIT_FINDING,
    add_output_options,
    choose_format,
    show_progress,
    write_line,
    write_result,
)
from fxmem.cli.shared.step import (
    add_count,
    add_gpu_options,
    add_input_option,
    add_mesh_options,
    add_size_hint,
    add_training_options,
    parse_inputs,
    parse_size_hint,
    run_user_code,
)
from fxmem.parallelism.layout import parse_mesh
from fxmem.specs import parse_dtype
from fxmem.units import format_bytes

HELP = "the memory of each rank of a pipeline"
DESCRIPTION = """\
Records each rank of a pipeline in turn, as PyTorch's own stages and schedule run it: the peak of
each rank, and the fullest. The TARGET is a list of modules, the stages in order: a function that
returns one, a ModuleList or a Sequential."""
EPILOG = """\
examples:
  fxmem pipeline gpt.py:split --input 32x512:int64 --optimizer adamw --loss cross_entropy
  fxmem pipeline gpt.py:split --input 32x512:int64 --schedule Interleaved1F1B --ranks 4

exit codes: 0 fine, 1 a rank is over --budget or does not fit the --gpu, 2 bad usage or stages that
cannot be loaded or traced
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("target", metavar="TARGET", help="the stages: module_or_file:name")
    step = parser.add_argument_group("the step")
    add_input_option(step)
    add_training_options(step, has_autocast=False)
    add_size_hint(step, "the size to assume where one depends on values, as that of nonzero() does")
    schedule = parser.add_argument_group("the schedule")
    schedule.add_argument(
        "--schedule",
        default="1F1B",
        metavar="NAME",
        help="as PyTorch names it: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, "
        "ZBVZeroBubble, DualPipeV (default: %(default)s)",
    )
    add_count(schedule, "--microbatches", "micro-batches that the inputs are split into", 8)
    add_count(
        schedule,
        "--ranks",
        "ranks that the stages are dealt to (default: one for each stage, or for each two)",
    )
    schedule.add_argument(
        "--no-outputs",
        action="store_true",
        help="step(return_outputs=False): the last rank does not return its results",
    )
    layout = parser.add_argument_group("the processes that share a stage (need not be present)")
    add_mesh_options(layout, "file.py:function(stage, mesh) that parallelizes a stage")
    add_gpu_options(parser, "; exit 1 if a rank does not fit it")
    add_output_options(parser, budget="exit 1 if a peak is over it, e.g. 8GiB")


def run_command(arguments: argparse.Namespace) -> int:
    """Records a pipeline and writes the result."""
    args, kwargs = parse_inputs(arguments.inputs)
    dtype = None if arguments.dtype is None else parse_dtype(arguments.dtype)
    mesh: Any = None if arguments.mesh is None else parse_mesh(arguments.mesh)
    kind = choose_format(arguments)
    names = "schedule microbatches ranks device gpu reserve attention optimizer loss".split()
    names.append("alloc_conf")
    with show_progress(f"recording {arguments.target}"), run_user_code(arguments.target):
        found = fxmem.pipeline(
            arguments.target,
            args,
            kwargs,
            dtype=dtype,
            return_outputs=not arguments.no_outputs,
            size_hint=parse_size_hint(arguments.size_hint),
            mesh=mesh,
            parallelize=arguments.parallelize,
            **{name: getattr(arguments, name) for name in names},
        )
    write_result(found, kind, arguments.output)
    code, peak_bytes, budget_bytes = 0, found.peak_bytes, arguments.budget
    if budget_bytes is not None and peak_bytes > budget_bytes:
        peak, budget = format_bytes(peak_bytes), format_bytes(budget_bytes)
        where = f"the peak of rank {found.fullest.rank}, {peak}, is over {budget}"
        write_line(f"fxmem: over budget: {where}")
        code = EXIT_FINDING
    over = [str(rank.rank) for rank in found.ranks if rank.fits is False]
    if over:
        write_line(f"fxmem: these ranks do not fit {found.setup.gpu}: {', '.join(over)}")
        code = EXIT_FINDING
    return code
