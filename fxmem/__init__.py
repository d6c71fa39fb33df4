"""fxmem: how much memory a PyTorch training step takes, before the run."""

from __future__ import annotations

from fxmem.analysis import Analysis
from fxmem.api import (
    advise,
    analyze,
    apply,
    auto,
    diff,
    fit,
    max_batch,
    pareto,
    pipeline,
    plan,
    record,
    register_finding,
    register_format,
    register_workspace,
    render,
    run,
    unapply,
    verify,
)
from fxmem.batching.record import MaxBatch
from fxmem.comparison.comparison import Comparison
from fxmem.errors import (
    DataDependentError,
    FxmemError,
    FxmemWarning,
    InfeasibleError,
    LoadError,
    TraceError,
    UsageError,
)
from fxmem.finding import Finding
from fxmem.fitting.record import Fitting
from fxmem.graph import Category, Phase
from fxmem.loop import Loop
from fxmem.pipelines.pipeline import Pipeline
from fxmem.planning.plan import Plan
from fxmem.scripts.script_run import ScriptRun
from fxmem.specs import TensorSpec
from fxmem.verifying.verification import Verification

__version__ = "0.1.0"
__all__ = [
    "Analysis",
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
    "diff",
    "fit",
    "max_batch",
    "pareto",
    "pipeline",
    "plan",
    "record",
    "register_finding",
    "register_format",
    "register_workspace",
    "render",
    "run",
    "unapply",
    "verify",
]
