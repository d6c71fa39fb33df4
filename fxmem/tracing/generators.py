"""The random number generators of Python, NumPy and PyTorch, and their states."""

from __future__ import annotations

import ctypes
import functools
import importlib
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

DRAWS = "it draws random numbers that are not PyTorch's"
"""What is said of code that does."""


def draw_random_numbers() -> None:
    """Draws one number from Python's generator and one from NumPy's."""
    random.random()
    numpy_random = _find_numpy()
    if numpy_random is not None:
        numpy_random.random()


def read_random_states() -> tuple[Any, ...]:
    """The states of Python's and NumPy's, equal where nothing was drawn between."""
    numpy_random = _find_numpy()
    if numpy_random is None:
        return (random.getstate(),)
    kind, keys, *rest = numpy_random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest


def restore_random_states(states: tuple[Any, ...]) -> None:
    """Puts both back to what they were.

    Args:
        states: From :func:`read_random_states`.
    """
    python, *numpy = states
    random.setstate(python)
    if numpy:
        kind, keys, *rest = numpy
        numpy_random = _find_numpy()
        numpy_random.set_state((kind, memoryview(keys).cast("I"), *rest))


def save_random_states() -> Callable[[], None]:
    """What puts both back to what they are now."""
    return functools.partial(restore_random_states, read_random_states())


def _find_numpy() -> Any:
    """NumPy's ``random``, where NumPy is in use: PyTorch can be installed without it."""
    return importlib.import_module("numpy.random") if "numpy" in sys.modules else None


def list_generators(inputs: Iterable[Any]) -> list[torch.Generator]:
    """PyTorch's own generators, of the CPU and of the GPUs that hold inputs."""
    gpus = {value.device.index for value in inputs if isinstance(value, Tensor) and value.is_cuda}
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized
    # In an analysis there may be no GPU; while a graph is captured, its generator cannot be asked.
    if not gpus or not is_initialized() or torch.cuda.is_current_stream_capturing():
        return [torch.default_generator]
    return [torch.default_generator, *(torch.cuda.default_generators[at] for at in sorted(gpus))]


def read_state(generator: torch.Generator) -> bytes:
    """Reads the state of a generator: as a tensor, that of the CPU's holds 5 KB of memory."""
    with torch._C.DisableTorchFunction():
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())


def set_state(generator: torch.Generator, state: bytes) -> None:
    """Sets a generator to a state from :func:`read_state`."""
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
