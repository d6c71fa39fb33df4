"""Python state that a forward changes: what modules and arguments hold, and random numbers.

A graph holds constants where the code read such state, and would not change it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from fxmem.fakes.reach import CONTAINERS, list_attributes
from fxmem.tracing.conditions import PLAIN_TYPES
from fxmem.tracing.modules import HOOK_TABLES, is_leaf

DRAWS = "it draws random numbers that are not PyTorch's"
"""The reason why code that draws from Python's or NumPy's generator has no graph."""
_MOST = 10_000
"""Entries that are compared one by one; of more, the number is."""

Snapshot = tuple[object, ...]


def take_snapshot(values: Iterable[object]) -> Snapshot:
    """Lists what objects hold: elements and attributes, down to tensors, modules and functions.

    Two snapshots are equal where nothing changed between. Neither keeps tensors alive.
    """
    found: list[object] = []
    seen: set[int] = set()
    waiting = deque(values)
    while waiting and len(found) < _MOST:
        value: Any = waiting.popleft()
        if isinstance(value, (*PLAIN_TYPES, Number)):
            found.append((type(value), value))
            continue
        if isinstance(value, dict):
            held = [*dict.keys(value), *dict.values(value)]
        elif isinstance(value, CONTAINERS):
            held = [*value]
        else:
            held = []
        if not isinstance(value, (Tensor, nn.Module, type)) and not callable(value):
            held += list_attributes(value)
        if held or isinstance(value, (dict, *CONTAINERS)):
            found.append((type(value), len(held)))
            if id(value) not in seen:
                seen.add(id(value))
                waiting.extend(held)
        elif type(value).__weakrefoffset__:
            found.append((WeakIdRef, WeakIdRef(value)))  # of a freed one, equal to no other
        else:
            found.append((id, id(value)))
    return (*found, len(waiting))


class ForwardState:
    """Watches what the modules of a model hold, and draws from Python's generators.

    A number is drawn from each generator, which the caller restores. In the model's first forward,
    models of transformers install hooks and note that: the graph has what these hooks do.
    """

    def __init__(self, model: nn.Module, *, is_first: bool = False) -> None:
        entered: dict[nn.Module, str] = {}
        waiting = [("", model)]
        while waiting:
            name, module = waiting.pop()
            if module not in entered:
                entered[module] = name
                for key, child in module.named_children():  # a graph calls leaves as they are
                    if not is_leaf(child) or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                        waiting.append((f"{name}.{key}".strip("."), child))
        self._modules = [(name, module) for module, name in entered.items()]
        self._before = [
            (frozenset(vars(m)), _take(m), _take(m, but=HOOK_TABLES) if is_first else ())
            for _, m in self._modules
        ]
        self._is_first = is_first
        self._tables = [vars(module)[key] for module in model.modules() for key in HOOK_TABLES]
        self._hooks = sum(map(len, self._tables))
        # A forward that seeds may set the states that are there already.
        random.random()
        if (numpy_random := _find_numpy()) is not None:
            numpy_random.random()
        self._random = read_random_states()

    def find_change(self) -> str:
        """Describes what a forward has changed since; empty for nothing."""
        is_drawn = self._random != read_random_states()
        installed = self._is_first and sum(map(len, self._tables)) != self._hooks
        for (name, module), (names, whole, rest) in zip(self._modules, self._before, strict=True):
            if installed:
                new = vars(module).keys() - names
                marks = {key for key in new if isinstance(vars(module)[key], bool)}
                same = rest == _take(module, but=marks.union(HOOK_TABLES))
            else:
                same = whole == _take(module)
            if not same:
                return f"{name or 'the model'} changes what it holds in its forward"
        return DRAWS if is_drawn else ""


def _take(module: nn.Module, but: Collection[str] = ()) -> Snapshot:
    return take_snapshot(value for name, value in vars(module).items() if name not in but)


# -- random number generators --------------------------------------------------------------------


def _find_numpy() -> Any:
    """Finds NumPy's ``random``, where NumPy is in use: PyTorch can be installed without it."""
    return importlib.import_module("numpy.random") if "numpy" in sys.modules else None


def read_random_states() -> tuple[Any, ...]:
    """Reads the states of Python's and NumPy's generators, equal where nothing was drawn."""
    numpy_random = _find_numpy()
    if numpy_random is None:
        return (random.getstate(),)
    kind, keys, *rest = numpy_random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest


def save_random_states() -> Callable[[], None]:
    """Returns a function that restores both generators to their states of now."""
    python, numpy_random = random.getstate(), _find_numpy()
    numpy_state = numpy_random.get_state() if numpy_random is not None else None

    def restore() -> None:
        random.setstate(python)
        if numpy_state is not None:
            numpy_random.set_state(numpy_state)

    return restore


@contextlib.contextmanager
def keep_random_states() -> Iterator[None]:
    """Restores all generators at the end: PyTorch's, Python's and NumPy's."""
    # Asking for the generators of a GPU that nobody uses yet would start it.
    is_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if is_in_use else ()
    restore_others = save_random_states()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            restore_others()


def list_generators(inputs: Iterable[Any]) -> list[torch.Generator]:
    """Lists PyTorch's own generators, of the CPU and of the GPUs that hold inputs."""
    gpus = {value.device.index for value in inputs if isinstance(value, Tensor) and value.is_cuda}
    # In an analysis there may be no GPU; while a graph is captured, its generator cannot be asked.
    real: tuple[torch.Generator, ...] = torch.cuda.default_generators
    if not gpus or not real or torch.cuda.is_current_stream_capturing():
        return [torch.default_generator]
    return [torch.default_generator, *(real[at] for at in sorted(gpus) if at < len(real))]


def read_state(generator: torch.Generator) -> bytes:
    """Reads the state of a generator: as a tensor, that of the CPU's holds 5 KB of memory."""
    with torch._C.DisableTorchFunction():
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())


def set_state(generator: torch.Generator, state: bytes) -> None:
    """Sets a generator to a state from :func:`read_state`."""
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def read_autocast() -> list[tuple[Any, ...]]:
    """Reads the arguments of :class:`torch.autocast` for each device; none where there is none."""
    if not torch._C._is_any_autocast_enabled():
        return []
    is_cached = torch.is_autocast_cache_enabled()
    return [
        (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), is_cached)
        for device in ("cpu", "cuda")
    ]
