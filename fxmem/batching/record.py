"""The largest size that fits a memory, as pure data."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from fxmem.analysis import Setup, Shown
from fxmem.planning.plan import Plan

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class MaxBatch(Shown):
    """The largest batch, or other size along an axis of the inputs, whose step fits.

    Attributes:
        batch: The largest size that fits; 0 where none does.
        peak_bytes: The peak of its step; None where none fits.
        next_batch: The smallest size found that does not fit, or that the model refuses. None
            where the search found neither.
        next_peak_bytes: The peak of its step; None where the model refuses it.
        next_cause: Why it does not fit, in the allocator's words, or the model's.
        multiple_of: The distance of sizes that the model takes, or that were asked for.
        axis: The dimensions of the inputs that have the size.
        memory_bytes: All memory of the device.
        context_bytes: What is kept free of it for CUDA's context; 0 on the CPU.
        margin_bytes: What is kept free of it besides.
        analyses: How many steps were analysed to find the answer.
        setup: The step, with the inputs that were given.
        plan: The plan with which the step fits; None for the step as it is.
        planned: The largest size with a plan; None where no plan was asked for.
    """

    batch: int
    peak_bytes: int | None
    next_batch: int | None
    next_peak_bytes: int | None
    next_cause: str
    multiple_of: int
    axis: str
    memory_bytes: int
    context_bytes: int
    margin_bytes: int
    analyses: int
    setup: Setup
    plan: Plan | None = None
    planned: MaxBatch | None = None

    def __repr__(self) -> str:
        return (
            f"MaxBatch(batch={self.batch}, peak_bytes={self.peak_bytes}, "
            f"memory_bytes={self.memory_bytes}, model={self.setup.model!r})"
        )

    @property
    def is_exact(self) -> bool:
        """Whether no size is left between the answer and the one that does not fit."""
        return self.next_batch is not None and self.next_batch - self.batch <= self.multiple_of

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain dicts, lists, strings and integers: what :meth:`to_json` writes."""
        setup = self.setup
        values: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "model": setup.model,
            "inputs": list(setup.inputs),
            "gpu": setup.gpu,
        }
        values |= {f.name: getattr(self, f.name) for f in fields(self) if f.name != "setup"}
        values["is_exact"] = self.is_exact
        values["plan"] = None if self.plan is None else json.loads(self.plan.to_json())
        values["planned"] = None if self.planned is None else self.planned.to_dict()
        return values

    def to_json(self, indent: int | None = None) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)
