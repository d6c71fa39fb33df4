"""fxmem: how much memory a PyTorch training step takes, before the run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import fxmem.advice.finders  # noqa: F401 - registers the findings
from fxmem.analysis import Analysis
from fxmem.batching.epoch import Batches
from fxmem.batching.largest import MaxBatch
from fxmem.comparison.comparison import Comparison, diff
from fxmem.errors import (
    DataDependentError,
    FxmemError,
    FxmemWarning,
    InfeasibleError,
    LoadError,
    TraceError,
    UsageError,
)
from fxmem.finding import Finding, register_finding
from fxmem.fitting.meshes import Fitting
from fxmem.graph import Category, Phase
from fxmem.pipelines.pipeline import Pipeline
from fxmem.planning.plan import Plan
from fxmem.report.formats import register_format, render
from fxmem.scripts.script_run import ScriptRun
from fxmem.setup import Loop
from fxmem.specs import TensorSpec
from fxmem.verifying.verification import Verification

if TYPE_CHECKING:
    from fxmem.advice.advising import advise
    from fxmem.advice.memory_budgets import memory_budgets
    from fxmem.analyzing import analyze
    from fxmem.applying.applying import apply
    from fxmem.applying.auto import auto, unapply
    from fxmem.applying.plan_search import pareto, plan
    from fxmem.batching.batches import batches
    from fxmem.batching.sizes import max_batch
    from fxmem.fitting.mesh_search import fit
    from fxmem.kernels.extensions import register_workspace
    from fxmem.kernels.stand_ins import register_stand_in
    from fxmem.pipelines.pipelining import pipeline
    from fxmem.scripts.recording import record
    from fxmem.scripts.script import run
    from fxmem.sweeping.sweep import sweep
    from fxmem.verifying.proof import verify

__version__ = "0.1.0"
__all__ = [
    "Analysis",
    "Batches",
    "Category",
    "Comparison",
    "DataDependentError",
    "Finding",
    "Fitting",
    "FxmemError",
    "FxmemWarning",
    "InfeasibleError",
    "LoadError",
    "Loop",
    "MaxBatch",
    "Phase",
    "Pipeline",
    "Plan",
    "ScriptRun",
    "TensorSpec",
    "TraceError",
    "UsageError",
    "Verification",
    "__version__",
    "advise",
    "analyze",
    "apply",
    "auto",
    "batches",
    "diff",
    "fit",
    "max_batch",
    "memory_budgets",
    "pareto",
    "pipeline",
    "plan",
    "record",
    "register_finding",
    "register_format",
    "register_stand_in",
    "register_workspace",
    "render",
    "run",
    "sweep",
    "unapply",
    "verify",
]
_FUNCTIONS = {
    "advise": "advice.advising",
    "analyze": "analyzing",
    "apply": "applying.applying",
    "auto": "applying.auto",
    "batches": "batching.batches",
    "fit": "fitting.mesh_search",
    "max_batch": "batching.sizes",
    "memory_budgets": "advice.memory_budgets",
    "pareto": "applying.plan_search",
    "pipeline": "pipelines.pipelining",
    "plan": "applying.plan_search",
    "record": "scripts.recording",
    "register_stand_in": "kernels.stand_ins",
    "register_workspace": "kernels.extensions",
    "run": "scripts.script",
    "sweep": "sweeping.sweep",
    "unapply": "applying.auto",
    "verify": "verifying.proof",
}
"""Modules of functions that need torch, which takes more than a second to import."""


def __getattr__(name: str) -> Any:
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}")
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
