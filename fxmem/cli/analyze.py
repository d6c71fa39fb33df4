"""``fxmem analyze``: the peak of one step and what is alive there."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fxmem.cli.output import check_output, choose_width, write_line, write_output
from fxmem.cli.progress import show_progress
from fxmem.cli.startup import defer_torch_compile
from fxmem.errors import FxmemWarning, LoadError, UsageError, summarize_error
from fxmem.report.cells import escape_controls
from fxmem.specs import parse_dtype, parse_input
from fxmem.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from fxmem.analysis import Analysis

EXIT_OVER_BUDGET = 1
_LEAST_BUDGET_BYTES = 1 << 20
"""A number without a unit that is smaller is one whose unit was forgotten."""

_DESCRIPTION = """\
Runs one training step of the model on fake tensors (which take no memory) and
reports its peak memory, where it lies, and what is alive there.

TARGET is package.module:name or path/to/file.py:name; the name is an nn.Module class or
instance, or a callable that returns one. Literals may be passed: 'nets.py:resnet(depth=50)'.
"""
_EPILOG = """\
examples:
  fxmem analyze resnet.py:ResNet18 --input 8x3x224x224 --optimizer adam
  fxmem analyze 'gpt.py:GPT(layers=24)' --input 4x512:int64 --budget 8GiB
  fxmem analyze nets.bert:build --input ids=8x128:int64 --input mask=8x128:int64
  fxmem analyze unet.py:UNet --input 1x3x256x256 --mode infer --json -o unet.json

exit codes: 0 fine, 1 over --budget, 2 bad usage or a model that cannot be loaded or traced
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command to the parser of ``fxmem``.

    Args:
        commands: What ``add_subparsers`` returned.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "analyze",
        help="the peak of one step and what is alive there",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_analyze, parser=parser)
    parser.add_argument("target", metavar="TARGET", help="what to analyse: module_or_file:name")
    _add_step_options(parser)
    _add_loop_options(parser)
    _add_device_options(parser)
    _add_output_options(parser)


def _add_step_options(parser: argparse.ArgumentParser) -> None:
    step = parser.add_argument_group("the step")
    step.add_argument(
        "--input",
        action="append",
        default=[],
        dest="inputs",
        metavar="[NAME=]SHAPE[:DTYPE][:FORMAT]",
        help="an input, e.g. 8x3x224x224:bf16, 8x3x224x224:channels_last or ids=1x128:int64; "
        "repeat it for more: without a name in order, with one as a keyword argument; NAME=True, "
        "False or None too",
    )
    step.add_argument(
        "--mode",
        choices=["train", "infer"],
        default="train",
        help="infer is eval() without gradients (default: %(default)s)",
    )
    step.add_argument(
        "--dtype", metavar="DTYPE", help="cast parameters and floating inputs, e.g. bf16"
    )
    step.add_argument(
        "--optimizer",
        metavar="NAME",
        help="sgd, adam, adamw, ...; or file.py:function, which makes one of the parameters "
        "(default: none)",
    )
    step.add_argument(
        "--loss",
        metavar="NAME",
        help="cross_entropy, nll, mse, l1, smooth_l1 or bce; or file.py:function, from the output "
        "to a scalar (default: the output's .loss, else the sum of the output)",
    )
    step.add_argument(
        "--autocast",
        metavar="DTYPE",
        help="autocast forward and loss: bf16; fp16 with a gradient scaler (default: none)",
    )
    step.add_argument(
        "--frontend",
        choices=["fx", "record"],
        help="which tracer to use (default: fx, and record where fx cannot)",
    )
    step.add_argument(
        "--size-hint",
        type=int,
        metavar="N",
        help="stands for a size that depends on values, such as that of nonzero()",
    )


def _add_loop_options(parser: argparse.ArgumentParser) -> None:
    loop = parser.add_argument_group("the loop around it")
    loop.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches, each of the inputs, before the optimizer steps (default: 1)",
    )
    loop.add_argument(
        "--keep-gradients",
        action="store_true",
        help="zero_grad(set_to_none=False): gradients are zeroed in place",
    )
    loop.add_argument(
        "--hold-outputs",
        action="store_true",
        help="output and loss of the step before live until this one's take their names",
    )


def _add_device_options(parser: argparse.ArgumentParser) -> None:
    device = parser.add_argument_group("the device, which need not be there")
    device.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    device.add_argument(
        "--gpu",
        metavar="NAME",
        help="h100, rtx4090, ...: the GPU that is meant; exit 1 if the step does not fit it",
    )
    device.add_argument(
        "--alloc-conf",
        metavar="SETTINGS",
        help="those of CUDA's allocator, as in PYTORCH_ALLOC_CONF (default: that variable)",
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("the result")
    output.add_argument("--budget", metavar="SIZE", help="exit 1 if the peak is over it, e.g. 8GiB")
    output.add_argument("--json", action="store_true", help="everything, as JSON")
    output.add_argument("-o", "--output", metavar="FILE", help="write to FILE instead of stdout")
    output.add_argument("--nodes", action="store_true", help="add a table of all nodes")
    output.add_argument(
        "--top",
        type=int,
        default=10,
        metavar="N",
        help="storages to list at the peak (default: %(default)s)",
    )
    output.add_argument("--debug", action="store_true", help="show tracebacks")


def run_analyze(arguments: argparse.Namespace) -> int:
    """Analyses a target and writes the result.

    Args:
        arguments: What the parser of this command returned.

    Returns:
        The exit code: 0, or 1 where the peak is over the budget.

    Raises:
        FxmemError: Bad usage, or a model that cannot be loaded or traced.
    """
    # What the user may have mistyped is told before torch is imported and the model is run.
    args, kwargs = _parse_inputs(arguments.inputs)
    options = _parse_options(arguments)
    budget_bytes = None if arguments.budget is None else _parse_budget(arguments.budget)
    if arguments.top < 0:
        raise UsageError(f"--top is {arguments.top}", hint="0 or more")
    check_output(arguments.output)

    with show_progress(f"analysing {arguments.target}"):
        analysis = _analyze_quietly(arguments.target, args, kwargs, options)
        text = _render(analysis, arguments)
    write_output(text, arguments.output)
    return max(_check_budget(analysis, budget_bytes), _check_fit(analysis))


def _parse_inputs(texts: list[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        name, spec = parse_input(text)
        if name is None:
            args.append(spec)
        elif name in kwargs:
            raise UsageError(f"two inputs are called {name!r}", hint="each name once")
        else:
            kwargs[name] = spec
    return tuple(args), kwargs


def _parse_options(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.size_hint is not None and arguments.size_hint < 0:
        raise UsageError(f"--size-hint is {arguments.size_hint}", hint="0 or more")
    return {
        "mode": arguments.mode,
        "device": arguments.device,
        "gpu": arguments.gpu,
        "autocast": arguments.autocast,
        "accumulate": arguments.accumulate,
        "set_to_none": not arguments.keep_gradients,
        "hold_outputs": arguments.hold_outputs,
        "alloc_conf": arguments.alloc_conf,
        "dtype": None if arguments.dtype is None else parse_dtype(arguments.dtype),
        "optimizer": arguments.optimizer,
        "loss": arguments.loss,
        "frontend": arguments.frontend,
        "size_hint": arguments.size_hint,
    }


def _analyze_quietly(
    target: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Analysis:
    # fxmem has no use for NumPy, of whose absence torch warns when it is imported.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    # Of a value that is then refused, for a better reason.
    warnings.filterwarnings("ignore", message="Converting a tensor with requires_grad=True")
    # The user's code runs here. What it prints is no part of the result, and the arguments are not
    # for it.
    with contextlib.redirect_stdout(sys.stderr), _hide_arguments(target), _show_warnings():
        try:
            from fxmem.api import analyze
        except (ImportError, OSError) as error:
            raise LoadError(
                f"fxmem cannot start: {summarize_error(error)}",
                hint=f"is torch 2.13 or later installed for {sys.executable}?",
            ) from error
        with defer_torch_compile():
            return analyze(target, args, kwargs, **options)


@contextlib.contextmanager
def _show_warnings() -> Iterator[None]:
    """Shows fxmem's own warnings as it shows its errors: one line, without a place in its code."""
    show = warnings.showwarning

    def show_warning(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if issubclass(category, FxmemWarning):
            write_line(f"fxmem: warning: {escape_controls(str(message))}")
        else:
            show(message, category, *place)

    warnings.showwarning = show_warning  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = show


@contextlib.contextmanager
def _hide_arguments(target: str) -> Iterator[None]:
    """A file that reads the command line finds nothing but its own name there."""
    arguments, sys.argv = sys.argv, [target.partition(":")[0]]
    try:
        yield
    finally:
        sys.argv = arguments


def _render(analysis: Analysis, arguments: argparse.Namespace) -> str:
    if arguments.json:
        return analysis.to_json(indent=2) + "\n"
    from fxmem.report.document import build_document
    from fxmem.report.text import render_text

    width = choose_width(arguments.output)
    document = build_document(analysis)
    return render_text(document, top=arguments.top, nodes=arguments.nodes, width=width)


def _parse_budget(text: str) -> int:
    budget_bytes = parse_bytes(text)
    if text.strip().isdecimal() and budget_bytes < _LEAST_BUDGET_BYTES:
        raise UsageError(
            f"a budget of {text.strip()} is {budget_bytes} bytes",
            hint=f"{text.strip()}GiB? {text.strip()}B if bytes are meant",
        )
    return budget_bytes


def _check_budget(analysis: Analysis, budget_bytes: int | None) -> int:
    if budget_bytes is None or analysis.peak_bytes <= budget_bytes:
        return 0
    over = format_bytes(analysis.peak_bytes - budget_bytes)
    peak, budget = format_bytes(analysis.peak_bytes), format_bytes(budget_bytes)
    write_line(f"fxmem: over budget: the peak of {peak} is {over} over {budget}")
    return EXIT_OVER_BUDGET


def _check_fit(analysis: Analysis) -> int:
    if analysis.gpu is None or analysis.exhaustion is None:
        return 0
    write_line(f"fxmem: the step does not fit {analysis.gpu.name}: {analysis.exhaustion.cause}")
    return EXIT_OVER_BUDGET
