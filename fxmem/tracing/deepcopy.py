"""``copy.deepcopy`` that goes on where it would stop: at functions, weak references, optimizers.

``copy.deepcopy`` takes a function as it is, so a hook of the copy would act on the original:
what it closes over, its default arguments, the globals that its code names.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn, optim
from torch.autograd.graph import _get_grad_fn_or_grad_acc
from torch.utils._mode_utils import no_dispatch

from fxmem.tracing.reach import find_globals, iterate_reached, open_cell, reaches_state

Memo = dict[int, Any]
"""From the ids of objects to their copies, as ``copy.deepcopy`` keeps it."""

_SHARED = (ModuleType, type(threading.Lock()), type(threading.RLock()))
"""What the copy has in common with the original."""
_COPIERS = frozenset(
    {"__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"}
)
"""Methods by which a class decides what of it is copied, or pickled: all of it need not be."""
_reconstruct: Any = copy._reconstruct  # type: ignore[attr-defined]
_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


class _Globals(dict[str, Any]):
    """The globals of copied functions: copies of what was copied, else the originals."""

    def __init__(self, originals: dict[str, Any]) -> None:
        super().__init__()
        self._originals = originals

    def __missing__(self, name: str) -> Any:
        return self._originals[name]


@contextmanager
def copy_through_functions(modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Makes ``copy.deepcopy`` copy functions with all that they reach.

    A function that reaches no tensor, module or optimizer and cannot be copied stays shared.

    Args:
        modules: Copied attribute by attribute even if they define ``__deepcopy__`` or
            ``__getstate__``, which may leave out what they run with.
    """
    handlers: dict[type, Callable[[Any, Memo], Any]] = {
        FunctionType: _copy_function,
        MethodType: _copy_method,
        BuiltinFunctionType: _copy_builtin,
        weakref.ref: _copy_reference,
        dict: _copy_dict,
        _AccumulateGrad: _copy_accumulator,
        torch.Generator: lambda generator, memo: generator.clone_state(),
    }
    handlers |= dict.fromkeys(_SHARED, lambda value, memo: value)
    handlers |= dict.fromkeys(_find_own_copiers(modules), _copy_attributes)
    table: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    original = dict(table)
    # From Python 3.14 on, types that are taken as they are come before the table.
    atomic: Any = getattr(copy, "_atomic_types", frozenset())
    copy._atomic_types = atomic - handlers.keys()  # type: ignore[attr-defined]
    table.update(handlers)
    optim.Optimizer.__deepcopy__ = _copy_optimizer  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optim.Optimizer.__deepcopy__  # type: ignore[attr-defined]
        copy._atomic_types = atomic  # type: ignore[attr-defined]
        table.clear()
        table.update(original)


@contextmanager
def undo_failed(memo: Memo) -> Iterator[None]:
    """Leaves nothing half copied in the memo where an exception is raised within."""
    memo.setdefault(id(memo), [])  # what deepcopy keeps alive: never taken out again
    mark = len(memo)
    try:
        yield
    except Exception:
        while len(memo) > mark:
            memo.popitem()
        raise


def find_class_state(model: nn.Module) -> Memo:
    """Containers that methods of the model's classes close over, each as its own copy.

    A class is not copied. What its methods fill and a hook reads must stay one object.
    """
    state: Memo = {}
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        for method in vars(kind).values():
            cells = method.__closure__ or () if isinstance(method, FunctionType) else ()
            for value in map(open_cell, cells):
                if isinstance(value, dict | list | set) and not reaches_state(value):
                    state[id(value)] = value
    return state


def find_accumulator(leaf: Tensor) -> Any:
    """The autograd node that accumulates a leaf's gradient."""
    with no_dispatch(), torch._C.DisableTorchFunctionSubclass():
        return _get_grad_fn_or_grad_acc(leaf)


def _find_own_copiers(modules: Iterable[nn.Module]) -> set[type]:
    """Classes of modules that say themselves how they are copied; not those of torch."""
    return {
        kind
        for kind in map(type, modules)
        if any(_COPIERS & vars(owner).keys() and not _is_torch(owner) for owner in kind.__mro__)
    }


def _is_torch(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "torch"


def _copy_function(function: FunctionType, memo: Memo) -> FunctionType:
    if not _holds_state(function, set()):
        return function
    try:
        with undo_failed(memo):
            return _rebuild_function(function, memo)
    except Exception:
        if reaches_state(function):
            raise
        return function


def _holds_state(function: FunctionType, seen: set[int]) -> bool:
    """Whether what a function does may depend on more than its arguments."""
    if id(function) in seen:
        return False
    seen.add(id(function))
    for value in map(open_cell, function.__closure__ or ()):
        if isinstance(value, FunctionType):
            if _holds_state(value, seen):
                return True
        elif not isinstance(value, type | ModuleType | BuiltinFunctionType):
            return True  # a number too: another function of that scope may rebind it
    own = (function.__defaults__, function.__kwdefaults__, tuple(vars(function).values()))
    return any(map(_is_mutable, own)) or any(map(reaches_state, find_globals(function).values()))


def _is_mutable(value: object) -> bool:
    reached = iterate_reached(value)
    return any(not isinstance(r, tuple | FunctionType | BuiltinFunctionType) for r in reached)


def _rebuild_function(function: FunctionType, memo: Memo) -> FunctionType:
    names = function.__globals__
    reached = {name: v for name, v in find_globals(function).items() if reaches_state(v)}
    if reached:
        names = memo.setdefault(id(names), _Globals(names))
    cells = function.__closure__ or ()
    new = [cell for cell in cells if id(cell) not in memo]
    memo.update({id(cell): CellType() for cell in new})
    closure = tuple(memo[id(cell)] for cell in cells)
    copied = FunctionType(function.__code__, names, function.__name__, None, closure)
    memo[id(function)] = copied  # before what it reaches, which may reach it
    for name, value in reached.items():
        names[name] = copy.deepcopy(value, memo)
    for cell in new:
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            memo[id(cell)].cell_contents = copy.deepcopy(cell.cell_contents, memo)
    copied.__defaults__ = copy.deepcopy(function.__defaults__, memo)
    copied.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
    vars(copied).update(copy.deepcopy(vars(function), memo))
    copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
    copied.__doc__, copied.__annotations__ = function.__doc__, function.__annotations__
    return copied


def _copy_method(method: MethodType, memo: Memo) -> MethodType:
    return MethodType(copy.deepcopy(method.__func__, memo), copy.deepcopy(method.__self__, memo))


def _copy_builtin(function: BuiltinFunctionType, memo: Memo) -> Any:
    """A method of a built-in type, as ``kept.append``; another built-in function is shared."""
    owner = function.__self__
    if owner is None or isinstance(owner, type | ModuleType):
        return function
    return getattr(copy.deepcopy(owner, memo), function.__name__)


def _copy_reference(reference: weakref.ref[Any], memo: Memo) -> weakref.ref[Any]:
    target = reference()
    if id(target) not in memo and not reaches_state(target):
        return reference
    return weakref.ref(copy.deepcopy(target, memo))


def _copy_dict(original: dict[Any, Any], memo: Memo) -> dict[Any, Any]:
    copied: dict[Any, Any] = {}
    memo[id(original)] = copied
    for key, value in original.items():
        # A dict by id(parameter) becomes one by the id of the parameter's copy.
        tensor = memo.get(key) if type(key) is int else None
        new_key = id(tensor) if isinstance(tensor, Tensor) else copy.deepcopy(key, memo)
        copied[new_key] = copy.deepcopy(value, memo)
    return copied


def _copy_accumulator(node: Any, memo: Memo) -> Any:
    return find_accumulator(copy.deepcopy(node.variable, memo))


def _copy_optimizer(optimizer: optim.Optimizer, memo: Memo) -> optim.Optimizer:
    """All of it; what torch pickles leaves out the hooks on its step."""
    copied: optim.Optimizer = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = copied
    vars(copied).update(copy.deepcopy(vars(optimizer), memo))
    return copied


def _copy_attributes(module: Any, memo: Memo) -> Any:
    try:
        with undo_failed(memo):
            if isinstance(module, fx.GraphModule):
                copied = object.__new__(type(module))  # its own would leave forward out
                memo[id(module._graph)] = module._graph
            else:
                copied = module.__class__.__new__(module.__class__)
            memo[id(module)] = copied
            vars(copied).update(copy.deepcopy(vars(module), memo))
            return copied
    except Exception:
        own = getattr(module, "__deepcopy__", None)
        return own(memo) if own else _reconstruct(module, memo, *module.__reduce_ex__(4))
