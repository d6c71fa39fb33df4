"""What stands in front of the ``forward`` of modules that run by a plan of whole modules."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import nn

from fxmem.applying.calls import ModelCall
from fxmem.applying.replicas import HookMarks, Pairs, lend_tensors, list_lent
from fxmem.applying.runtime import checkpoint
from fxmem.applying.surroundings import MISCOMPILED, is_normalised
from fxmem.applying.walk import Walk
from fxmem.applying.warning import warn_caller
from fxmem.errors import UsageError
from fxmem.tracing.changes import Snapshot, is_same, take_snapshot


class OwnForward:
    """What stands in front of a module's ``forward``, as an attribute of the module itself.

    Attributes:
        module: The module.
        replaced: The ``forward`` that the module had as an attribute; None where that was its
            class's.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced: Callable[..., Any] | None = vars(module).get("forward")

    def call_own(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own ``forward``, in words that compilers follow."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own ``forward``, whose signature this has."""
        if self.replaced is not None:
            return self.replaced
        bound: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return bound

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    @property
    def __name__(self) -> str:
        return str(getattr(self.__wrapped__, "__name__", "forward"))

    @property
    def __code__(self) -> CodeType:
        code: CodeType = self.__wrapped__.__code__  # which ``torch.export`` names in errors
        return code


class OwnState:
    """What a module with a ``forward`` of its own is copied by, as an attribute of it.

    A shallow copy is another object with the same attributes, and a ``forward`` that stands in
    front of this one would go on running this one: it has its class's.

    Attributes:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> Any:
        """In the place of the module's ``__getstate__``."""
        own = getattr(type(self.module), "__getstate__", None)
        state = vars(self.module) if own is None else own(self.module)
        forward = state.get("forward") if isinstance(state, dict) else None
        return _State(state, forward) if isinstance(forward, OwnForward) else state


class _State(dict[str, Any]):
    """Attributes as a shallow copy takes them, which become all of them in others."""

    def __init__(self, whole: dict[str, Any], forward: OwnForward) -> None:
        super().__init__(whole)
        self._whole = whole
        del self["forward"]
        self.pop("__getstate__", None)
        if forward.replaced is not None:
            self["forward"] = forward.replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self._whole, memo)

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter(self._whole.items())


def set_forward(module: nn.Module, forward: OwnForward) -> None:
    """Has a ``forward`` stand in front of a module's, and copies of the module know of that."""
    vars(module).update({"forward": forward, "__getstate__": OwnState(module)})


def list_own(module: nn.Module) -> dict[str, Any]:
    """What a module holds beside what :func:`set_forward` gave it."""
    held = dict(vars(module))
    forward = held.get("forward")
    if isinstance(forward, OwnForward):
        del held["forward"]
        if forward.replaced is not None:
            held["forward"] = forward.replaced
    if isinstance(held.get("__getstate__"), OwnState):
        del held["__getstate__"]
    return held


class PlannedForward(OwnForward):
    """That of the whole model, which knows the model that the plan was applied to.

    Attributes:
        original: That model.
        pairs: Its modules, each with its copy; itself first.
    """

    def __init__(self, module: nn.Module, original: nn.Module, pairs: Pairs) -> None:
        super().__init__(module)
        self.original = original
        self.pairs = pairs
        self._lent = list_lent(pairs)
        self._marks = HookMarks(pairs)
        self._walk = Walk(module)
        self._is_miscompiled = is_normalised(module.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; what runs again in backward knows the call that it ran in first."""
        if torch.compiler.is_compiling():
            if self._is_miscompiled and self.module.training and torch.is_grad_enabled():
                warn_caller(MISCOMPILED)  # here, as it breaks the graph
            return self.call_own(*args, **kwargs)
        with self._marks.share():
            if not (self.module.training and torch.is_grad_enabled()):
                return self.call_own(*args, **kwargs)
            self._walk.update()
            with ModelCall(self._walk).enter(), lend_tensors(self._lent):
                return self.call_own(*args, **kwargs)

    def move(self, module: nn.Module, original: nn.Module) -> PlannedForward:
        """That of another object in the planned model's place, and in the original's."""
        moved = PlannedForward(module, original, ((original, module), *self.pairs[1:]))
        moved.replaced = self.replaced
        return moved


class CheckpointedForward(OwnForward):
    """That of a module which backward computes again.

    Attributes:
        fqn: The module's name.
        random: Whether it draws random numbers.
        norms: The batch normalisations within it.
        states: What else it is known to change, as modules and names of their tensors.
        is_miscompiled: Whether a compiler does not take it under a checkpoint.
    """

    def __init__(
        self,
        module: nn.Module,
        fqn: str,
        random: bool,
        norms: tuple[nn.Module, ...],
        states: tuple[tuple[nn.Module, str], ...],
        is_miscompiled: bool,
    ) -> None:
        super().__init__(module)
        self.fqn = fqn
        self.random = random
        self.norms = norms
        self.states = states
        self.is_miscompiled = is_miscompiled
        self._walk = Walk(module)
        self._known = {inner: frozenset(inner._buffers) for inner in module.modules()}
        self._others = [
            (f"{name}.{key}", inner, key)
            for name, inner in module.named_modules(prefix=fqn)
            for key, value in vars(inner).items()
            if isinstance(value, torch.Tensor)
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module without saving what its backward needs.

        Raises:
            UsageError: It changed an object that it was given, which it would do once more; in
                backward, where others changed one, or a tensor of the module, meanwhile.
        """
        if not (self.module.training and torch.is_grad_enabled()):
            return self.call_own(*args, **kwargs)
        if self.is_miscompiled and torch.compiler.is_compiling():
            return self.call_own(*args, **kwargs)
        names, count = tuple(kwargs), len(args)
        values = (*args, *kwargs.values())

        # The checkpoint takes some keywords for its own, and all tensors where it can watch them.
        def run(*values: Any) -> Any:
            return self.call_own(*values[:count], **dict(zip(names, values[count:], strict=True)))

        if torch.compiler.is_compiling():
            return self._checkpoint(run, *values)
        before = _take_snapshot(values)
        given = [values]

        def run_twice(*copies: Any) -> Any:
            """Takes what the call was given, and in backward what that was then."""
            if given:
                return run(*given.pop())
            self._check(before, copies)
            return run(*copies)

        copies = map(_copy_containers, values)
        result = self._checkpoint(run_twice, *copies)
        self._check(before, values)
        return result

    def _checkpoint(self, run: Callable[..., Any], *values: Any) -> Any:
        return checkpoint(
            run,
            *values,
            random=self.random,
            norms=self.norms,
            states=self._list_states(),
            reads={self.fqn: self.module, **self._find_others()},
            name=self.fqn,
        )

    def _list_states(self) -> list[tuple[nn.Module, str]]:
        """What the module changes, as far as is known, and buffers that came to it since.

        Those of another layer, or of a weight's normalisation, may change with every call.
        """
        self._walk.update()
        new = [
            (module, name)
            for module in self._walk.modules
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in self._known.get(module, ())
        ]
        return [*((module, name) for module, name in self.states if hasattr(module, name)), *new]

    def _find_others(self) -> dict[str, torch.Tensor]:
        """What modules hold as attributes beside parameters and buffers, and did not compute."""
        found = ((name, vars(module).get(key)) for name, module, key in self._others)
        return {n: held for n, held in found if isinstance(held, torch.Tensor) and held.is_leaf}

    def _check(self, before: Snapshot, values: Iterable[Any]) -> None:
        if not is_same(before, _take_snapshot(values)):
            raise UsageError(
                f"{self.fqn} is given an object, such as a cache, that it or others change:"
                " computed again in backward, it would compute something else",
                hint="train without a cache (use_cache=False), or plan with these arguments",
            )


def _take_snapshot(values: Iterable[Any]) -> Snapshot:
    """Of all but tensors, for which the checkpoint hands out others on the same memory."""
    return take_snapshot(value for value in values if not isinstance(value, torch.Tensor))


def _copy_containers(value: Any) -> Any:
    """Lists and the like as they are now: whoever made them may go on adding to them."""
    kind = type(value)
    if kind in (list, tuple, set):
        return kind(map(_copy_containers, value))
    if kind is dict:
        return {key: _copy_containers(held) for key, held in value.items()}
    return value
