"""Random numbers that a segment draws although its plan knows of none.

A rate of dropout that was zero is raised while a model trains, or a layer begins to be left out:
what is computed again has to draw the same. Whether it drew any, a generator's state tells. Those
of Python and of NumPy, and generators that a module has for itself, are in no plan.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.tracing.generators import read_random_states, restore_random_states


class RandomNumbers:
    """The random numbers of one run of a segment, kept where there are any.

    Args:
        generators: Of PyTorch, from which it may draw.
    """

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._begin = [(g, g.clone_state()) for g in generators]
        self._others: tuple[Any, ...] | None = read_random_states()

    def settle(self) -> None:
        """After the run: keeps what generators began with where they drew."""
        self._begin = [(g, begin) for g, begin in self._begin if _draw(g) != _draw(begin)]
        if read_random_states() == self._others:
            self._others = None

    @property
    def are_drawn(self) -> bool:
        """Whether the run drew any; known once it is settled."""
        return bool(self._begin or self._others)

    @contextlib.contextmanager
    def repeat(self) -> Iterator[None]:
        """Has the same numbers drawn again, and the generators then be as they were."""
        now = [(generator, generator.clone_state()) for generator, _ in self._begin]
        others = read_random_states() if self._others else None
        _set_states(self._begin)
        if self._others:
            restore_random_states(self._others)
        try:
            yield
        finally:
            _set_states(now)
            if others:
                restore_random_states(others)


def iterate_generators(inputs: Sequence[Any]) -> Iterator[torch.Generator]:
    """PyTorch's own, of the CPU and of the GPUs that hold inputs.

    Args:
        inputs: What a segment is given; numbers are drawn where its tensors are.
    """
    yield torch.default_generator
    gpus = {value.device.index for value in inputs if isinstance(value, Tensor) and value.is_cuda}
    # In an analysis there may be no GPU; while a graph is captured, its generator cannot be asked.
    is_there: Callable[[], bool] = torch.cuda.is_initialized
    if gpus and is_there() and not torch.cuda.is_current_stream_capturing():
        yield from (torch.cuda.default_generators[at] for at in sorted(gpus))


@functools.cache
def _find_drawn() -> tuple[Tensor, ...]:
    """Where numbers are drawn: of each kind that the CPU's generator keeps one."""
    with _disable_current_modes():
        return tuple(
            torch.empty(2, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64)
        )


_find_drawn()  # who measures a step sees no memory come, nor finds it among what the step holds
_drawing = threading.Lock()


def _draw(generator: torch.Generator) -> Hashable:
    """What a generator would draw next, which tells whether two are in the same state.

    A copy draws it, into memory that is there: a state of the CPU's generator as a tensor takes 5
    KB, more than small segments do, and is seen by what watches tensors and their memory.
    """
    if generator.device.type != "cpu":
        return _read_state(generator)
    with _drawing, torch._C.DisableTorchFunction(), _disable_current_modes():
        copy = generator.clone_state()
        for tensor in _find_drawn():
            tensor.normal_(generator=copy)
        return tuple(number for tensor in _find_drawn() for number in tensor.tolist())


def _read_state(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _set_states(states: Sequence[tuple[torch.Generator, torch.Generator]]) -> None:
    for generator, wanted in states:
        state = bytearray(_read_state(wanted))
        generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
