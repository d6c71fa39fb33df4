"""Whether what a segment reads was changed in place between forward and backward.

What autograd saves it watches itself. What a segment computes again from, parameters and buffers,
nobody saves: changed meanwhile, they would give other gradients without a word. Changes are seen as
autograd sees them, by the count of a tensor's versions; ``tensor.data`` has a count of its own.

Whether they want gradients may change: for the second run it is put back, as it decides what
autograd saves, and no result.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxmem.errors import UsageError

Reads = Mapping[str, nn.Module | Tensor]
"""By name, what a segment reads: tensors, and modules for all the tensors that they hold."""
_Named = tuple[str, str, Tensor]
_CONTAINERS = (tuple, list, dict)


class Versions:
    """What a segment reads, as it is when it first runs.

    Args:
        segment: Its name.
        reads: What its code reads.
        inputs: What it is given; autograd watches what of it was changed, but for what containers
            hold.
        changed: The tensors that it changes itself, which begin again as copies.
    """

    def __init__(
        self, segment: str, reads: Reads, inputs: Sequence[Any], changed: Collection[int]
    ) -> None:
        self._segment = segment
        found = [*_list_tensors(reads), *_iterate_inputs(inputs)]
        self._seen = [
            (owner, name, tensor, tensor._version)
            for owner, name, tensor in found
            if id(tensor) not in changed and not tensor.is_inference()
        ]
        self._own: set[str] = set()
        held = (value for value in inputs if isinstance(value, Tensor))
        # Within another segment nothing but that one's second run holds what this one is given.
        self._flags = [
            (weakref.ref(tensor), tensor.requires_grad)
            for tensor in (*(tensor for _, _, tensor in found), *held)
            if tensor.is_leaf  # of others it never changes
        ]

    def settle(self) -> None:
        """After the first run: whatever changed by then, the segment changes by itself."""
        self._own.update(self._find_changed())

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """While the segment runs again, lets it read nothing that was changed in place since.

        What it reads wants gradients where it did; afterwards, where it did before: a checkpoint
        may stop the segment between two changes of that.
        """
        changed = self._find_changed()
        found = ((get(), flag) for get, flag in self._flags)
        then = [(tensor, flag) for tensor, flag in found if tensor is not None]
        now = [(tensor, tensor.requires_grad) for tensor, _ in then]
        _set_flags(then)
        try:
            with _RefuseReads(changed, self._own, self._segment) if changed else _NO_GUARD:
                yield
        finally:
            _set_flags(now)

    def _find_changed(self) -> dict[str, Tensor]:
        """By name, what has another version than before the first run."""
        return {
            f"{owner}.{name}" if name else owner: tensor
            for owner, name, tensor, version in self._seen
            if tensor._version != version
        }


_NO_GUARD: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def _set_flags(flags: Iterable[tuple[Tensor, bool]]) -> None:
    for tensor, flag in flags:
        if tensor.requires_grad is not flag:
            tensor.requires_grad_(flag)


def _list_tensors(reads: Reads) -> list[_Named]:
    """Each tensor with its owner's name and its own; each call of a segment waits for this."""
    found: list[_Named] = []
    waiting = [*reads.items()]
    while waiting:
        name, held = waiting.pop()
        if isinstance(held, Tensor):
            found.append((name, "", held))
            continue
        tables = held.__dict__
        for key, tensor in (*tables["_parameters"].items(), *tables["_buffers"].items()):
            if tensor is not None:
                found.append((name, key, tensor))
        for key, child in tables["_modules"].items():
            if child is not None:
                waiting.append((f"{name}.{key}", child))
    return found


def _iterate_inputs(inputs: Sequence[Any]) -> Iterator[_Named]:
    for value in inputs:
        if isinstance(value, _CONTAINERS):
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    yield "a tensor that it is given", "", leaf


class _RefuseReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops a second run that reads a tensor which was changed since the first.

    One that is changed and not read is no harm: an optimizer that steps in backward gets to the
    last parameters of a segment before the rest of it is computed again.
    """

    def __init__(self, changed: Mapping[str, Tensor], own: Collection[str], segment: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changed = {find_memory(tensor): name for name, tensor in changed.items()}
        self._own = own
        self._segment = segment

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            name = self._changed.get(find_memory(leaf)) if isinstance(leaf, Tensor) else None
            if name is not None and name in self._own:
                raise UsageError(
                    f"{self._segment} of the plan changes {name}, which it did not when the plan"
                    " was made: computed again in backward, it would do so twice",
                    hint="make the plan for the model as it is now",
                )
            if name is not None:
                raise UsageError(
                    f"{name} was changed in place between forward and backward, and"
                    f" {self._segment} of the plan would be computed again from what it is now:"
                    " gradients would not be the model's",
                    hint="step the optimizer after backward, or train without the plan",
                )
        return func(*args, **(kwargs or {}))


def find_memory(tensor: Tensor) -> int:
    """What tells whether two tensors lie in the same memory.

    Args:
        tensor: Any that is alive.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse ones have none
        return id(tensor)
