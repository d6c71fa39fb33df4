"""Results of running two models side by side: pure data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from fxmem.report.blocks import Block
from fxmem.report.result import Result

SCHEMA_VERSION = 1


class Kind(str, Enum):
    """Kinds of values of a step that are compared, in this order."""

    ERROR = "error"
    OUTPUT = "output"
    LOSS = "loss"
    GRADIENT = "gradient"
    BUFFER = "buffer"
    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer state"
    INPUT = "input"
    RANDOM_STATE = "random state"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two models do not have in common after a step.

    Attributes:
        step: The number of the step, from 1.
        kind: The kind of value.
        name: Its name: of a parameter or buffer, of an entry of the output, of a generator.
        cause: In what it differs, where that is not a value: a shape, a dtype, an error.
        index: The first element that differs; None where no elements were compared.
        baseline: The first model's value, as text.
        planned: The second model's value.
        elements: The number of elements that differ.
        max_difference: Their largest difference; None where that is no number.
    """

    step: int
    kind: Kind
    name: str
    cause: str = ""
    index: tuple[int, ...] | None = None
    baseline: str = ""
    planned: str = ""
    elements: int = 0
    max_difference: float | None = None


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Memory and time of a step of one of the models, on the device where it ran.

    Attributes:
        peak_bytes: The most that was live in a step, with what is there before it; None where
            the model's step fails.
        predicted_peak_bytes: The peak by :func:`fxmem.analyze` of that model, planned or not, for
            the same device; None where it refuses the model. It is not what a plan promised.
        step_s: Seconds of a step, the median; None where the model's step fails.
    """

    peak_bytes: int | None
    predicted_peak_bytes: int | None
    step_s: float | None


@dataclass(frozen=True, slots=True)
class Promise:
    """The peak that a plan has by its planner, for the step that was measured.

    Attributes:
        peak_bytes: The promised peak.
        is_plans_own: True where that is :attr:`fxmem.Plan.peak_bytes`, the plan being for this
            step and device; else it is the planner's number for this plan in this step.
        deviation: The measured peak over the promised one, less one.
        is_kept: True where the deviation is at most 1 %, either way.
    """

    peak_bytes: int
    is_plans_own: bool
    deviation: float
    is_kept: bool


@dataclass(frozen=True, slots=True)
class Verification(Result):
    """The comparison of two models, bit for bit, with the memory and time of each.

    Attributes:
        equal: True where nothing differs.
        model: The model's class, or the TARGET that it is from.
        inputs: The inputs, as the texts that ``--input`` takes.
        mode: ``"train"`` or ``"infer"``.
        device: Where both ran: ``"cpu"`` or ``"cuda"``.
        optimizer: Its name, or None.
        loss: Its name, or None.
        autocast: The dtype that forward and loss were autocast to, or None.
        seed: The seed of the random numbers.
        steps: The number of steps compared; if one differs, that is the last.
        compared: The number of values of each kind that were compared in each step.
        differences: The differences of the first step that has any.
        baseline: Figures of the model.
        planned: Figures of the other model.
        notes: Remarks on how the result was found.
        promise: The plan's peak beside the measured one; None where the other model has no plan,
            or the plan is not for this step, which a note then says.
        mesh: Names and sizes of the mesh of processes that both were laid out on; None for one.
        parallelize: How they were laid out.
        rank: The first that found a difference, else 0: figures and differences are that one's.
    """

    equal: bool
    model: str
    inputs: tuple[str, ...]
    mode: str
    device: str
    optimizer: str | None
    loss: str | None
    autocast: str | None
    seed: int
    steps: int
    compared: dict[str, int]
    differences: tuple[Difference, ...]
    baseline: StepFigures
    planned: StepFigures
    notes: tuple[str, ...] = ()
    promise: Promise | None = None
    mesh: dict[str, int] | None = None
    parallelize: str | None = None
    rank: int = 0

    def __repr__(self) -> str:
        return (
            f"Verification(equal={self.equal}, keeps_promise={self.keeps_promise}, "
            f"model={self.model!r}, steps={self.steps}, differences=<{len(self.differences)}>)"
        )

    @property
    def keeps_promise(self) -> bool:
        """Returns whether the plan's promise is kept; True without a promise."""
        return self.promise is None or self.promise.is_kept

    def list_blocks(self) -> list[Block]:
        from fxmem.verifying.text import list_verification_blocks

        return list_verification_blocks(self)

    def list_bars(self) -> Mapping[str, int | None]:
        return {
            "model, measured": self.baseline.peak_bytes,
            "with the plan, measured": self.planned.peak_bytes,
            "with the plan, promised": self.promise.peak_bytes if self.promise else None,
        }

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **json.loads(json.dumps(asdict(self)))}
