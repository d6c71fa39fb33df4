"""Values that a script reads from fake tensors, and the stand-ins that it gets.

A loss that is printed, an accuracy, a learning rate that a schedule computes from a metric: fake
tensors have no values, so a script that reads one gets a plausible one, and the line is noted.
"""

from __future__ import annotations

import itertools
import linecache
import os
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.graph import SourceLocation, is_installed
from fxmem.scripts.script_run import Read
from fxmem.tracing.source import is_machinery, is_user_file
from fxmem.tracing.values import find_passing_answer, find_value

_SCALER = os.path.join("torch", "amp", "grad_scaler.py")
_LBFGS = os.path.join("torch", "optim", "lbfgs.py")
_PROGRESS = ("if ys > ", "if abs(gtd_new) <= ")
"""Tests of LBFGS that keep another direction, and end the search along one."""
_SILENT = (_SCALER, os.path.join("torch", "optim") + os.sep)
"""Files of torch whose own reads decide nothing that a user would want to know."""


_MOST_COPIED = 1 << 20
"""Elements of the largest tensor that is made up on the host; a larger one stays fake."""


class ReadLog:
    """Notes the lines that read values, each once."""

    def __init__(self) -> None:
        self.reads: dict[tuple[SourceLocation, SourceLocation | None], Read] = {}
        self._losses = itertools.count(1)
        self.count = 0  # of scalars that were read

    def answer_scalar(self, tensor: Tensor) -> Any:
        """Makes the number that stands for a tensor's only element: 1, or True where that passes.

        Gradient scalers are told that all gradients are finite, and an assertion that it holds;
        any other truth value is False. LBFGS is told that the loss falls, and runs to its last
        iteration with a full history.
        """
        frame = sys._getframe(1)
        if _find_asker(frame, _SCALER) is not None:
            return 0.0
        if (asker := _find_asker(frame, _LBFGS)) is not None:
            if tensor.dtype == torch.bool:
                line = linecache.getline(asker.f_code.co_filename, asker.f_lineno or 0)
                return line.strip().startswith(_PROGRESS)
            return 1 / next(self._losses)
        if tensor.dtype == torch.bool:
            return self.answer_truth(frame)
        value: Any = 1.0 if tensor.is_floating_point() else 1
        self.count += 1
        self.note(value)
        return value

    def answer_truth(self, frame: FrameType) -> bool:
        """Tells whether a test that code within a frame makes passes: False if that is unknown."""
        passing = find_passing_answer(frame)
        if passing is None:
            self.note(False, decides=True)
        return bool(passing)

    def copy_to_host(self, tensor: Tensor) -> Tensor | None:
        """Makes the real tensor that stands for a fake one's copy in the host's memory.

        None for one that is too large to be made up. A copy of known values is no read.
        """
        if tensor.numel() > _MOST_COPIED:
            return None
        known = find_value(tensor)
        if known is None:
            self.note("ones" if tensor.dtype != torch.bool else "False")
        with _disable_current_modes():
            if known is not None:
                return known.clone()
            make = torch.zeros if tensor.dtype == torch.bool else torch.ones
            return make(tensor.shape, dtype=tensor.dtype)

    def see_comparison(self, frame: FrameType, result: object) -> None:
        """Notes that the script's own code has compared a stand-in: a branch may hang on it."""
        name = frame.f_code.co_filename
        if is_user_file(name) and not is_installed(name):
            source = SourceLocation(name, frame.f_lineno or 0, frame.f_code.co_name)
            self.reads[source, None] = Read(source, str(result), decides=True)

    def note(self, value: object, *, decides: bool = False) -> None:
        """Notes the line that runs: the script's own, and the library's where one reads for it."""
        lines = _find_lines(sys._getframe(1))
        if lines is not None and (lines not in self.reads or decides):
            self.reads[lines] = Read(lines[0], str(value), decides, lines[1])


def _find_asker(frame: FrameType | None, file: str) -> FrameType | None:
    """Finds the frame of a file of torch that asks, through the methods of tensors."""
    while frame is not None and is_machinery(frame.f_code.co_filename):
        if frame.f_code.co_filename.endswith(file):
            return frame
        frame = frame.f_back
    return None


def _find_lines(frame: FrameType | None) -> tuple[SourceLocation, SourceLocation | None] | None:
    """Finds the innermost line of the user's own files, and of a library that they called."""
    installed = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(_SCALER) or (is_machinery(name) and _SILENT[1] in name):
            return None
        if is_user_file(name):
            source = SourceLocation(name, frame.f_lineno or 0, frame.f_code.co_name)
            if not is_installed(name):
                return source, installed
            installed = installed or source
        frame = frame.f_back
    return None if installed is None else (installed, None)
