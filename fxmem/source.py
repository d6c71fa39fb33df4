"""The running line of the user's code."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType

import torch

from fxmem.graph import SourceLocation, is_installed

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FXMEM = os.path.dirname(__file__) + os.sep

_WRAPPERS = tuple(
    fragment.replace("/", os.sep)
    for fragment in (
        "/transformers/utils/",  # decorators around forward
        "/transformers/modeling_layers.py",  # GradientCheckpointingLayer.__call__
        "/accelerate/hooks.py",
        "/einops/",
    )
)
_ENTRIES = ("run_loop", "trace_forward")
"""Functions of a training that call the user's code."""
_STDLIB = os.path.dirname(os.__file__) + os.sep


Span = tuple[int, int, int, int]
"""The place of an expression: first line, last line, first column, end column."""


@functools.cache
def is_user_file(filename: str) -> bool:
    """Returns whether a line of that file is worth showing: a model's code, no wrapper around it.

    Files of torch, of fxmem, of the standard library (decorators, context managers), of Cython and
    generated code are not.
    """
    if filename.startswith("<") or filename.endswith(".pyx") or is_machinery(filename):
        return False
    if filename.startswith(_STDLIB) and not is_installed(filename):
        return False
    return not any(wrapper in filename for wrapper in _WRAPPERS)


def is_machinery(filename: str) -> bool:
    """Returns whether a file is one of torch or of fxmem."""
    return filename.startswith((_TORCH, _FXMEM))


def is_fxmem(filename: str) -> bool:
    """Returns whether a file is one of fxmem."""
    return filename.startswith(_FXMEM)


def find_source() -> SourceLocation | None:
    """Finds the innermost line of the user's code that runs in the model or the loss."""
    frame = next(iterate_user_frames(sys._getframe(1)), None)
    if frame is None:
        return None
    return SourceLocation(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)


def iterate_user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Iterates over the frames of the user's code in the model or the loss, the innermost first."""
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            yield frame
        elif code.co_name in _ENTRIES and code.co_filename.startswith(_FXMEM):
            return
        frame = frame.f_back


def find_raising_source(error: BaseException) -> SourceLocation | None:
    """Finds the innermost line of the user's own code that an error passed through.

    Installed packages count only where nothing else does.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return SourceLocation(error.filename, error.lineno or 1)
    step = find_raising_step(error)
    if step is None:
        return None
    code = step.tb_frame.f_code
    return SourceLocation(code.co_filename, step.tb_lineno, code.co_name)


def find_raising_step(error: BaseException) -> TracebackType | None:
    """Finds the entry of an error's traceback for that line."""
    found: TracebackType | None = None
    is_own = False
    step = error.__traceback__
    while step is not None:
        filename = step.tb_frame.f_code.co_filename
        if is_user_file(filename) and not (is_installed(filename) and is_own):
            found, is_own = step, not is_installed(filename)
        step = step.tb_next
    return found


def find_span(code: CodeType, instruction: int) -> Span | None:
    """Finds the place of the expression that an instruction, ``f_lasti`` of a frame, belongs to.

    Returns None before Python 3.11, which does not say.
    """
    if not hasattr(code, "co_positions"):
        return None
    span = next(itertools.islice(code.co_positions(), instruction // 2, None))
    return None if None in span else span
