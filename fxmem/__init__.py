"""fxmem: how much memory a PyTorch training step takes, before the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxmem.errors import (
    DataDependentError,
    FxmemError,
    FxmemWarning,
    LoadError,
    TraceError,
    UsageError,
)
from fxmem.graph import Category, Phase
from fxmem.specs import TensorSpec

if TYPE_CHECKING:
    from fxmem.analysis import Analysis
    from fxmem.api import analyze

__version__ = "0.1.0"
__all__ = [
    "Analysis",
    "Category",
    "DataDependentError",
    "FxmemError",
    "FxmemWarning",
    "LoadError",
    "Phase",
    "TensorSpec",
    "TraceError",
    "UsageError",
    "__version__",
    "analyze",
]


def __getattr__(name: str) -> Any:
    # torch takes more than a second to import: bad usage of the CLI is told without it.
    if name == "analyze":
        from fxmem.api import analyze

        return analyze
    if name == "Analysis":
        from fxmem.analysis import Analysis

        return Analysis
    raise AttributeError(f"module 'fxmem' has no attribute {name!r}")
