"""Training calls of a model that are left out, as it was recorded with inputs of these sizes.

Between the steps that are reported and an evaluation, a step has no reader: its model is answered
with results of the sizes that were recorded, and backward makes the gradients alone. Optimizers
step as ever.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from fxmem.recording.recorder import Recorder
from fxmem.scripts.repeats.call_state import PLAIN
from fxmem.scripts.repeats.micro_batches import StandIn
from fxmem.tracing.conditions import read_context


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class _Pickler(pickle.Pickler):
    """Writes an object, and its tensors by their places in a list."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Makes an object with tensors of a list."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self.persistent_load = tensors.__getitem__  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Result:
    """What a call returned, without its tensors."""

    pickled: bytes
    tensors: tuple[_Tensor, ...]

    @classmethod
    def read(cls, result: Any) -> _Result | None:
        """Reads a result; None for one that cannot be made again."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        try:
            pickler.dump(result)
        except Exception:  # of any object that the model returns
            return None
        is_known = all(type(each) is FakeTensor for each in pickler.tensors)
        tensors = tuple(map(_describe, pickler.tensors))
        return cls(file.getvalue(), tensors) if is_known and tensors else None

    def make(self, tensors: Sequence[Tensor]) -> Any:
        return _Unpickler(io.BytesIO(self.pickled), tensors).load()


class LeftOutCalls:
    """Answers training calls whose sizes were recorded, while that is wanted.

    Args:
        recorder: Records the operators.
        is_on: Whether steps will be left out.
        is_wanted: Returns whether the step that runs is one of them.
        be_silent: Makes no nodes of what runs within.
    """

    def __init__(
        self,
        recorder: Recorder,
        is_on: bool,
        is_wanted: Callable[[], bool],
        be_silent: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._has_run = self._has_answered = False
        self._recorder = recorder
        self._is_on = is_on
        self._is_wanted = is_wanted
        self._be_silent = be_silent
        self._known: dict[Any, _Result] = {}
        self._trained: set[int] = set()

    @property
    def is_all(self) -> bool:
        """True if calls were answered since the window began, and no model ran."""
        return self._has_answered and not self._has_run

    def begin_window(self) -> None:
        self._has_run = self._has_answered = False

    def call(self, run: Callable[[], Any], module: nn.Module, arguments: Any) -> Any:
        """Calls a model, or answers as it would."""
        if not self._is_on:
            return run()
        key = None
        if torch.is_grad_enabled() and module.training:
            with torch._C.DisableTorchFunction():
                key = _read_key(module, arguments)
            if key in self._known and self._is_wanted():
                self._has_answered = True
                return self._answer(module, self._known[key])
        self._has_run = True
        result = run()
        if key is not None and key not in self._known:
            with torch._C.DisableTorchFunction():
                known = _Result.read(result)
            if known is not None:
                self._known[key] = known
        return result

    def see_optimizer(self, optimizer: Optimizer) -> None:
        """Notes which parameters of an optimizer that steps have a gradient."""
        for group in optimizer.param_groups if self._is_on else ():
            self._trained.update(id(each) for each in group["params"] if each.grad is not None)

    def _answer(self, module: nn.Module, known: _Result) -> Any:
        parameters = [each for each in module.parameters() if id(each) in self._trained]

        def finish(*_gradients: Tensor) -> None:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)

        with self._be_silent():
            made = [each.make() for each in known.tensors]
            anchor = self._recorder.make_unseen(lambda: torch.empty_like(made[0]).requires_grad_())
            apply: Any = StandIn.apply
            return known.make(
                apply(anchor, made, [each.requires_grad for each in known.tensors], finish)
            )


def _read_key(module: nn.Module, arguments: Any) -> Any:
    """Reads what decides over a call; None where what it does is to be seen."""
    leaves, structure = tree_flatten(arguments)
    described = [_describe(leaf) for leaf in leaves]
    needs_grad = any(isinstance(each, _Tensor) and each.requires_grad for each in described)
    if torch.distributed.is_initialized() or needs_grad or NotImplemented in described:
        return None
    for each in module.modules():
        if each._forward_hooks or each._forward_pre_hooks or each._backward_hooks:
            return None
    if any(each._post_accumulate_grad_hooks for each in module.parameters()):
        return None
    return id(module), str(structure), tuple(described), repr(read_context())


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf if isinstance(leaf, PLAIN) else NotImplemented
    return _Tensor(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
