"""``fxmem max-batch``: the largest batch, or other size of the inputs, that fits."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
from dataclasses import replace

import fxmem
from fxmem.batching.largest import report_max_batches
from fxmem.cli.shared.output import (
    EXIT_FINDING,
    add_output_options,
    choose_format,
    parse_budget,
    show_progress,
    write_line,
    write_result,
)
from fxmem.cli.shared.step import (
    add_count,
    add_step_options,
    add_strategy_option,
    parse_share,
    parse_step,
    run_user_code,
)
from fxmem.errors import UsageError
from fxmem.loading.changes import change_optimizer, list_combinations, write_changed
from fxmem.units import format_bytes

_LISTS = ("dtype", "autocast", "optimizer")
_COMMA = re.compile(r",(?![^(]*\))")  # not between parentheses

HELP = "the largest batch that fits a GPU or a memory"
DESCRIPTION = """\
Finds the largest batch whose step fits a GPU or a memory, from a few analyses: the answer and
the next size are both analysed. --axis finds the longest sequence or the largest image instead.

--dtype, --autocast and --optimizer also take lists, for a table of all combinations. --try makes
such a table of changes to the model and its optimizer."""
EPILOG = """\
examples:
  fxmem max-batch gpt.py:GPT --input 4x512:int64 --optimizer adamw --gpu rtx4090
  fxmem max-batch gpt.py:GPT --input 4x512:int64 --axis 1 --memory 24GiB
  fxmem max-batch unet.py:UNet --input 4x3x256x256 --axis 2,3 --multiple-of 32 --gpu t4
  fxmem max-batch gpt.py:GPT --input 4x512:int64 --gpu rtx4090 --max-overhead 20%
  fxmem max-batch gpt.py:GPT --input 4x512:int64 --gpu t4 --autocast none,fp16 --optimizer adamw,sgd
  fxmem max-batch gpt.py:GPT --input 4x512:int64 --gpu t4 --optimizer adamw --try lora,checkpoint

exit codes: 0 fine, 1 not even the smallest size fits, 2 bad usage or a model that cannot be loaded
or traced
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_step_options(parser, checks_fit=False)
    limit = parser.add_argument_group("what is to fit")
    limit.add_argument(
        "--memory",
        type=parse_budget,
        metavar="SIZE",
        help="the device's memory, e.g. 24GiB (default: the --gpu's)",
    )
    limit.add_argument(
        "--margin",
        default="2%",
        metavar="SHARE",
        help="memory to keep free besides CUDA's context, e.g. 5%% or 1GiB (default: 2%%)",
    )
    limit.add_argument(
        "--axis",
        default="0",
        metavar="DIM",
        help="the dimension to enlarge: 1, or 2,3 for both, or NAME:1 of one input (default: 0, "
        "the batch)",
    )
    add_count(limit, "--multiple-of", "look among multiples of N (default: all)")
    limit.add_argument(
        "--max-overhead",
        metavar="SHARE",
        help="also the largest with a plan that adds at most this share of time, e.g. 20%%",
    )
    limit.add_argument(
        "--try",
        dest="changes",
        metavar="LIST",
        help="changes to combine: lora, qlora (peft, bitsandbytes), checkpoint, 8bit (the "
        "optimizer's states)",
    )
    limit.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="stop each search of a plan then"
    )
    add_strategy_option(limit)
    add_output_options(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Finds the largest size and writes it, or a table for several settings."""
    if arguments.gpu is None and arguments.memory is None:
        raise UsageError("no memory is given", hint="--gpu rtx4090, or --memory 24GiB")
    share = arguments.max_overhead
    limits = {
        "memory": arguments.memory,
        "axis": arguments.axis,
        "multiple_of": arguments.multiple_of,
        "margin": _parse_margin(arguments.margin),
        "max_overhead": None if share is None else parse_share(share, "--max-overhead"),
        "time_limit_s": arguments.time_limit,
        "strategy": arguments.strategy,
    }
    kind = choose_format(arguments)
    texts = {name: _COMMA.split(getattr(arguments, name) or "none") for name in _LISTS}
    each = (dict(zip(texts, values, strict=True)) for values in itertools.product(*texts.values()))
    settings, steps = [], []
    for setting, changes in itertools.product(each, _list_changes(arguments.changes)):
        values = {name: None if text == "none" else text for name, text in setting.items()}
        values["optimizer"] = change_optimizer(values["optimizer"], changes)
        step = parse_step(argparse.Namespace(**{**vars(arguments), **values}))
        if changes:
            step = replace(step, target=write_changed(step.target, changes))
        steps.append(step)
        settings.append({**setting, "with": " + ".join(changes) or "nothing"})
    varied = [name for name in _LISTS if len(texts[name]) > 1] + ["with"] * bool(arguments.changes)
    found = []
    with contextlib.ExitStack() as stack:
        for at, (chosen, step) in enumerate(zip(settings, steps, strict=True), 1):
            names = {name: chosen[name] for name in varied}
            label = f" ({at} of {len(steps)}: {', '.join(names.values())})" if varied else ""
            with show_progress(f"fitting {arguments.target}{label}"), run_user_code(step.target):
                from fxmem.loading.importing import read_files_once

                stack.enter_context(read_files_once())
                one = fxmem.max_batch(step.target, step.args, step.kwargs, **step.options, **limits)
            setup = replace(one.setup, model=arguments.target)
            found.append((names, replace(one, setup=setup)))
    write_result(report_max_batches(found) if varied else found[0][1], kind, arguments.output)
    if any(each.batch or (each.planned and each.planned.batch) for _, each in found):
        return 0
    memory = format_bytes(found[0][1].memory_bytes)
    write_line(f"fxmem: no size fits {memory}: {found[0][1].next_cause}")
    return EXIT_FINDING


def _list_changes(text: str | None) -> list[tuple[str, ...]]:
    return [()] if text is None else list_combinations(text.split(","))


def _parse_margin(text: str) -> str | float:
    if text.endswith("%"):
        return text
    return float(text) if re.fullmatch(r"0?\.[0-9]+|0", text) else parse_budget(text)
