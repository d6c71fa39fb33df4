"""``fxmem verify``: real steps with and without a plan, compared bit for bit."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from fxmem.cli.output import check_output, choose_width, read_plan, write_output
from fxmem.cli.progress import show_progress
from fxmem.cli.step import (
    TARGET_HELP,
    add_input_option,
    add_training_options,
    parse_inputs,
    run_user_code,
)
from fxmem.errors import UsageError
from fxmem.specs import parse_dtype

if TYPE_CHECKING:
    from fxmem.verifying.verification import Verification

EXIT_DIFFERENT = 1

_QUIET = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Keeps what the profiler says of itself off stderr; read when torch is imported."""
_DESCRIPTION = f"""\
Builds the model for real, takes training steps of it and of the model with the plan, from
the same state, and compares bit for bit what they compute and leave: output, loss,
gradients, buffers, parameters, the optimizer's state, inputs, random numbers. Then the peak
of a step of each is measured, and held against what the plan promises.

{TARGET_HELP}"""
_EPILOG = """\
examples:
  fxmem plan gpt.py:GPT --input 4x512:int64 --max-overhead 10% -o plan.json
  fxmem verify gpt.py:GPT --input 4x512:int64 --plan plan.json --optimizer adamw

exit codes: 0 equal, 1 something differs, or the peak is more than 1 % off what the plan
promises, 2 bad usage or a model that cannot be run
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command to the parser of ``fxmem``.

    Args:
        commands: What ``add_subparsers`` returned.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        help="run real steps with and without a plan, and compare bit for bit",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_verify, parser=parser)
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
    step.add_argument(
        "--steps", type=int, default=3, metavar="N", help="how many (default: %(default)s)"
    )
    step.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of parameters, inputs and random numbers (default: %(default)s)",
    )
    output = parser.add_argument_group("the result")
    output.add_argument("--json", action="store_true", help="everything, as JSON")
    output.add_argument("-o", "--output", metavar="FILE", help="write to FILE instead of stdout")
    output.add_argument("--debug", action="store_true", help="show tracebacks")


def run_verify(arguments: argparse.Namespace) -> int:
    """Verifies a plan for a target and writes what came of it.

    Args:
        arguments: What the parser of this command returned.

    Returns:
        The exit code: 0, or 1 where something differs or the plan's promise is not kept.

    Raises:
        FxmemError: Bad usage, or a model that cannot be loaded, planned for or run.
    """
    # Mistakes in the arguments are reported before torch is imported and the model is run.
    args, kwargs = parse_inputs(arguments.inputs)
    options = _parse_options(arguments)
    plan = read_plan(arguments.plan)
    check_output(arguments.output)
    for name, level in _QUIET.items():
        os.environ.setdefault(name, level)
    with show_progress(f"verifying {arguments.target}"):
        with run_user_code(arguments.target):
            from fxmem.verifying.verify import verify_target

            verification = verify_target(arguments.target, plan, args, kwargs, **options)
        text = _render(verification, arguments)
    write_output(text, arguments.output)
    return 0 if verification.equal and verification.keeps_promise else EXIT_DIFFERENT


def _parse_options(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.steps < 1:
        raise UsageError(f"--steps must be 1 or more, got {arguments.steps}")
    if arguments.seed < 0:
        raise UsageError(f"--seed must be 0 or more, got {arguments.seed}")
    return {
        "device": arguments.device,
        "dtype": None if arguments.dtype is None else parse_dtype(arguments.dtype),
        "optimizer": arguments.optimizer,
        "loss": arguments.loss,
        "autocast": arguments.autocast,
        "steps": arguments.steps,
        "seed": arguments.seed,
    }


def _render(verification: Verification, arguments: argparse.Namespace) -> str:
    if arguments.json:
        return f"{verification.to_json(indent=2)}\n"
    from fxmem.report.verify_text import render_verification

    return render_verification(verification, width=choose_width(arguments.output))
