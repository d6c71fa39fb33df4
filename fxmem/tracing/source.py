"""Which line of the user's code is running."""

from __future__ import annotations

import functools
import os
import sys
from types import FrameType, TracebackType

import torch

from fxmem.graph import SourceLocation

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FXMEM = os.path.dirname(os.path.dirname(__file__)) + os.sep

_WRAPPERS = tuple(
    fragment.replace("/", os.sep)
    for fragment in (
        "/transformers/utils/",  # decorators around forward
        "/transformers/modeling_layers.py",  # GradientCheckpointingLayer.__call__
        "/accelerate/hooks.py",
        "/einops/",
    )
)
_ENTRIES = ("run_model", "run_loss")
"""Functions of the tracer that call the user's code."""
_STDLIB = os.path.dirname(os.__file__) + os.sep


@functools.cache
def is_user_file(filename: str) -> bool:
    """Whether a line of that file is worth showing: a model's code, no wrapper around it.

    Files of torch, of fxmem, of the standard library (decorators, context managers) and
    generated code are not.
    """
    if filename.startswith(("<", _TORCH, _FXMEM)):
        return False
    if filename.startswith(_STDLIB) and "site-packages" not in filename:
        return False
    return not any(wrapper in filename for wrapper in _WRAPPERS)


def find_source() -> SourceLocation | None:
    """The innermost running line of the user's code.

    Returns:
        None where no line of the user's code runs between the tracer's call of the model or the
        loss and here; the lines around that call are not what made anything.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            return SourceLocation(code.co_filename, frame.f_lineno or 0, code.co_name)
        if code.co_name in _ENTRIES and code.co_filename.startswith(_FXMEM):
            return None
        frame = frame.f_back
    return None


def find_raising_source(traceback: TracebackType | None) -> SourceLocation | None:
    """The innermost line of the user's code in a traceback, for error messages."""
    found: SourceLocation | None = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user_file(code.co_filename):
            found = SourceLocation(code.co_filename, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return found
