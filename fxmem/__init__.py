"""fxmem: how much memory a PyTorch training step takes, before the run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fxmem.errors import (
    DataDependentError,
    FxmemError,
    FxmemWarning,
    InfeasibleError,
    LoadError,
    TraceError,
    UsageError,
)
from fxmem.graph import Category, Phase
from fxmem.loop import Loop
from fxmem.specs import TensorSpec

if TYPE_CHECKING:
    from fxmem.advice.advising import advise
    from fxmem.advice.record import Advice
    from fxmem.analysis import Analysis
    from fxmem.api import analyze
    from fxmem.applying.applying import apply, unapply
    from fxmem.applying.auto import auto
    from fxmem.applying.verification import Verification
    from fxmem.planning.plan import Plan
    from fxmem.planning.planner import pareto, plan
    from fxmem.verifying.verify import verify

__version__ = "0.1.0"
__all__ = [
    "Advice",
    "Analysis",
    "Category",
    "DataDependentError",
    "FxmemError",
    "FxmemWarning",
    "InfeasibleError",
    "LoadError",
    "Loop",
    "Phase",
    "Plan",
    "TensorSpec",
    "TraceError",
    "UsageError",
    "Verification",
    "__version__",
    "advise",
    "analyze",
    "apply",
    "auto",
    "pareto",
    "plan",
    "unapply",
    "verify",
]

_LAZY = {
    "Advice": "fxmem.advice.record",
    "Analysis": "fxmem.analysis",
    "Plan": "fxmem.planning.plan",
    "Verification": "fxmem.applying.verification",
    "advise": "fxmem.advice.advising",
    "analyze": "fxmem.api",
    "apply": "fxmem.applying.applying",
    "auto": "fxmem.applying.auto",
    "pareto": "fxmem.planning.planner",
    "plan": "fxmem.planning.planner",
    "unapply": "fxmem.applying.applying",
    "verify": "fxmem.verifying.verify",
}
"""Where public names come from: torch takes more than a second to import, and bad usage of the CLI
is told without it."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fxmem' has no attribute {name!r}")
