"""The random number generators of Python and of NumPy, which no graph draws from."""

from __future__ import annotations

import functools
import importlib
import random
import sys
from collections.abc import Callable
from typing import Any

DRAWS = "it draws random numbers that are not PyTorch's"
"""What is said of code that does."""


def draw_random_numbers() -> None:
    """Draws one of each."""
    random.random()
    numpy_random = _find_numpy()
    if numpy_random is not None:
        numpy_random.random()


def read_random_states() -> tuple[Any, ...]:
    """The states of both, which are equal where nothing was drawn between."""
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
