"""What a forward leaves behind in Python, which the graph of it would not do again."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from fxmem.tracing.changes import Snapshot, is_same, take_snapshot

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


class ForwardState:
    """What a model's modules hold, as it is before a forward, and draws from Python's numbers.

    A graph has what the code did with them as constants.

    Args:
        model: The model.
        is_leaf: Whether a module is one node of the graph, which runs it as it is.
    """

    def __init__(self, model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> None:
        self._modules = [*_iterate_entered(model, "", is_leaf)]
        self._before = [
            (frozenset(vars(m)), _take(m), _take(m, but=_HOOKS)) for _, m in self._modules
        ]
        self._tables = [vars(module)[key] for module in model.modules() for key in _HOOKS]
        self._hooks = sum(map(len, self._tables))
        self._restore = _draw_random_numbers()
        self._random = read_random_states()

    def find_change(self, *, is_first: bool = False) -> str:
        """What a forward has changed since; empty where nothing. To be called once.

        Args:
            is_first: Whether it may be the model's first, in which those of transformers install
                hooks, and note that they did: the graph has what these do.
        """
        is_drawn = self._random != read_random_states()
        if not is_drawn:
            self._restore()
        installed = is_first and sum(map(len, self._tables)) != self._hooks
        for (name, module), (names, whole, rest) in zip(self._modules, self._before, strict=True):
            if installed:
                new = vars(module).keys() - names
                marks = {key for key in new if isinstance(vars(module)[key], bool)}
                same = is_same(rest, _take(module, but=marks.union(_HOOKS)))
            else:
                same = is_same(whole, _take(module))
            if not same:
                return f"{name or 'the model'} changes what it holds in its forward"
        return "it draws random numbers that are not PyTorch's" if is_drawn else ""


def _take(module: nn.Module, but: Collection[str] = ()) -> Snapshot:
    """What a module holds, but for some attributes."""
    return take_snapshot(value for name, value in vars(module).items() if name not in but)


def _iterate_entered(
    module: nn.Module, name: str, is_leaf: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose code is traced, each once."""
    seen: set[int] = set()
    waiting = [(name, module)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        for key, child in module.named_children():
            if not is_leaf(child) or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                waiting.append((f"{name}.{key}".strip("."), child))


def _draw_random_numbers() -> Callable[[], None]:
    """Draws one of each kind, as a forward that seeds may come to where the states are already.

    Returns:
        What puts the states back.
    """
    numpy_random: Any = sys.modules.get("numpy.random")
    state = random.getstate()
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    random.random()
    if numpy_random is not None:
        numpy_random.random()

    def restore() -> None:
        random.setstate(state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)

    return restore


def read_random_states() -> tuple[Any, ...]:
    """Those of Python's generator and of NumPy's, where NumPy's is in use."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return (random.getstate(),)
    kind, keys, *rest = numpy_random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest
