"""Values that a script reads from fake tensors, and the stand-ins that it gets.

A loss that is printed, an accuracy, a learning rate that a schedule computes from a metric: fake
tensors have no values, so a script that reads one gets a plausible one, and the line is noted.
"""

from __future__ import annotations

import itertools
import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.errors import TraceError
from fxmem.fakes.branches import (
    find_passing_answer,
    find_training_answer,
    find_usual_answer,
    is_in_while,
)
from fxmem.fakes.values import SELECTED, STAND_IN, find_known, find_partly_known
from fxmem.graph import Operation, SourceLocation, is_installed
from fxmem.recording.bounds import find_bounds
from fxmem.scripts.script_run import Read
from fxmem.source import is_machinery, is_user_file

_SCALER = os.path.join("torch", "amp", "grad_scaler.py")
_LBFGS = os.path.join("torch", "optim", "lbfgs.py")
_PROGRESS = ("if ys > ", "if abs(gtd_new) <= ")
"""Tests of LBFGS that keep another direction, and end the search along one."""
_SILENT = (_SCALER, os.path.join("torch", "optim") + os.sep)
"""Files of torch whose own reads decide nothing that a user would want to know."""

_MOST_COPIED = 1 << 20
"""Elements of the largest tensor that is made up when it is copied to the host; others stay fake
until the script asks for their values."""
_MOST_BYTES = 1 << 28
"""The largest array of stand-ins with memory of its own; a larger one repeats a single element."""
_LEAST_NUMBER = 0.75
"""Floating numbers of an array lie between this one and 1, as probabilities may."""
_LOW = frozenset(f"aten.{name}.default" for name in ("min", "amin", "sigmoid", "_softmax"))
"""Operators whose result is less than 1, or than the greatest of what they are given."""
_PARTS = 1 << 22
"""What 1 is divided into: sums of so small parts are exact in single precision."""
_COPIES = frozenset({"aten._to_copy.default", "aten.clone.default"})
_ORDERS = frozenset(
    f"aten.{name}" for name in ("topk.default", "sort.default", "sort.stable", "randperm.default")
) | {"aten.multinomial.default"}
"""Operators whose whole numbers are indices that differ, in the last dimension."""
_NONZERO = "aten.nonzero.default"
"""Finds elements, each of whose indices are a row."""
_MOST_ROUNDS, _MOST_OPERATORS = 1 << 12, 30_000
"""Reads at one line, and reads and operators, in one step: then a ``while`` around it never ends.

Few texts are generated that are as long, and what has as many short rounds has fewer operators. A
``for`` over the images of a test set ends by itself.
"""

Origin: TypeAlias = tuple[str, tuple[int, ...], int | None]
Lines: TypeAlias = tuple[SourceLocation, SourceLocation | None]
"""A line of the script, and that of a library that it called."""


class ReadLog:
    """Notes the lines that read values, each once.

    Args:
        trace_back: Yields the operators that a tensor was computed by, the last one first: their
            names, the sizes of their results, and the dimension of a softmax.
    """

    def __init__(self, trace_back: Callable[[Tensor], Iterator[Origin]]) -> None:
        self._trace_back = trace_back
        self._generator = torch.Generator().manual_seed(0)  # the script's own is left as it is
        self.reads: dict[Lines, Read] = {}
        self.is_size = False  # the function that runs reads a number as one
        self._operations: Sequence[Operation] = ()  # of the step
        self._rounds: Counter[Lines] = Counter()
        self._losses = itertools.count(1)
        self.count = 0  # of scalars that were read

    def begin_step(self, operations: Sequence[Operation]) -> None:
        """Counts reads anew, beside the operators of a step."""
        self._operations = operations
        self._rounds.clear()

    def answer_scalar(self, tensor: Tensor) -> Any:
        """Makes the number that stands for a tensor's only element: 1, or what is nearest to it.

        A size is the largest that it may be, and so is the greatest of some known numbers, such as
        those of the graphs of some nodes. Gradient scalers are told that all gradients are finite.
        LBFGS is told that the loss falls, and runs to its last iteration with a full history.
        """
        frame = sys._getframe(1)
        if (asker := _find_asker(frame, _SCALER)) is not None:
            scaler: Any = asker.f_locals.get("self")
            return scaler._init_scale if asker.f_code.co_name == "get_scale" else 0.0
        if (asker := _find_asker(frame, _LBFGS)) is not None:
            if tensor.dtype == torch.bool:
                line = linecache.getline(asker.f_code.co_filename, asker.f_lineno or 0)
                return line.strip().startswith(_PROGRESS)
            return 1 / next(self._losses)
        if tensor.dtype == torch.bool:
            known = find_known(tensor)
            if known is None or known.assumed != STAND_IN:
                return self.answer_truth(frame)
            with _disable_current_modes():
                stand_in = bool(known.real)
            return self.answer_truth(frame, stand_in)
        value: Any = 1.0 if tensor.is_floating_point() else 1
        if tensor.is_floating_point() and next(self._trace_back(tensor), ("",))[0] in _LOW:
            value = _LEAST_NUMBER
        if (bounds := find_bounds(tensor)) is not None:
            with _disable_current_modes():
                least, most = (bound.item() for bound in bounds)
            known = find_partly_known(tensor)
            is_selected = known is not None and known.assumed == SELECTED
            value = most if self.is_size or is_selected else min(max(value, least), most)
        self.count += 1
        self.note(value)
        return value

    def answer_truth(self, frame: FrameType, stand_in: bool | None = None) -> bool:
        """Answers a test that code within a frame makes of a truth value with but a stand-in."""
        passing = find_passing_answer(frame)
        if passing is not None:
            return passing
        answer = find_usual_answer(frame) if stand_in is None else stand_in
        self.note(answer, decides=True)
        return answer

    def copy_to_host(self, tensor: Tensor) -> Tensor | None:
        """Makes the real tensor that stands for a fake one's copy in the host's memory.

        None for one that is too large to be made up.
        """
        return None if tensor.numel() > _MOST_COPIED else self.make_real(tensor)

    def make_real(self, tensor: Tensor) -> Tensor:
        """Makes a real tensor: of stand-ins, but for what is known. One of known values is no read.

        Truth values are True, as masks find all elements; a single one is False, as tests are.
        Whole numbers are 1, or indices in order. Floating ones differ from each other, since a
        matrix is inverted and points are told apart by that; rows of a softmax sum to 1, and so do
        those of its mean and of what else is computed of it.
        """
        one = tensor.dim() > 0 or tensor.dtype != torch.bool
        bounds = find_bounds(tensor)
        is_lean = tensor.numel() * tensor.element_size() > _MOST_BYTES
        is_varied = tensor.numel() > 1 and not is_lean and tensor.dtype != torch.bool
        is_floating = is_varied and tensor.is_floating_point()
        with _disable_current_modes():
            made = torch.full((), one, dtype=tensor.dtype)
            if is_floating and bounds is None:
                made = self._draw(tensor)
            elif is_varied and not is_floating:
                made = self._list_indices(tensor, made)
            text = "made-up numbers" if made.dim() else "ones" if one else "False"
            if bounds is not None:
                made = torch.minimum(torch.maximum(made, bounds[0]), bounds[1])
            elif not made.dim():
                made = made.expand(tensor.shape) if is_lean else made.repeat(tensor.shape)
        if find_known(tensor) is None:
            self.note(text)
        return made

    def _draw(self, tensor: Tensor) -> Tensor:
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        made = torch.rand(tensor.shape, generator=self._generator, dtype=dtype)
        made.mul_(1 - _LEAST_NUMBER).add_(_LEAST_NUMBER)
        is_log = True
        for name, shape, dim in self._trace_back(tensor):
            is_log &= name != "aten.exp.default"
            if dim is not None:
                alike = [-i for i in range(1, made.dim() + 1) if made.shape[-i] == shape[dim]]
                if alike:
                    _share_out(made, dim if dim in alike else alike[0])
                if is_log and name == "aten._log_softmax.default":
                    made.log_()
                break
        return made.to(tensor.dtype)

    def _list_indices(self, tensor: Tensor, other: Tensor) -> Tensor:
        """Lists indices that differ, of a view those in its place; else returns the other."""
        origins = self._trace_back(tensor)
        name, shape, _ = next(origins, ("", (), None))
        while name in _COPIES:
            name, *_ = next(origins, ("",))
        size, strides, offset = prod(shape), tensor.stride(), tensor.storage_offset()
        last = offset + sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True))
        if name not in (*_ORDERS, _NONZERO) or last >= size:
            return other
        places = torch.arange(size).as_strided(tensor.shape, strides, offset)
        found = places // shape[-1] if name == _NONZERO else places % shape[-1]
        return found.to(tensor.dtype)

    def list_values(self, tensor: Tensor) -> Any:
        """Lists the values that stand for a tensor's, as ``Tensor.tolist``."""
        with torch._C.DisableTorchFunction():
            real = self.make_real(tensor)
            if tensor.numel() <= _MOST_COPIED:
                return real.tolist()
            return _nest(real.flatten()[0].item(), tuple(tensor.shape))

    def see_comparison(self, frame: FrameType, result: object) -> object:
        """Notes that the script's own code has compared a stand-in: a branch may hang on it.

        Returns the result, or what an assertion needs to pass and training to go on.
        """
        passing = find_passing_answer(frame)
        if passing is not None:
            return passing
        training = find_training_answer(frame)
        result = result if training is None else training
        name = frame.f_code.co_filename
        if is_user_file(name) and not is_installed(name):
            source = SourceLocation(name, frame.f_lineno or 0, frame.f_code.co_name)
            self.reads[source, None] = Read(source, str(result), decides=True)
        return result

    def note(self, value: object, *, decides: bool = False) -> None:
        """Notes the line that runs: the script's own, and the library's where one reads for it."""
        lines = find_lines(sys._getframe(1))
        if lines is None:
            return
        if lines not in self.reads or decides:
            self.reads[lines] = Read(lines[0], str(value), decides, lines[1])
        self._rounds[lines] += 1
        rounds = self._rounds[lines]
        is_long = rounds >= _MOST_ROUNDS and rounds + len(self._operations) >= _MOST_OPERATORS
        if is_long and is_in_while(sys._getframe(1)):
            raise TraceError(
                f"the loop that reads a value at {lines[1] or lines[0]} has not ended after"
                f" {rounds:,} reads in a step: it may wait for a value, and none is known",
                hint="end it after a number of rounds",
            )


def _share_out(numbers: Tensor, dim: int) -> None:
    """Makes numbers sum to 1 along a dimension: exactly, which ``numpy.random.choice`` checks."""
    numbers /= numbers.sum(dim, keepdim=True)
    numbers.mul_(_PARTS).floor_().div_(_PARTS)
    numbers.narrow(dim, 0, 1).add_(1 - numbers.sum(dim, keepdim=True))


def _nest(element: Any, shape: tuple[int, ...]) -> Any:
    """Makes lists in lists; of the innermost, copies are quick."""
    if len(shape) <= 1:
        return [element] * shape[0] if shape else element
    return [_nest(element, shape[1:]) for _ in range(shape[0])]


def _find_asker(frame: FrameType | None, file: str) -> FrameType | None:
    """Finds the frame of a file of torch that asks, through the methods of tensors."""
    while frame is not None and is_machinery(frame.f_code.co_filename):
        if frame.f_code.co_filename.endswith(file):
            return frame
        frame = frame.f_back
    return None


def find_lines(frame: FrameType | None) -> Lines | None:
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
