"""What a forward leaves behind in Python, which the graph of it would not do again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from torch import nn

from fxmem.tracing.changes import Snapshot, is_same, take_snapshot
from fxmem.tracing.generators import DRAWS, draw_random_numbers, read_random_states
from fxmem.tracing.hooks import HOOK_TABLES


class ForwardState:
    """What a model's modules hold, as it is before a forward, and draws from Python's numbers.

    A graph has what the code did with them as constants. A number is drawn of each generator,
    which the caller puts back.

    Args:
        model: The model.
        is_leaf: Whether a module is one node of the graph, which runs it as it is.
        is_first: Whether it may be the model's first, in which those of transformers install
            hooks, and note that they did: the graph has what these do.
    """

    def __init__(
        self, model: nn.Module, is_leaf: Callable[[nn.Module], bool], *, is_first: bool = False
    ) -> None:
        self._modules = [*_iterate_entered(model, "", is_leaf)]
        self._before = [
            (frozenset(vars(m)), _take(m), _take(m, but=HOOK_TABLES) if is_first else ())
            for _, m in self._modules
        ]
        self._is_first = is_first
        self._tables = [vars(module)[key] for module in model.modules() for key in HOOK_TABLES]
        self._hooks = sum(map(len, self._tables))
        # A forward that seeds may come to where the states are already.
        draw_random_numbers()
        self._random = read_random_states()

    def find_change(self) -> str:
        """What a forward has changed since; empty where nothing."""
        is_drawn = self._random != read_random_states()
        installed = self._is_first and sum(map(len, self._tables)) != self._hooks
        for (name, module), (names, whole, rest) in zip(self._modules, self._before, strict=True):
            if installed:
                new = vars(module).keys() - names
                marks = {key for key in new if isinstance(vars(module)[key], bool)}
                same = is_same(rest, _take(module, but=marks.union(HOOK_TABLES)))
            else:
                same = is_same(whole, _take(module))
            if not same:
                return f"{name or 'the model'} changes what it holds in its forward"
        return DRAWS if is_drawn else ""


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
