"""Random numbers that a segment draws although its plan knows of none.

A rate of dropout that was zero is raised while a model trains, or a layer begins to be left out:
what is computed again has to draw the same. Whether it drew any, a generator's state tells.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_State = tuple[torch.Generator, bytes]


class RandomNumbers:
    """The random numbers of one run of a segment, kept where there are any.

    Args:
        inputs: What the segment is given; numbers are drawn where its tensors are.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._begin = [(g, _read_state(g)) for g in _iterate_generators(inputs)]

    def settle(self) -> None:
        """After the run: keeps what generators began with where they drew."""
        self._begin = [(g, state) for g, state in self._begin if _read_state(g) != state]

    @contextlib.contextmanager
    def repeat(self) -> Iterator[None]:
        """Has the same numbers drawn again, and the generators then be as they were."""
        now = [(generator, _read_state(generator)) for generator, _ in self._begin]
        _write_states(self._begin)
        try:
            yield
        finally:
            _write_states(now)


def _iterate_generators(inputs: Sequence[Any]) -> Iterator[torch.Generator]:
    """PyTorch's own, of the CPU and of the GPUs that hold inputs."""
    yield torch.default_generator
    gpus = {value.device.index for value in inputs if isinstance(value, Tensor) and value.is_cuda}
    # In an analysis there may be no GPU; while a graph is captured, its generator cannot be asked.
    is_there: Callable[[], bool] = torch.cuda.is_initialized
    if gpus and is_there() and not torch.cuda.is_current_stream_capturing():
        yield from (torch.cuda.default_generators[at] for at in sorted(gpus))


def _read_state(generator: torch.Generator) -> bytes:
    """A generator's state, out of the sight of what watches tensors and their memory."""
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _write_states(states: Sequence[_State]) -> None:
    for generator, state in states:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
