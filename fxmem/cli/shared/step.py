"""The step that a command is about: its options, and its analysis."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fxmem
from fxmem.cli.shared.output import write_line
from fxmem.errors import FxmemWarning, LoadError, UsageError, summarize_error
from fxmem.parallelism.layout import parse_mesh, parse_rank
from fxmem.report.tables import escape_controls
from fxmem.specs import parse_dtype, parse_input, parse_spec

if TYPE_CHECKING:
    from fxmem.analysis import Analysis

_MOST_OVERHEAD = 2.0
"""A larger share is a number of percent whose sign was forgotten."""


@dataclass(frozen=True, slots=True)
class StepChoice:
    """A step as the command line describes it."""

    target: str  # the TARGET
    args: tuple[Any, ...]  # positional inputs
    kwargs: dict[str, Any]  # keyword inputs
    options: dict[str, Any]  # the other arguments of :func:`fxmem.analyze`


def add_step_options(
    parser: argparse.ArgumentParser, *, checks_fit: bool = True, has_layout: bool = True
) -> None:
    """Adds TARGET and the options that describe a step and its device.

    Args:
        parser: That of a command.
        checks_fit: Whether the command's exit code depends on whether the step fits the GPU.
        has_layout: Whether the user gives the layout of processes.
    """
    parser.add_argument("target", metavar="TARGET", help="what to analyse: module_or_file:name")
    step = parser.add_argument_group("the step")
    add_input_option(step)
    step.add_argument(
        "--mode",
        choices=["train", "infer", "generate"],
        default="train",
        help="infer is eval() without gradients; generate is the model's generate(), with the "
        "prompt that --input or --prompt gives (default: %(default)s)",
    )
    add_count(step, "--prompt", "tokens of each prompt, for --mode generate")
    add_count(step, "--batch", "prompts, with --prompt (default: 1)")
    add_count(step, "--new", "tokens that are generated, for --mode generate (default: 128)")
    step.add_argument(
        "--inference-mode",
        action="store_true",
        help="infer under torch.inference_mode(), in which autocast keeps no casts of weights "
        "(default: under no_grad())",
    )
    add_training_options(step)
    step.add_argument(
        "--frontend",
        choices=["fx", "record"],
        help="which tracer to use (default: fx, and record where fx cannot)",
    )
    add_size_hint(
        step,
        "the size to assume where one depends on values, as that of nonzero() does; for all "
        "lines, or for one of them (may be repeated)",
    )
    add_routing(step)
    if has_layout:
        _add_layout(parser)
    _add_surroundings(parser, checks_fit)
    given = (a for a in parser._actions if a.option_strings and a.dest != "help")
    parser.set_defaults(step_options={a.dest: a.option_strings[0] for a in given})


def list_given(arguments: argparse.Namespace) -> list[str]:
    """Lists the options of the step whose value is not the default."""
    default = arguments.parser.get_default
    options = arguments.step_options.items()
    return [name for dest, name in options if getattr(arguments, dest) != default(dest)]


def add_count(
    group: argparse._ActionsContainer, name: str, help: str, default: int | None = None
) -> None:
    """Adds an option that takes an integer; a default is added to its help."""
    help += "" if default is None else " (default: %(default)s)"
    group.add_argument(name, type=int, default=default, metavar="N", help=help)


def add_size_hint(group: argparse._ActionsContainer, help: str) -> None:
    """Adds the sizes to assume, which :func:`parse_size_hint` reads."""
    group.add_argument("--size-hint", action="append", metavar="[FILE:LINE=]N", help=help)


def add_routing(group: argparse._ActionsContainer) -> None:
    """Adds the way in which tokens go to experts."""
    group.add_argument(
        "--routing",
        default="balanced",
        metavar="WAY",
        help="the experts that tokens are sent to: balanced, worst (all to the same), or a number "
        "for each, as 4,2,1,1 (default: %(default)s)",
    )


def add_mesh_options(
    group: argparse._ArgumentGroup,
    what: str = "file.py:function(model, mesh) that parallelizes the model; or fsdp or ddp",
) -> None:
    """Adds the mesh, and what lays the model out on it."""
    group.add_argument("--mesh", metavar="NAME=N,...", help="their mesh, e.g. dp=8,tp=4")
    group.add_argument("--parallelize", metavar="TARGET", help=what)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    layout = parser.add_argument_group("the processes that share it (need not be present)")
    add_mesh_options(layout)
    layout.add_argument(
        "--rank",
        default="0",
        metavar="N",
        help="the one that is analysed, or worst for the one with the highest peak (default: "
        "%(default)s)",
    )
    for name, what in {"fsdp": "fully_shard", "ddp": "DistributedDataParallel"}.items():
        add_count(layout, f"--{name}", f"{what} on N processes: --mesh dp=N --parallelize {name}")


def parse_layout(arguments: argparse.Namespace) -> dict[str, Any]:
    """Reads how processes share a step, as arguments of :func:`fxmem.analyze`.

    Raises:
        UsageError: More than one way is given, or one is not understood.
    """
    plain = [name for name in ("fsdp", "ddp") if getattr(arguments, name) is not None]
    if len(plain) + bool(arguments.mesh or arguments.parallelize) > 1:
        raise UsageError("more than one way to share the step", hint="--fsdp, --ddp or --mesh")
    mesh: dict[str, int | None] | None = None
    parallelize = arguments.parallelize
    if plain:
        mesh, parallelize = {"dp": getattr(arguments, plain[0])}, plain[0]
    elif arguments.mesh is not None:
        mesh = parse_mesh(arguments.mesh)
    return {"mesh": mesh, "parallelize": parallelize, "rank": parse_rank(arguments.rank)}


def _add_surroundings(parser: argparse.ArgumentParser, checks_fit: bool) -> None:
    loop = parser.add_argument_group("the loop around it")
    loop.add_argument(
        "--loop",
        default="plain",
        metavar="NAME",
        help="plain, huggingface, lightning or fabric, with settings in parentheses where needed; "
        "it decides who holds output and loss, and when zero_grad runs (default: %(default)s)",
    )
    add_count(loop, "--accumulate", "micro-batches per optimizer step, each as --input says")
    loop.add_argument(
        "--keep-gradients",
        action="store_true",
        help="zero_grad(set_to_none=False): gradients are zeroed in place",
    )
    loop.add_argument(
        "--hold-outputs",
        action="store_true",
        help="keep the previous step's output and loss alive until reassigned",
    )
    exits = "; exit 1 if the step does not fit it" if checks_fit else ""
    add_gpu_options(parser, exits)


def add_gpu_options(parser: argparse.ArgumentParser, exits: str = "") -> None:
    """Adds the options of the target device, with what ``--gpu`` does to the exit code."""
    device = parser.add_argument_group("the target device (need not be present)")
    device.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    device.add_argument("--gpu", metavar="NAME", help=f"the target GPU: h100, rtx4090, ...{exits}")
    device.add_argument(
        "--reserve",
        metavar="SIZE",
        help="memory of the GPU that is kept for others, e.g. 12GiB for an engine that serves",
    )
    device.add_argument(
        "--attention",
        metavar="BACKEND",
        help="flash, cudnn, efficient or math: what scaled_dot_product_attention tries first "
        "(default: PyTorch's order)",
    )
    device.add_argument(
        "--alloc-conf",
        metavar="SETTINGS",
        help="settings of CUDA's allocator, as PYTORCH_ALLOC_CONF takes them (default: that "
        "variable)",
    )


def add_compile_options(group: argparse._ActionsContainer, *, can_ask: bool) -> None:
    """Adds what becomes of ``torch.compile``; with ``can_ask``, also to compile the model."""
    ways = group.add_mutually_exclusive_group()
    if can_ask:
        ways.add_argument(
            "--compile",
            action="store_true",
            default=None,
            help="compile the model (default: what its code compiles)",
        )
    ways.add_argument(
        "--eager",
        dest="compile",
        action="store_false",
        default=None if can_ask else True,
        help="leave out torch.compile (default: PyTorch's compiler plans what is compiled)",
    )
    group.add_argument(
        "--activation-memory-budget",
        type=float,
        metavar="SHARE",
        help="of the activations that compiled code keeps for backward, from 0 to 1 (default: "
        "the code's torch._functorch.config.activation_memory_budget)",
    )


def add_strategy_option(group: argparse._ArgumentGroup) -> None:
    """Adds the strategy of commands that plan."""
    group.add_argument(
        "--strategy",
        metavar="NAME",
        help="search, schedules, changes or modules; or file.py:function(problem), which proposes "
        "segments (default: search)",
    )


def add_input_option(group: argparse._ArgumentGroup) -> None:
    """Adds ``--input``."""
    group.add_argument(
        "--input",
        action="append",
        default=[],
        dest="inputs",
        metavar="[NAME=]SHAPE[:DTYPE][:FORMAT]",
        help="an input, e.g. 8x3x224x224:bf16, 8x3x224x224:channels_last or ids=1x128:int64; "
        "repeat it for more: those without a name are positional, the others keyword arguments, "
        "which may also be True, False or None",
    )


def add_training_options(group: argparse._ArgumentGroup, *, has_autocast: bool = True) -> None:
    """Adds what else decides what a step computes: dtypes, optimizer and loss."""
    group.add_argument(
        "--dtype", metavar="DTYPE", help="cast parameters and floating inputs, e.g. bf16"
    )
    group.add_argument(
        "--optimizer",
        metavar="NAME",
        help="sgd, adam, adamw, ...; or file.py:function, which makes one from the parameters "
        "(default: none)",
    )
    group.add_argument(
        "--loss",
        metavar="NAME",
        help="cross_entropy, nll, mse, l1, smooth_l1 or bce; or file.py:function, from the output "
        "to a scalar (default: the output's .loss, else the sum of the output)",
    )
    if has_autocast:
        group.add_argument(
            "--autocast",
            metavar="DTYPE",
            help="autocast forward and loss to bf16, or to fp16 with a gradient scaler (default: "
            "none)",
        )


def parse_step(arguments: argparse.Namespace) -> StepChoice:
    """Reads a step from the arguments, checked as far as that goes without torch.

    Raises:
        UsageError: An input or a number that cannot be understood.
    """
    args, kwargs = parse_inputs(arguments.inputs)
    if arguments.mode != "generate":
        for name in ("prompt", "batch", "new"):
            if getattr(arguments, name) is not None:
                raise UsageError(
                    f"--{name} is for --mode generate", hint="inputs are --input 8x128"
                )
    elif arguments.prompt is not None:
        if args:
            raise UsageError("--prompt and --input", hint="the prompt is one of them")
        args = (parse_spec(f"{arguments.batch or 1}x{arguments.prompt}:int64"),)
    elif arguments.batch is not None:
        raise UsageError("--batch without --prompt", hint="--prompt 2048")
    names = "mode inference_mode device gpu reserve attention autocast loop accumulate alloc_conf "
    names += "optimizer loss frontend routing"
    options = {name: getattr(arguments, name) for name in names.split()}
    options |= {
        "new_tokens": 128 if arguments.new is None else arguments.new,
        "compile": getattr(arguments, "compile", False),
        "activation_memory_budget": getattr(arguments, "activation_memory_budget", None),
        "set_to_none": False if arguments.keep_gradients else None,
        "hold_outputs": arguments.hold_outputs or None,
        "dtype": None if arguments.dtype is None else parse_dtype(arguments.dtype),
        "size_hint": parse_size_hint(arguments.size_hint),
        **parse_layout(arguments),
    }
    return StepChoice(arguments.target, args, kwargs, options)


def write_options(values: Mapping[str, Any]) -> list[str]:
    """Writes options as arguments of a command.

    Args:
        values: By option, its value: a list for one that is repeated, True for one without.
    """
    arguments: list[str] = []
    for option, value in values.items():
        if value is True:
            arguments.append(option)
        elif value is not None and value is not False:
            entries = value if isinstance(value, list) else [value]
            arguments += [f"{option}={entry}" for entry in entries]
    return arguments


def parse_inputs(texts: list[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Reads the positional and the keyword inputs that ``--input`` gives.

    Raises:
        UsageError: One cannot be understood, or two have the same name.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        name, spec = parse_input(text)
        if name is None:
            args.append(spec)
        elif name in kwargs:
            raise UsageError(f"duplicate input {name!r}", hint="give each name once")
        else:
            kwargs[name] = spec
    return tuple(args), kwargs


def parse_size_hint(texts: list[str] | None) -> int | dict[str, int] | None:
    """Reads the sizes that ``--size-hint`` gives, for all lines or by ``FILE:LINE``.

    >>> parse_size_hint(["expert.py:31=512", "16"]), parse_size_hint(["16"])
    ({'expert.py:31': 512, '': 16}, 16)
    """
    sizes: dict[str, int] = {}
    for text in texts or ():
        line, _, size = text.rpartition("=")
        if not size.strip().isdecimal():
            raise UsageError(
                f"--size-hint must be 0 or more, or FILE:LINE=N, got {text}",
                hint="--size-hint 16, or --size-hint expert.py:31=16",
            )
        sizes[line.strip()] = int(size)
    return sizes.get("") if not sizes.keys() - {""} else sizes


def parse_share(text: str, option: str) -> float:
    """Reads a share, as a number or in percent.

    Raises:
        UsageError: The text is no share, or one whose percent sign was forgotten.
    """
    number, percent, _ = text.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        raise UsageError(f"{option}: {text!r} is not a share", hint="0.1 or 10%") from None
    if not share >= 0:
        raise UsageError(f"{option} must be 0 or more, got {text.strip()}")
    if share > _MOST_OVERHEAD and not percent:
        raise UsageError(
            f"{option} of {text.strip()} is {100 * share:g} %",
            hint=f"{text.strip()}% if percent is meant, else {100 * share:g}%",
        )
    return share


def analyze_step(step: StepChoice) -> Analysis:
    """Analyses a step; what the user's code prints goes to stderr.

    Raises:
        FxmemError: The model cannot be loaded or traced.
    """
    with run_user_code(step.target):
        return fxmem.analyze(step.target, step.args, step.kwargs, **step.options)


@contextlib.contextmanager
def run_user_code(target: str) -> Iterator[None]:
    """Sends what the user's code prints to stderr, and hides the command's arguments from it."""
    # fxmem has no use for NumPy, of whose absence torch warns when it is imported.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    # Of a value that is then refused, for a better reason.
    warnings.filterwarnings("ignore", message="Converting a tensor with requires_grad=True")
    show, arguments = warnings.showwarning, sys.argv

    def show_warning(message: Warning | str, category: type[Warning], *place: Any) -> None:
        """Shows fxmem's own warnings as its errors: one line, without a place in its code."""
        if issubclass(category, FxmemWarning):
            write_line(f"fxmem: warning: {escape_controls(str(message))}")
        else:
            show(message, category, *place)

    warnings.showwarning = show_warning  # type: ignore[assignment]
    sys.argv = [target.partition(":")[0]]  # for a file that reads the command line
    try:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                import fxmem.analyzing  # noqa: F401
            except (ImportError, OSError) as error:
                raise LoadError(
                    f"fxmem cannot start: {summarize_error(error)}",
                    hint=f"is torch 2.6 or later installed for {sys.executable}?",
                ) from error
            yield
    finally:
        warnings.showwarning, sys.argv = show, arguments
