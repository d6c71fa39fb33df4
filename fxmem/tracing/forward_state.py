"""What a forward leaves behind in Python, which the graph of it would not do again."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fxmem.tracing.changes import is_same, take_snapshot


class ForwardState:
    """What a model's modules hold, as it is before a forward, and draws from Python's numbers.

    A graph has what the code did with them as constants.

    Args:
        model: The model.
        is_leaf: Whether a module is one node of the graph, which runs it as it is.
    """

    def __init__(self, model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> None:
        self._modules = [*_iterate_entered(model, "", is_leaf)]
        self._before = [take_snapshot(vars(module).values()) for _, module in self._modules]
        self._random = read_random_states()

    def find_change(self) -> str:
        """What a forward has changed since; empty where nothing."""
        for (name, module), before in zip(self._modules, self._before, strict=True):
            if not is_same(before, take_snapshot(vars(module).values())):
                return f"{name or 'the model'} changes what it holds in its forward"
        if self._random != read_random_states():
            return "it draws random numbers that are not PyTorch's"
        return ""


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


def read_random_states() -> tuple[Any, ...]:
    """Those of Python's generator and of NumPy's, where NumPy's is in use."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return (random.getstate(),)
    kind, keys, *rest = numpy_random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest
