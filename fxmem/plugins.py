"""Plugins: callables of other packages that register operators, findings and formats."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.metadata import entry_points

from fxmem.errors import FxmemWarning, summarize_error

GROUP = "fxmem.plugins"


@cache
def load_plugins() -> None:
    """Calls the entry points of the group ``fxmem.plugins``, once in a process.

    One that fails is left out, with a warning.
    """
    for entry in entry_points(group=GROUP):
        try:
            entry.load()()
        except Exception as error:
            cause = summarize_error(error)
            warnings.warn(f"the plugin {entry.value} failed: {cause}", FxmemWarning, stacklevel=2)
