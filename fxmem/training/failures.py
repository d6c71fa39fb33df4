"""Failures of a step in one line: the cause, the user's own line, and what to try."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from fxmem.errors import DataDependentError, FxmemError, TraceError, summarize_error
from fxmem.graph import is_installed
from fxmem.loading.importing import explain_missing_package, find_missing_package
from fxmem.loading.inputs import suggest_shape
from fxmem.recording.constants import HINTED, is_index
from fxmem.source import (
    find_raising_source,
    find_raising_step,
    find_span,
    is_machinery,
)
from fxmem.tracing.fxgraph import describe_function
from fxmem.versions.operators import aten

_TRACED = "_fxmem_traced"
_LONGEST_QUOTE = 60
_HOW_TO_HINT = "--size-hint N or size_hint=N"
_DEBUG = "see the whole traceback with --debug"
_CAUSES = (
    (
        r"modified by an inplace operation: [\s\S]* is output [0-9]+ of (\w+?)(?:Backward0)?,",
        "backward needs the result of {0}, which the model changes in place afterwards",
        "training it fails everywhere: take the operation that is not in place",
    ),
    (
        r"backward through the graph a second time",
        "backward runs a second time through what an earlier step or backward has computed",
        "training it fails everywhere: detach() what the model keeps from step to step",
    ),
    (
        r'Module \[(\w+)\] is missing the required "forward" function',
        "{0} is called{at} and has no method forward",
        "define forward(self, ...) in it; of a ModuleList, call the modules one by one",
    ),
    (
        r"'aten::batch_norm_stats'",
        "SyncBatchNorm{at} is not analysed",
        "leave out convert_sync_batchnorm: BatchNorm holds as much between its operators",
    ),
    (
        r"Error building extension '(\w+)'",
        "the extension {0} of C++ or CUDA{at} does not compile here",
        "what its kernels take is unknown to fxmem: leave it out",
    ),
    (  # of strided ones, and of jagged ones: the texts of other places go on
        r"aten[.:]+_nested_\w+|^self\.shape_env must not be None$",
        "tensors of torch.nested{at} are not supported",
        "pad them",
    ),
    (
        r"no fake impl registered for <CustomOpDef\((.*?)\)>",
        "the operator {0}{at} does not run on tensors without data",
        "give it a fake kernel with torch.library.register_fake",
    ),
    (
        r"no rule registered for \w+ (\w+) and mode",
        "{0}{at} does not run on tensors without data",
        "compile the code that calls it, and leave out --eager and compile=False",
    ),
)
"""Patterns of errors' texts, with the cause and the hint to print for them."""
_ANYWHERE = (
    (
        r"(?i)\b(cuda|hip|mps|xpu|nvidia|nvtx|accelerator)\b|dummy base class",
        "there is no GPU in an analysis: leave out what needs one besides tensors",
        "",
    ),
    (
        r"process group",
        "say how many processes there are: --mesh dp=8, or mesh= in Python",
        "a script that torchrun starts is one rank: fxmem run --world-size 8",
    ),
)
"""Patterns of errors' texts, whoever raised them, with the hints for a model and a script."""
_IN_TORCH = (
    (
        r"on the same device|two different devices",  # as releases until 2.12 say it
        "a tensor is where it was made: give it the device of the others; "
        "--device cpu or device='cpu' if all of it is to run on the CPU",
        "a tensor is where it was made: give it the device of the others",
    ),
    (
        r"data is not allocated",
        "values of a tensor are read, which has none: sequences are to be packed in forward;"
        " the inputs are {given}",
        "values of a tensor on the GPU are read, which has none here",
    ),
    (
        r"(?i)scalar types: Long, Int|scalar type Long|dtype int32/int64",
        "an input of integers is written 4x8:int64; the inputs are {given}",
        "",
    ),
    (
        r"(?i)\b(shapes?|sizes?|dim\w*|d?types?|scalar types?|channels?|broadcast\w*|ind(ex|ices)"
        r"|lengths?|elements?|values? per|must be|should be|expected|expects|invalid)\b",
        "check shapes and dtypes of the inputs: {given}",
        "",
    ),
)
"""Patterns of errors' texts that PyTorch raised, with the hints for them."""
_VALUE = re.compile(
    r"\.numpy\(\) is not supported for tensor subclasses|Numpy is not available"
    r"|unsupported format string passed to FakeTensor"
)
_BRANCH = re.compile(r"(if|elif|while|assert)( not)?\b[ (]*")


def explain_failure(
    error: BaseException, inputs: Sequence[str] | None, has_size_hint: bool
) -> FxmemError:
    """Makes the error that says in one line what went wrong where in a step.

    Args:
        error: The error that the step raised.
        inputs: The step's inputs, as :func:`fxmem.fakes.fake_mode.describe_inputs` gives them; None
            for a script, which makes its own.
        has_size_hint: Whether a size hint for all lines was given.
    """
    if isinstance(error, FxmemError):
        return error
    where, text = find_raising_source(error), str(error)
    at = f" at {where}" if where else ""
    is_value = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    if is_value or _VALUE.search(text):
        return _explain_value(error, at, has_size_hint, inputs is None)
    if name := find_missing_package(error):
        return explain_missing_package(name, str(where or "the code"))
    if isinstance(error, SystemExit):
        return TraceError(f"the model called exit({error.code!r}){at}", hint="let forward return")
    if isinstance(error, UnsupportedOperatorException):
        text = f"no fake impl registered for <CustomOpDef({error.func})>"
    for pattern, cause, hint in _CAUSES:
        if match := re.search(pattern, text):
            return TraceError(cause.format(*match.groups(), at=at), hint)
    frames = [*_iterate_frames(error.__traceback__)]
    in_torch = bool(frames) and is_machinery(frames[-1].f_code.co_filename)
    hints = (*_ANYWHERE, *(_IN_TORCH if in_torch else ()))
    given = ", ".join(inputs or ()) or "none were given"
    texts = (each[2 if inputs is None else 1] for each in hints if re.search(each[0], text))
    found = (hint.format(given=given) for hint in texts if hint)
    # The user knows nothing of fake tensors, nor that those of the GPU lie on cpu:0.
    summary = summarize_error(error).replace("FakeTensor", "Tensor").replace("cpu:0", "cuda:0")
    hint = suggest_shape(inputs or ()) or next(found, _DEBUG)
    return TraceError(f"the step failed{at}: {summary}", hint)


def is_traced(error: BaseException) -> bool:
    """Returns whether an error came while nodes were traced: else the step would fail again."""
    return hasattr(error, _TRACED)


def mark_traced(error: BaseException) -> None:
    """Notes of an error that it came while nodes were traced."""
    setattr(error, _TRACED, True)


def _iterate_frames(step: TracebackType | None) -> Iterator[FrameType]:
    while step is not None:
        yield step.tb_frame
        step = step.tb_next


# -- values that an analysis does not have ---------------------------------------------------------


def _explain_value(
    error: BaseException, at: str, has_size_hint: bool, is_script: bool
) -> DataDependentError:
    step, operator = find_raising_step(error), getattr(error, "func", None)
    line = f"; for this line alone, --size-hint {at[4:]}=N" if at else ""
    label, is_integer = "", False  # the function of torch that the line called, and on what
    for frame in _iterate_frames(step.tb_next if step else None):
        if frame.f_code.co_name == "__torch_function__":
            label = describe_function(frame.f_locals["func"])[2]
            tensor = next(iter(frame.f_locals["args"]), None)
            is_integer = (
                isinstance(tensor, Tensor) and is_index(tensor) and tensor.dtype != torch.bool
            )
            break
    if is_script and (has_size_hint or operator not in (_INDEX, *HINTED)):
        hint = "keep the tensor in the host's memory, where its values are real"
    elif label in ("pack_padded_sequence", "_pack_padded_sequence", "ctc_loss"):
        hint = (
            "the lengths decide sizes: from Python, give them as a real tensor (of integers, on "
            "the CPU) or numbers; or make them in the model, torch.full(...)"
        )
    elif not has_size_hint and operator is _ITEM and is_integer:
        hint = f"if it is a size, give a size hint: {_HOW_TO_HINT}{line}"
    elif not has_size_hint and operator is not _ITEM and operator in (_INDEX, *HINTED):
        hint = f"give a size hint, how many elements are found: {_HOW_TO_HINT}{line}"
    elif label in ("bool", "equal") and step and is_installed(step.tb_frame.f_code.co_filename):
        # As transformers 4 asks an attention mask whether it masks anything.
        hint = "a library asks: from Python, give the input that it looks at as a real tensor"
    elif label in ("bool", "equal"):
        hint = "let a shape or an argument of the model decide, not the data"
    else:
        hint = "stay with tensors in what is analysed, and take numbers out of them elsewhere"
    quote = (_quote(step) if step else "") or label or str(operator or "a value")
    return DataDependentError(
        f"`{quote}`{at} needs tensor values; fxmem analyses shapes only", hint=hint
    )


_INDEX = aten.index.Tensor
_ITEM = aten._local_scalar_dense.default


def _quote(step: TracebackType) -> str:
    """Quotes the expression that failed, as it is written; a branch with its keyword."""
    span = find_span(step.tb_frame.f_code, step.tb_lasti)
    if span is None:
        return ""
    first, last, start, end = span
    # Columns count bytes of UTF-8.
    line = linecache.getline(step.tb_frame.f_code.co_filename, first).encode().rstrip()
    text = line[start : end if first == last else None].decode()
    before = line[:start].decode().lstrip()
    if _BRANCH.fullmatch(before):
        text = f"{before}{text}"
    elif first != last and not _BRANCH.match(text):
        return ""
    text = text.removesuffix(":")
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 3]}..."
