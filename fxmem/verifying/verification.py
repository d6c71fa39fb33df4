"""Results of running two models side by side, as data and as a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.result import Result
from fxmem.report.tables import Bytes, Cell, Table
from fxmem.report.text import write_count, write_subject
from fxmem.setup import Setup
from fxmem.units import format_bytes

SCHEMA_VERSION = 1
_MOST = 10  # differences that are listed; the rest are counted
_PLURALS = {"loss": "losses"}


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
        return list_verification_blocks(self)

    def list_bars(self) -> Mapping[str, int | None]:
        return {
            "model, measured": self.baseline.peak_bytes,
            "with the plan, measured": self.planned.peak_bytes,
            "with the plan, promised": self.promise.peak_bytes if self.promise else None,
        }

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **json.loads(json.dumps(asdict(self)))}


def list_verification_blocks(verification: Verification) -> list[Block]:
    """Lists the blocks of a verification's report."""
    step = ("model", "inputs", "mode", "device", "optimizer", "loss", "autocast")
    names = (*step, "mesh", "parallelize", "rank")
    setup = Setup(**{name: getattr(verification, name) for name in names}, frontend="")
    subject = write_subject(setup, has_loop=False)
    counts = [
        f"{count} {kind if count == 1 else _PLURALS.get(kind, f'{kind}s')}"
        for kind, count in verification.compared.items()
    ]
    return [
        Heading(_write_headline(verification), [f"{subject}; seed {verification.seed}"]),
        _list_differences(verification.differences),
        Paragraph([f"Compared in each step: {', '.join(counts)}."] if counts else []),
        _list_figures(verification),
        Paragraph(verification.notes),
    ]


def _write_headline(verification: Verification) -> str:
    if not verification.equal:
        return f"Different in {describe_difference(verification.differences[0])}"
    steps = write_count(verification.steps, "step")
    before, after = verification.baseline.peak_bytes, verification.planned.peak_bytes
    text = f"Equal bit for bit in {steps}"
    if before is None or after is None:
        return text
    text = f"{text}, measured peak {format_bytes(before)} -> {format_bytes(after)}"
    promise = verification.promise
    if promise is None or (promise.is_kept and not promise.is_plans_own):
        return text
    if promise.is_kept:
        return f"{text}, as promised"
    side = "above" if promise.deviation > 0 else "below"
    promised = format_bytes(promise.peak_bytes)
    return f"{text}, {abs(promise.deviation):.1%} {side} the promised {promised}"


def describe_difference(difference: Difference) -> str:
    """Writes a difference in a line.

    >>> describe_difference(Difference(1, Kind.BUFFER, "mean", "value", (2,), "0.5", "1.5", 1, 1.0))
    'step 1: buffer mean[2] is 0.5, with the plan 1.5'
    """
    values = f"is {difference.baseline}, with the plan {difference.planned}"
    what = f"{difference.kind.value} {_name_element(difference)}"
    if not difference.baseline and not difference.planned:
        text = f"{what}: {difference.cause}"
    elif difference.cause.startswith("value"):
        text = f"{what} {values}"
    else:
        text = f"{what}: {difference.cause} {values}"
    return f"step {difference.step}: {text}"


def _name_element(difference: Difference) -> str:
    index = ", ".join(map(str, difference.index or ()))
    return f"{difference.name}[{index}]" if index else difference.name


def _list_differences(differences: tuple[Difference, ...]) -> Table:
    headers = ["different", "name", "in", "model", "with the plan", "elements", "apart at most"]
    rows: list[tuple[Cell, ...]] = []
    for each in differences[:_MOST]:
        apart = "" if each.max_difference is None else f"{each.max_difference:.3g}"
        values = (each.baseline, each.planned, each.elements or "", apart)
        rows.append((each.kind.value, _name_element(each), each.cause, *values))
    more = len(differences) - len(rows)
    rest = f"... and {more} more" if more > 0 else ""
    return Table(headers, rows, right=headers[-2:], names=headers[1:5], rest=rest)


def _list_figures(verification: Verification) -> Table:
    def show(nbytes: int | None) -> Cell:
        return "-" if nbytes is None else Bytes(nbytes)

    figures = (verification.baseline, verification.planned)
    times = ["-" if f.step_s is None else f"{1000 * f.step_s:.1f} ms" for f in figures]
    rows: list[tuple[Cell, ...]] = [("peak, measured", *(show(f.peak_bytes) for f in figures))]
    if verification.promise is not None:
        rows.append(("peak, promised", "", show(verification.promise.peak_bytes)))
    rows.append(("peak, analyzed", *(show(f.predicted_peak_bytes) for f in figures)))
    rows.append(("time of a step", *times))
    names = ["model", "with the plan"]
    device = f"on the {'GPU' if verification.device == 'cuda' else 'CPU'}"
    return Table([device, *names], rows, right=names)
