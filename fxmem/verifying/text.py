"""The blocks of the report on a verification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.tables import Bytes, Cell, Table
from fxmem.report.text import write_count, write_subject
from fxmem.setup import Setup
from fxmem.units import format_bytes

if TYPE_CHECKING:
    from fxmem.verifying.verification import Difference, Verification

_MOST = 10  # differences that are listed; the rest are counted
_PLURALS = {"loss": "losses"}


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

    >>> from fxmem.verifying.verification import Difference, Kind
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
