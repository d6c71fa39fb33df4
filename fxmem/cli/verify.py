"""``fxmem verify``: real steps with and without a plan, compared bit for bit."""

from __future__ import annotations

import argparse
import os

from fxmem.cli.shared.output import (
    EXIT_FINDING,
    add_output_options,
    choose_format,
    read_plan,
    show_progress,
    write_result,
)
from fxmem.cli.shared.step import (
    add_count,
    add_input_option,
    add_mesh_options,
    add_training_options,
    parse_inputs,
    run_user_code,
)
from fxmem.errors import UsageError
from fxmem.parallelism.layout import parse_mesh
from fxmem.specs import parse_dtype

_QUIET = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Keeps the profiler's own messages off stderr; read when torch is imported."""
HELP = "run real steps with and without a plan, and compare bit for bit"
DESCRIPTION = """\
Builds the model with real tensors, runs training steps with and without the plan from
the same state, and compares bit for bit what they compute and leave behind: output,
loss, gradients, buffers, parameters, optimizer state, inputs, random numbers. Then measures
the peak of a step of each, and compares it with the peak that the plan promises."""
EPILOG = """\
examples:
  fxmem plan gpt.py:GPT --input 4x512:int64 --max-overhead 10% -o plan.json
  fxmem verify gpt.py:GPT --input 4x512:int64 --plan plan.json --optimizer adamw
  fxmem verify gpt.py:GPT --input 4x512:int64 --plan plan.json --mesh dp=2 --parallelize fsdp

exit codes: 0 equal, 1 something differs, or the peak is more than 1 % off what the plan
promises, 2 bad usage or a model that cannot be run
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("target", metavar="TARGET", help="what to run: module_or_file:name")
    parser.add_argument(
        "--plan", metavar="FILE", required=True, help="from fxmem plan -o, for the same inputs"
    )
    step = parser.add_argument_group("the step")
    add_input_option(step)
    add_training_options(step)
    step.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        help="the device to run on (default: cuda where there is a GPU, else cpu)",
    )
    add_count(step, "--steps", "how many to run", 3)
    add_count(step, "--seed", "seed of parameters, inputs and random numbers", 0)
    layout = parser.add_argument_group("the processes that share it (at most 4, on the CPU)")
    add_mesh_options(layout)
    add_output_options(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Verifies a plan for a target and writes the result."""
    args, kwargs = parse_inputs(arguments.inputs)
    if arguments.steps < 1:
        raise UsageError(f"--steps must be 1 or more, got {arguments.steps}")
    if arguments.seed < 0:
        raise UsageError(f"--seed must be 0 or more, got {arguments.seed}")
    names = ("device", "optimizer", "loss", "autocast", "steps", "seed", "parallelize")
    options = {name: getattr(arguments, name) for name in names}
    options["mesh"] = None if arguments.mesh is None else parse_mesh(arguments.mesh)
    options["dtype"] = None if arguments.dtype is None else parse_dtype(arguments.dtype)
    plan = read_plan(arguments.plan)
    kind = choose_format(arguments)
    for name, level in _QUIET.items():
        os.environ.setdefault(name, level)
    with show_progress(f"verifying {arguments.target}"), run_user_code(arguments.target):
        from fxmem.verifying.proof import verify_target

        verification = verify_target(arguments.target, plan, args, kwargs, **options)
    write_result(verification, kind, arguments.output)
    return 0 if verification.equal and verification.keeps_promise else EXIT_FINDING
