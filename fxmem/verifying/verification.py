"""What came of running two models side by side. Pure data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

SCHEMA_VERSION = 1


class Kind(str, Enum):
    """What of a step is compared, in this order."""

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
        step: Which step, from 1.
        kind: What it is.
        name: Its name: of a parameter or buffer, of an entry of the output, of a generator.
        cause: In what it differs, where that is not a value: a shape, a dtype, an error.
        index: The first element that differs; None where no elements were compared.
        baseline: What the first model has there, as text.
        planned: What the second model has there.
        elements: How many elements differ.
        max_difference: How far apart they are at most; None where that is no number.
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
    """What a step of one of the models takes, on the device where it ran.

    Attributes:
        peak_bytes: The most that was live in a step, with what is there before it; None where
            the model's step fails.
        predicted_peak_bytes: What :func:`fxmem.analyze` says of that model, planned or not, for
            the same device; None where it refuses the model. It is not what a plan promised.
        step_s: Seconds of a step, the median; None where the model's step fails.
    """

    peak_bytes: int | None
    predicted_peak_bytes: int | None
    step_s: float | None


@dataclass(frozen=True, slots=True)
class Promise:
    """The peak that a plan has by its planner, for the step that was measured.

    A peak that was promised too high is no more right than one that was too low: another plan would
    have kept the budget with less to compute again.

    Attributes:
        peak_bytes: It.
        is_plans_own: Whether that is :attr:`fxmem.Plan.peak_bytes`, as the plan was made for this
            step and device; else it is the planner's number for this plan in this step.
        deviation: How much more was measured than promised, over what was promised.
        is_kept: Whether that is at most 1 %, either way.
    """

    peak_bytes: int
    is_plans_own: bool
    deviation: float
    is_kept: bool


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether two models compute the same, bit for bit, and what each takes for it.

    Attributes:
        equal: Whether nothing differs.
        model: The model's class, or the TARGET that it is from.
        inputs: As the texts that ``--input`` takes.
        mode: ``"train"`` or ``"infer"``.
        device: Where both ran: ``"cpu"`` or ``"cuda"``.
        optimizer: Its name, or None.
        loss: Its name, or None.
        autocast: What forward and loss were autocast to, or None.
        seed: Of the random numbers.
        steps: How many were compared; the last of them is the one that differs, if any does.
        compared: How many things of each kind were compared in each step.
        differences: Those of the first step that has any.
        baseline: Figures of the model.
        planned: Figures of the other model.
        notes: What to know about how that was found.
        promise: The plan's peak beside the measured one; None where the other model has no plan,
            or the plan is not for this step, which a note then says.
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

    @property
    def keeps_promise(self) -> bool:
        """Whether the plan's promise is kept, as far as there is one."""
        return self.promise is None or self.promise.is_kept

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data: what :meth:`to_json` writes."""
        return {"schema_version": SCHEMA_VERSION, **json.loads(json.dumps(asdict(self)))}

    def to_json(self, indent: int | None = None) -> str:
        """All of it as JSON; bytes are integers, times are seconds."""
        return json.dumps(self.to_dict(), indent=indent)
