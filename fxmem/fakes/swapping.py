"""Fake tensors in the place of a model's own while it runs.

As ``torch.func.functional_call`` does with parameters, but wherever the model's code finds a
tensor: attributes, lists, optimizers in hooks, closures. All Python state that is reached from the
model is put back to what it was, so an analysis leaves no trace in it.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import _get_grad_fn_or_grad_acc
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.utils._pytree import tree_leaves

from fxmem.errors import TraceError, summarize_error
from fxmem.fakes.fake_mode import TensorCopier, find_dtype, make_fake_inputs, refuse_scripts
from fxmem.fakes.reach import (
    HOOKS,
    LEAVES,
    Entries,
    Place,
    are_same,
    find_attributes,
    find_held,
    flatten_reading,
    iterate_reached,
    list_places,
)
from fxmem.graph import is_installed
from fxmem.patching import patch

Fakes = dict[int, Tensor]
"""The fake of each tensor, by the tensor's id."""
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_FOREIGN = frozenset({"torch", "numpy", *sys.stdlib_module_names})
_CACHE: Any = functools._lru_cache_wrapper
_CLEARED = (list, dict, OrderedDict, set, deque)


@contextmanager
def swap_in_fakes(
    model: nn.Module,
    fake_mode: FakeTensorMode,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    dtype: str | None = None,
    train: bool,
    readers: Sequence[object] = (),
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Callable[[], None]]]:
    """Swaps fake CPU tensors into a model; at the end every attribute is as it was.

    Tensors that share a storage have fakes that share one; a tied parameter stays one. Hooks run
    as they are: an optimizer that one steps in backward finds the fakes of its parameters. A
    one-element CPU buffer keeps its value, so that ``.item()`` on it works; no other values are
    known. A tensor that was computed with gradients and kept on a module becomes a leaf. The model
    must not be used in another thread meanwhile.

    Args:
        model: Its tensors real, meta or fake, on any device.
        fake_mode: The mode that the fakes belong to.
        args: Positional inputs; see :func:`fxmem.fakes.fake_mode.make_fake_inputs`.
        kwargs: Keyword inputs.
        dtype: As in ``model.to(dtype)``; for the inputs too.
        train: Whether the model is in training mode.
        readers: Other code that reads the model's or the inputs' tensors, such as a loss.

    Yields:
        The fake inputs, and a function that empties the lists and tables that the model has let go
        of: the results of a step before (``self.pyramid = [...]`` in forward) would live on there.

    >>> from fxmem.fakes.fake_mode import make_fake_mode
    >>> linear = nn.Linear(3, 2)
    >>> with swap_in_fakes(linear, make_fake_mode(), dtype="bfloat16", train=True):
    ...     linear.weight
    Parameter(FakeTensor(..., size=(2, 3), dtype=torch.bfloat16, requires_grad=True))
    >>> type(linear.weight).__name__
    'Parameter'
    """
    refuse_scripts(model)
    given = args, dict(kwargs or {})
    objects = [leaf for leaf in tree_leaves(given) if not isinstance(leaf, (*LEAVES, Tensor))]
    seen: dict[int, object] = {}
    for root in (model, *objects):
        deque(iterate_reached(root, seen), maxlen=0)
    tensors = [value for value in seen.values() if isinstance(value, Tensor)]
    fakes = _make_fakes(model, tensors, fake_mode, find_dtype(dtype))
    inputs = make_fake_inputs(*given, fake_mode, dtype=dtype, fakes=fakes)
    tensors += [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    for reader in readers:
        deque(iterate_reached(reader, seen), maxlen=0)
    places: list[Any] = [place for held in seen.values() for place in list_places(held)]
    before = [(place, place.read()) for place in places]
    containers: list[Any] = [holder for holder in seen.values() if type(holder) in _CLEARED]

    def forget_replaced() -> None:
        reached: dict[int, object] = {}
        for root in (model, *objects, *inputs, *readers):
            deque(iterate_reached(root, reached), maxlen=0)
        for container in containers:
            if id(container) not in reached:
                container.clear()

    with ExitStack() as stack:
        for place, contents in before:
            stack.callback(place.restore, contents)  # whether or not others raise
        _write_fakes(before, tensors, fakes)
        del fakes  # a gradient, for instance, must be able to go
        model.train(train)
        yield *inputs, forget_replaced


@contextmanager
def restore_user_state(roots: Iterable[object]) -> Iterator[None]:
    """Takes fake tensors out of whatever code keeps for itself, as the context ends.

    A table that ``forward`` computes once and keeps in a global, on the class or in
    ``functools.lru_cache`` would be a fake tensor from then on, and the user's next real step
    would meet it. The roots are functions and classes whose code runs within.
    """
    holders = [*_iterate_holders(roots)]
    places = [place for holder in holders for place in list_places(holder)]
    before = [(place, place.read()) for place in places]
    try:
        yield
    finally:
        for place, contents in before:
            known = {id(value) for value in flatten_reading(contents)}
            new = (value for value in flatten_reading(place.read()) if id(value) not in known)
            if any(map(_holds_fake, new)):
                place.write(contents)
        for holder in holders:
            if isinstance(holder, _CACHE) and any(map(_holds_fake, gc.get_referents(holder))):
                holder.cache_clear()


def _holds_fake(value: object) -> bool:
    return any(isinstance(reached, FakeTensor) for reached in iterate_reached(value))


def _iterate_holders(roots: Iterable[object]) -> Iterator[object]:
    """Yields everything that code reaches, each once; of classes the roots and the user's own."""
    seen: dict[int, object] = {}  # the objects too, so that no id is used again
    stack = [*roots]
    own = {kind for root in roots if isinstance(root, type) for kind in root.__mro__}
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        if isinstance(current, type):
            seen[id(current)] = current
            if current.__module__.split(".")[0] in _FOREIGN:
                continue
            # Classes of installed packages name each other without end.
            module = sys.modules.get(current.__module__)
            if current in own or not is_installed(getattr(module, "__file__", None) or ""):
                yield current
                for held in vars(current).values():
                    is_property = isinstance(held, property)
                    stack.append(held.fget if is_property else getattr(held, "__func__", held))
                stack += current.__mro__
        elif not isinstance(current, LEAVES):
            seen[id(current)] = current
            yield current
            stack += [*find_held(current), type(current)]


# -- the fakes ---------------------------------------------------------------------------------


def _make_fakes(
    model: nn.Module,
    reached: Iterable[Tensor],
    fake_mode: FakeTensorMode,
    dtype: torch.dtype | None,
) -> Fakes:
    """Makes a fake of each tensor, the registered ones and their gradients cast."""
    copier, fakes = TensorCopier(fake_mode), Fakes()

    def copy(tensor: Any, dtype: torch.dtype | None, name: str) -> None:
        if tensor is None or id(tensor) in fakes or is_lazy(tensor):
            return
        try:
            base = fakes.get(id(tensor._base)) if not tensor.is_leaf else None
            if base is not None and base.is_leaf and base.dtype == tensor.dtype:
                with fake_mode, torch.enable_grad():
                    fakes[id(tensor)] = _take_again(tensor, base)
            else:
                fakes[id(tensor)] = copier.copy(tensor, dtype)
        except TraceError as error:
            raise TraceError(f"{name}: {error.cause}", hint=error.hint) from error
        except Exception as error:
            raise TraceError(
                f"{name} has no fake copy: {summarize_error(error)}",
                hint="build the model from strided tensors, plain or of a wrapper subclass",
            ) from error

    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            fqn = f"{prefix}.{name}".strip(".")
            copy(tensor, dtype, repr(fqn))
            if tensor is not None and tensor.is_leaf:
                copy(tensor.grad, dtype, f"the gradient of {fqn!r}")
    for tensor in sorted(reached, key=lambda tensor: not tensor.is_leaf):  # views after their bases
        copy(tensor, None, f"a tensor of {type(model).__name__}")
    return fakes


_TAKES: dict[str, Callable[[Tensor, Any, Tensor], Tensor]] = {
    "TBackward0": lambda x, node, view: x.t(),
    "TransposeBackward0": lambda x, node, view: x.transpose(
        _signed(node._saved_dim0), _signed(node._saved_dim1)
    ),
    "SelectBackward0": lambda x, node, view: x.select(
        _signed(node._saved_dim), _signed(node._saved_index)
    ),
    "ViewBackward0": lambda x, node, view: x.view(view.shape),
}


def _signed(number: int) -> int:
    """Restores a negative number from the unsigned one that autograd keeps."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _take_again(view: Any, base: Tensor) -> Tensor:
    """Takes a view of a leaf, such as ``self.decoder = self.encoder.weight.t()``, of its fake.

    Views that were taken by other functions than the ones above become ``as_strided``, with
    another backward.
    """
    node, nodes, taken = view.grad_fn, [], base
    while node.name() in _TAKES:
        nodes.append(node)
        node = node.next_functions[0][0]
    if getattr(node, "variable", None) is view._base:
        for step in reversed(nodes):
            taken = _TAKES[step.name()](taken, step, view)
        if (taken.shape, taken.stride()) == (view.shape, view.stride()):
            return taken
    again: Tensor = view._view_func_unsafe(base)
    return again


def _write_fakes(
    before: Iterable[tuple[Place | Entries, list[Any]]], tensors: Iterable[Tensor], fakes: Fakes
) -> None:
    """Writes fakes wherever tensors are held, and hangs on each what hangs on its original."""
    for tensor in tensors:
        fake = fakes.get(id(tensor))
        if fake is None:
            continue
        for name, value in find_attributes(tensor).items():
            vars(fake).setdefault(name, _replace(value, fakes))
        if tensor.requires_grad and fake.requires_grad:
            for name in HOOKS:
                if getattr(tensor, name):
                    setattr(fake, name, getattr(tensor, name))
            if tensor.is_leaf and id(tensor.grad) in fakes:
                fake.grad = fakes[id(tensor.grad)]
    for place, contents in before:
        swapped = [_replace(value, fakes) for value in contents]
        if not are_same(contents, swapped):
            place.write(swapped)


def _replace(value: Any, fakes: Fakes) -> Any:
    """Replaces tensors in a value by their fakes; returns the value itself where it holds none."""
    if isinstance(value, Tensor):
        return fakes.get(id(value), value)
    if type(value) is int and value in fakes:  # optimizers by the ids of their parameters
        return id(fakes[value])
    if type(value).__name__ == "AccumulateGrad" and id(value.variable) in fakes:
        return _get_grad_fn_or_grad_acc(fakes[id(value.variable)])  # register_multi_grad_hook
    if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        elements = [_replace(element, fakes) for element in value]
        if all(new is old for new, old in zip(elements, value, strict=True)):
            return value
        return tuple(elements) if type(value) is tuple else type(value)(*elements)
    if isinstance(value, weakref.ref) and id(value()) in fakes:
        return weakref.ref(fakes[id(value())])
    return value


def settle_lazy(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fake_mode: FakeTensorMode,
    dtype: str | None,
) -> None:
    """Runs a model that has lazy parameters once: they become fakes with their shapes.

    To be called within :func:`swap_in_fakes`, with its inputs, fake mode and dtype.
    """
    if not any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        return
    cast_to = find_dtype(dtype)

    def materialize(lazy: Any, shape: Sequence[int], device: Any = None, dtype: Any = None) -> None:
        own = dtype or lazy.dtype
        own = cast_to if cast_to is not None and own.is_floating_point else own
        fake: Tensor = torch.empty(tuple(shape), dtype=own)
        if isinstance(lazy, nn.Parameter):
            fake = nn.Parameter(fake, lazy.requires_grad)
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                held: dict[str, Any] = table
                held.update({name: fake for name, tensor in held.items() if tensor is lazy})

    mixin = UninitializedParameter.__mro__[1]  # which buffers have too
    with patch({mixin: {"materialize": materialize}}), fake_mode, torch.no_grad():
        model(*args, **kwargs)
