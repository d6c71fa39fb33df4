"""What a model's code keeps, and all random numbers: saved, and put back.

Beside parameters and buffers a forward may count its calls, fill a cache, draw from a generator
of its own. All of that has to be as it was before another run can be compared with the first.
"""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fxmem.applying.comparing import are_equal
from fxmem.tracing.generators import save_random_states
from fxmem.tracing.reach import find_globals, find_held, list_slots, read_slots
from fxmem.tracing.user_state import iterate_holders

_Restore = Callable[[], None]


def save_state(roots: Iterable[object]) -> _Restore:
    """What puts back all that code reaches, as it is now, and the random number generators.

    Tensors get their values back, containers and attributes what they held. What is as it was is
    not written to.

    Args:
        roots: Models and functions.

    >>> layer = torch.nn.Linear(2, 2)
    >>> restore = save_state([layer])
    >>> weight = layer.weight.clone()
    >>> layer.eval().weight.data.zero_()
    tensor([[0., 0.],
            [0., 0.]])
    >>> restore()
    >>> layer.weight.equal(weight), layer.training
    (True, True)
    """
    holders = [*iterate_holders(roots)]
    restores = [restore for holder in holders for restore in _save(holder)]
    restores += [_keep_generator(generator) for generator in _find_generators(holders)]
    restores += [keep_random_numbers()]

    def restore() -> None:
        for put_back in restores:
            put_back()

    return restore


def list_random_states(roots: Iterable[object]) -> dict[str, Any]:
    """The states of PyTorch's generators, Python's, NumPy's and those that code reaches.

    >>> list(list_random_states([]))[:2]
    ['torch', 'python']
    """
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    states.update((f"cuda:{at}", torch.cuda.get_rng_state(at)) for at in _list_gpus())
    numpy: Any = np.random.get_state()
    kind, keys, *rest = numpy
    states["numpy"] = (kind, keys.tolist(), *rest)
    generators = _find_generators(iterate_holders(roots))
    states.update((f"generator {n}", g.get_state()) for n, g in enumerate(generators, 1))
    return states


def seed_random_numbers(seed: int) -> None:
    """Seeds PyTorch's generators, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def keep_state(roots: Iterable[object]) -> Iterator[None]:
    """Puts back in the end what code reaches; within, no tensor that it reaches has a gradient."""
    roots = [*roots]
    tensors = [t for t in iterate_holders(roots) if isinstance(t, Tensor) and t.is_leaf]
    gradients = [(tensor, tensor.grad) for tensor in tensors]
    drop_gradients(tensors)
    restore = save_state(roots)
    try:
        yield
    finally:
        restore()
        for tensor, gradient in gradients:
            tensor.grad = gradient


def drop_gradients(tensors: Iterable[Tensor]) -> None:
    """Leaves no gradient on tensors."""
    for tensor in tensors:
        if tensor.is_leaf:
            tensor.grad = None


def _save(holder: Any) -> Iterator[_Restore]:
    """What puts one thing back."""
    if isinstance(holder, FakeTensor):
        return
    if isinstance(holder, Tensor):
        yield _keep_tensor(holder)
    elif isinstance(holder, FunctionType):
        names = find_globals(holder)
        if names:
            yield lambda: holder.__globals__.update(names)
    elif isinstance(holder, type):
        yield _keep_class(holder)
    else:
        if isinstance(holder, dict):
            yield _keep_dict(holder)
        elif isinstance(holder, list | deque):
            yield _keep_sequence(holder)
        elif isinstance(holder, set):
            yield _keep_set(holder)
        attributes = getattr(holder, "__dict__", None)
        if isinstance(attributes, dict):
            yield _keep_dict(attributes)
        if list_slots(holder):
            yield _keep_slots(holder)


def _keep_tensor(tensor: Tensor) -> _Restore:
    saved = tensor.detach().clone()

    def restore() -> None:
        if are_equal(saved, tensor):
            return
        with torch.no_grad():
            if tensor.shape != saved.shape or tensor.dtype != saved.dtype:
                tensor.data = saved
            else:
                tensor.copy_(saved)

    return restore


def _keep_dict(current: dict[Any, Any]) -> _Restore:
    saved = [*dict.items(current)]
    kind: Any = OrderedDict if isinstance(current, OrderedDict) else dict  # it has a list beside

    def restore() -> None:
        now = [*dict.items(current)]
        same = zip(now, saved, strict=False)
        if len(now) != len(saved) or not all(a is c and b is d for (a, b), (c, d) in same):
            kind.clear(current)
            for key, value in saved:
                kind.__setitem__(current, key, value)

    return restore


def _keep_slots(holder: Any) -> _Restore:
    saved = read_slots(holder)

    def restore() -> None:
        now = read_slots(holder)
        for name, value in saved.items():
            if name not in now or now[name] is not value:
                object.__setattr__(holder, name, value)  # of a frozen dataclass too
        for name in now.keys() - saved.keys():
            object.__delattr__(holder, name)

    return restore


def _keep_sequence(current: Any) -> _Restore:
    saved = [*current]

    def restore() -> None:
        if len(current) != len(saved) or any(
            a is not b for a, b in zip(current, saved, strict=True)
        ):
            current.clear()
            current.extend(saved)

    return restore


def _keep_set(current: set[Any]) -> _Restore:
    saved = {*current}

    def restore() -> None:
        if current != saved:
            current.clear()
            current.update(saved)

    return restore


def _keep_class(kind: type) -> _Restore:
    saved = dict(vars(kind))

    def restore() -> None:
        for name, value in saved.items():
            if vars(kind).get(name) is not value:
                setattr(kind, name, value)

    return restore


def _keep_generator(generator: torch.Generator) -> _Restore:
    state = generator.get_state()
    return lambda: _set_generator(generator, state)


def _set_generator(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def keep_random_numbers() -> _Restore:
    """What puts back PyTorch's on every device that is in use, Python's and NumPy's."""
    cpu, restore_others = torch.get_rng_state(), save_random_states()
    gpus = [(at, torch.cuda.get_rng_state(at)) for at in _list_gpus()]

    def restore() -> None:
        torch.set_rng_state(cpu)
        restore_others()
        for at, state in gpus:
            torch.cuda.set_rng_state(state, at)

    return restore


def _list_gpus() -> range:
    # Asking for the generators of a GPU that nobody uses would start it.
    is_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return range(torch.cuda.device_count() if is_in_use else 0)


def _find_generators(holders: Iterable[Any]) -> list[torch.Generator]:
    """The generators that something holds itself, each once."""
    found: dict[int, torch.Generator] = {}
    for holder in holders:
        held = vars(holder).values() if isinstance(holder, type) else find_held(holder)
        for value in held:
            if isinstance(value, torch.Generator) and value is not torch.default_generator:
                found[id(value)] = value
    return [*found.values()]
