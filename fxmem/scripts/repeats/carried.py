"""Objects that a model is given and changes, such as a cache of keys and values.

What such an object holds is an input of the call, and what it holds afterwards a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fxmem.scripts.repeats.call_state import PLAIN

_MOST_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """An attribute, an index or a key of an object.

    Attributes:
        path: The attributes, indices and keys that lead there.
        owner: The list, the dict, or the attributes of the object that has the value.
        value: The value that is there.
    """

    path: tuple[Any, ...]
    owner: Any
    value: Any

    def put(self, value: Any) -> None:
        """Puts another value there."""
        self.owner[self.path[-1]] = value


def list_carried(arguments: Any) -> list[Any]:
    """Lists the objects among arguments that may hold tensors and change."""
    return [leaf for leaf in tree_leaves(arguments) if not isinstance(leaf, (Tensor, *PLAIN))]


def list_slots(carried: Iterable[Any]) -> list[Slot]:
    """Lists the slots of objects, and of the objects that these hold."""
    return [slot for each in carried for slot in _iterate_slots(each, (), set())]


def _iterate_slots(value: Any, path: tuple[Any, ...], seen: set[int]) -> Iterator[Slot]:
    owner = value if isinstance(value, (list, dict)) else getattr(value, "__dict__", None)
    is_opaque = isinstance(value, (type, nn.Module)) or callable(value)
    if owner is None or is_opaque or id(value) in seen or len(path) == _MOST_DEPTH:
        return
    seen.add(id(value))
    for key, held in [*enumerate(owner)] if isinstance(owner, list) else [*owner.items()]:
        yield Slot((*path, key), owner, held)
        if not isinstance(held, (Tensor, *PLAIN)):
            yield from _iterate_slots(held, (*path, key), seen)
