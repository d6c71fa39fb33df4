"""Why a step could not be run, in one line: the cause, the user's own line, and what to try."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from fxmem.errors import DataDependentError, FxmemError, TraceError, summarize_error
from fxmem.loading.inputs import suggest_shape
from fxmem.recording.constants import takes_hint
from fxmem.tracing import tracer
from fxmem.tracing.fxgraph import describe_function
from fxmem.tracing.source import find_raising_source, find_raising_step, find_span, is_machinery

_LONGEST_QUOTE = 60
_BRANCH = re.compile(r"(if|elif|while|assert)( not)?\b[ (]*")
_ACCELERATOR = re.compile(
    r"\b(cuda|hip|mps|xpu|nvidia|nvtx|accelerator)\b|dummy base class", re.IGNORECASE
)
_INTEGERS = re.compile(r"scalar types: Long, Int|scalar type Long|dtype int32/int64", re.IGNORECASE)
_LAYOUT = re.compile(
    r"\b(shapes?|sizes?|dim\w*|d?types?|scalar types?|channels?|broadcast\w*|ind(ex|ices)"
    r"|lengths?|elements?|values? per|must be|should be|expected|expects|invalid)\b",
    re.IGNORECASE,
)
_NO_FORWARD = re.compile(r'Module \[(\w+)\] is missing the required "forward" function')
_VALUE = re.compile(
    r"\.numpy\(\) is not supported for tensor subclasses|Numpy is not available"
    r"|unsupported format string passed to FakeTensor"
)
_NO_FAKE = re.compile(r"no fake impl registered for <CustomOpDef\((.*?)\)>")
_CHANGED_IN_PLACE = re.compile(
    r"modified by an inplace operation: .* which is output [0-9]+ of (\w+),", re.DOTALL
)
_NUMBER_PASSED = re.compile(r"(?P<name>\w+)=(?P<size>[0-9]+):float32")
_DEBUG = "see the whole traceback with --debug"


def explain_failure(
    error: BaseException, inputs: Sequence[str], size_hint: int | None
) -> FxmemError:
    """The error that says in one line what went wrong where in a step.

    Args:
        error: What the step raised.
        inputs: The step's inputs, as :func:`fxmem.tracing.fakes.describe_inputs` gives them.
        size_hint: The size hint that was given.
    """
    if isinstance(error, FxmemError):
        return error
    where = find_raising_source(error)
    at = f" at {where}" if where else ""
    if _needs_value(error):
        return _explain_value(error, at, size_hint)
    if isinstance(error, SystemExit):
        return TraceError(f"the model called exit({error.code!r}){at}", hint="let forward return")
    if match := _CHANGED_IN_PLACE.search(str(error)):
        return TraceError(
            f"backward needs the result of {match[1].removesuffix('Backward0')}, which the model "
            "changes in place afterwards",
            hint="training it fails everywhere: take the operation that is not in place",
        )
    if "backward through the graph a second time" in str(error):
        return TraceError(
            "backward runs a second time through what an earlier step or backward has computed",
            hint="training it fails everywhere: detach() what the model keeps from step to step",
        )
    if match := _NO_FORWARD.search(str(error)):
        return _explain_missing_forward(match[1], at)
    if type(error).__module__.startswith("torch._dynamo"):
        return TraceError(
            f"torch.compile runs{at}, and what a compiler allocates is not analysed",
            hint="leave torch.compile out",
        )
    if operator := _find_missing_kernel(error):
        return TraceError(
            f"the operator {operator}{at} does not run on tensors without data",
            hint="give it a fake kernel with torch.library.register_fake",
        )
    # The user knows nothing of fake tensors, nor that those of the GPU lie on cpu:0.
    text = summarize_error(error).replace("FakeTensor", "Tensor").replace("cpu:0", "cuda:0")
    return TraceError(f"the step failed{at}: {text}", _suggest(error, inputs))


def is_traced(error: BaseException) -> bool:
    """Whether the tracer watched what failed: without it, it might not have."""
    frames = _iterate_frames(error.__traceback__)
    return any(frame.f_code.co_filename == tracer.__file__ for frame in frames)


def _iterate_frames(step: TracebackType | None) -> Iterator[FrameType]:
    while step is not None:
        yield step.tb_frame
        step = step.tb_next


def _find_missing_kernel(error: BaseException) -> str:
    if isinstance(error, UnsupportedOperatorException):
        return str(error.func)
    match = _NO_FAKE.search(str(error))
    return match[1] if match else ""


def _explain_missing_forward(name: str, at: str) -> TraceError:
    if name in ("ModuleList", "ModuleDict"):
        hint = "call the modules in it one by one"
    else:
        hint = "define forward(self, ...) in it"
    return TraceError(f"{name} is called{at} and has no method forward", hint=hint)


def _suggest(error: BaseException, inputs: Sequence[str]) -> str:
    """What to try against an error that PyTorch or the model's own code raised."""
    if hint := suggest_shape(inputs):
        return hint
    text = str(error)
    if isinstance(error, TypeError) and (hint := _suggest_number(inputs)):
        return hint
    if _ACCELERATOR.search(text):
        return "there is no GPU in an analysis: ask torch.cuda.is_available() first"
    if "process group" in text:
        return "an analysis is of one process: leave torch.distributed out"
    if not _is_raised_by_torch(error):
        return _DEBUG
    given = ", ".join(inputs) or "none were given"
    if "on the same device" in text:
        return (
            "a tensor is where it was made: give it the device of the others; "
            "--device cpu or device='cpu' if all of it is to run on the CPU"
        )
    if "Storage size calculation overflowed" in text:
        return f"no tensor has more than 2^63 bytes; the inputs are {given}"
    if "data is not allocated" in text:
        return (
            "values of a tensor are read, which has none: sequences are to be packed in forward;"
            f" the inputs are {given}"
        )
    if "SparseTensorImpl" in text:
        return "sparse tensors are not supported: make them dense"
    if _INTEGERS.search(text):
        return f"an input of integers is written 4x8:int64; the inputs are {given}"
    if _LAYOUT.search(text):
        if "type" not in text and (inner := _find_submodule(error)):
            return f"the weights of {inner} do not fit what reaches it; the inputs are {given}"
        return f"check shapes and dtypes of the inputs: {given}"
    return _DEBUG


def _suggest_number(inputs: Sequence[str]) -> str:
    """What to try where a named number was taken for a shape; empty where none is like one."""
    for match in filter(None, map(_NUMBER_PASSED.fullmatch, inputs)):
        name, size = match["name"], match["size"]
        return (
            f"{name}={size} is a tensor of {size} elements, as any shape: numbers are given in"
            f" Python, kwargs={{{name!r}: {size}}}"
        )
    return ""


def _find_submodule(error: BaseException) -> str:
    """The innermost module of torch that ran, with its name in the model; empty at the root."""
    root: nn.Module | None = None
    inner: nn.Module | None = None
    for frame in _iterate_frames(error.__traceback__):
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        module = frame.f_locals.get(names[0]) if names else None  # whatever self is called
        if isinstance(module, nn.Module) and frame.f_code.co_name == "forward":
            root, inner = root or module, module
    if root is None or inner is root or not is_machinery(inspect.getfile(type(inner))):
        return ""
    name = next((name for name, module in root.named_modules() if module is inner), "")
    return f"{name!r}, a {type(inner).__name__}," if name else ""


def _is_raised_by_torch(error: BaseException) -> bool:
    """Whether the code that raised is PyTorch's, in C++ or Python, and not the model's."""
    frames = [*_iterate_frames(error.__traceback__)]
    return bool(frames) and is_machinery(frames[-1].f_code.co_filename)


# -- values that an analysis does not have ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """What the user's line called.

    Attributes:
        label: Its name.
        is_integer: Whether it was called on a tensor of integers.
    """

    label: str
    is_integer: bool


def _needs_value(error: BaseException) -> bool:
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return True
    return _VALUE.search(str(error)) is not None


def _explain_value(error: BaseException, at: str, size_hint: int | None) -> DataDependentError:
    step = find_raising_step(error)
    call = _find_call(step) if step else None
    label = call.label if call else str(getattr(error, "func", "a value"))
    quote = _quote(step) if step else ""
    return DataDependentError(
        f"`{quote or label}`{at} depends on the values of a tensor, of which an analysis has none",
        hint=_suggest_for_value(error, call, size_hint),
    )


def _suggest_for_value(error: BaseException, call: _Call | None, size_hint: int | None) -> str:
    label, operator = call.label if call else "", getattr(error, "func", None)
    if takes_hint(operator) and size_hint is None:
        if operator is not torch.ops.aten._local_scalar_dense.default:
            return "give a size hint, how many elements are found: --size-hint N or size_hint=N"
        if label not in _NUMBERS or (call and call.is_integer):
            return "if it is a size, give a size hint: --size-hint N or size_hint=N"
    if label in ("pack_padded_sequence", "_pack_padded_sequence", "ctc_loss"):
        return (
            "the lengths decide sizes: from Python, give them as a real tensor (of integers, on "
            "the CPU) or numbers; or make them in the model, torch.full(...)"
        )
    if label == "bool":
        return "let a shape or an argument of the model decide, not the data"
    if label in _NUMBERS:
        return "stay with tensors in what is analysed, and take numbers out of them elsewhere"
    return "take it out of what is analysed"


_NUMBERS = ("bool", "item", "float", "int", "index", "complex", "tolist", "numpy", "format")


def _find_call(step: TracebackType) -> _Call | None:
    """The function of torch that the line called, as the modes of torch functions saw it."""
    for frame in _iterate_frames(step.tb_next):
        if frame.f_code.co_name == "__torch_function__":
            func, args = frame.f_locals["func"], frame.f_locals["args"]
            tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
            is_integer = tensor is not None and not (
                tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
            )
            return _Call(describe_function(func)[2], is_integer)
    return None


def _quote(step: TracebackType) -> str:
    """The expression that failed, as it is written; a branch with its keyword."""
    span = find_span(step.tb_frame.f_code, step.tb_lasti)
    if span is None:
        return ""
    first, last, start, end = span
    # Columns count bytes of UTF-8.
    line = linecache.getline(step.tb_frame.f_code.co_filename, first).encode().rstrip()
    before, text = line[:start].decode().lstrip(), line[start:].decode()
    if first == last:
        text = line[start:end].decode()
    elif not _BRANCH.match(text):
        return ""
    if _BRANCH.fullmatch(before):
        text = f"{before}{text}"
    text = text.removesuffix(":")
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 3]}..."
