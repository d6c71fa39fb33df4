"""What the code of a planned model calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fxmem.applying.attributes import Attributes
from fxmem.applying.calls import ModelCall, find_call
from fxmem.applying.random_numbers import RandomNumbers, iterate_generators
from fxmem.applying.surroundings import CACHED, TRANSFORMED, is_caching, is_transforming
from fxmem.applying.versions import Reads, Versions
from fxmem.applying.warning import warn_caller

_NOTHING: Reads = {}


# A compiler takes the segments one by one: in its own checkpoints batch normalisations count
# twice where the graph breaks, and under the backend "eager" random numbers are drawn anew.
@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator,no-untyped-call]
def checkpoint(
    segment: Callable[..., Any],
    *inputs: Any,
    random: bool = False,
    norms: Sequence[nn.Module] = (),
    states: Sequence[tuple[nn.Module, str]] = (),
    reads: Reads = _NOTHING,
    name: str = "",
) -> Any:
    """Runs a segment without saving what its backward needs, which computes it again.

    Args:
        segment: The code of the segment.
        inputs: What it takes; held until its backward is over.
        random: Whether it draws random numbers, which must come out the same again. Where it is
            not known to, and does, its numbers are kept too.
        norms: Its batch normalisations, whose statistics the second run must not update.
        states: What else it changes, as modules and names of their tensors: the second run
            begins with what the first began with, and leaves no trace.
        reads: By name, the tensors that it reads, or the modules that hold them; backward must
            find them as they are.
        name: Of the segment, in errors; that of its function where there is none.

    Returns:
        What the segment returns.

    Raises:
        UsageError: In backward, where what the segment reads was changed in place meanwhile.
    """
    if not torch.is_grad_enabled():
        return segment(*inputs)
    keeps_all = not torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    if keeps_all or is_transforming():
        warn_caller(TRANSFORMED)
        return segment(*inputs)
    if is_caching():
        warn_caller(CACHED)
        return segment(*inputs)
    label = name or getattr(segment, "__name__", "a segment")
    versions = Versions(label, reads, inputs, _list_changed(norms, states))
    attributes = Attributes(reads)
    generators = [] if random else [*iterate_generators(inputs)]
    numbers = RandomNumbers([*generators, *attributes.list_generators()])
    again = _SecondRun(norms, states, find_call(), versions, attributes, numbers)
    run, given = _merge_inputs(segment, inputs)
    result = torch_checkpoint(
        run,
        *given,
        use_reentrant=False,
        preserve_rng_state=random,
        context_fn=lambda: (contextlib.nullcontext(), again),
    )
    versions.settle()
    attributes.settle()
    numbers.settle()
    return result


def _list_changed(norms: Sequence[nn.Module], states: Sequence[tuple[nn.Module, str]]) -> set[int]:
    """The tensors that a segment changes itself, and gets copies of when it runs again."""
    counted = (buffer for module in norms if module.training for buffer in module.buffers(False))
    return {*map(id, counted), *(id(getattr(module, name)) for module, name in states)}


def _merge_inputs(
    segment: Callable[..., Any], inputs: Sequence[Any]
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Has an input that is given more than once stay one object, and code that takes each once.

    Backward gets a tensor anew from each place that it is kept in, and code may ask whether two are
    the same: ``nn.MultiheadAttention`` does (``torch.nn.functional._in_projection_packed``).
    """
    kept = {id(value): value for value in inputs}
    if len(kept) == len(inputs):
        return segment, inputs
    positions = {key: at for at, key in enumerate(kept)}
    places = [positions[id(value)] for value in inputs]

    def run(*values: Any) -> Any:
        return segment(*[values[place] for place in places])

    return run, [*kept.values()]


_alone = threading.RLock()
"""Backward has a thread for each device; what a second run puts into modules is for it alone."""


class _SecondRun:
    """Around a segment that runs again, once in each backward of the same graph."""

    def __init__(
        self,
        norms: Sequence[nn.Module],
        states: Sequence[tuple[nn.Module, str]],
        call: ModelCall | None,
        versions: Versions,
        attributes: Attributes,
        numbers: RandomNumbers,
    ) -> None:
        self._norms = norms
        self._states = [
            (module, name, getattr(module, name).detach().clone()) for module, name in states
        ]
        self._call = call
        self._versions = versions
        self._attributes = attributes
        self._numbers = numbers

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_alone)
            if self._call is not None:
                stack.enter_context(self._call.repeat())
            stack.enter_context(self._attributes.repeat())
            stack.enter_context(self._numbers.repeat())
            stack.enter_context(self._versions.guard())
            stack.enter_context(_spare_statistics(self._norms))
            stack.enter_context(_rewind_states(self._states))
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


@contextlib.contextmanager
def _spare_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Lets batch normalisations update copies of their running statistics."""
    originals = [module._buffers.copy() for module in norms]
    try:
        for module, buffers in zip(norms, originals, strict=True):
            for name, buffer in buffers.items():
                module._buffers[name] = None if buffer is None else buffer.clone()
        yield
    finally:
        for module, buffers in zip(norms, originals, strict=True):
            module._buffers.update(buffers)


@contextlib.contextmanager
def _rewind_states(states: Sequence[tuple[nn.Module, str, torch.Tensor]]) -> Iterator[None]:
    """Lets modules find copies of earlier values where their tensors are."""
    tables = [
        module._buffers if name in module._buffers else module.__dict__
        for module, name, _ in states
    ]
    originals = [table[name] for table, (_, name, _) in zip(tables, states, strict=True)]
    try:
        for table, (_, name, value) in zip(tables, states, strict=True):
            table[name] = value.clone()
        yield
    finally:
        for table, (_, name, _), original in zip(tables, states, originals, strict=True):
            table[name] = original
