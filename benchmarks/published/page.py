"""The page of published measurements, as Markdown."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from benchmarks.published.cases import CONFIGURATIONS, Case, is_equal, load_all
from benchmarks.published.predicting import AT_MOST

TRACES = """\
Allocator traces of whole steps (`torch.cuda.memory._dump_snapshot`): every allocation and free, in
its order and of its size, beside those that fxmem predicts.
"""
OTHER_TORCH = ", another torch"
MEASURES = ("allocated", "requested", "reserved")
INTRODUCTION = """\
Memory that others measured on their own GPUs and published, beside fxmem's prediction for the same
configuration. The models were written anew from the sources; the figures, with repository, commit
and file, are in `tests/data/cuda/published`, and the test suite holds each to the error shown here.

- *allocated* is `torch.cuda.max_memory_allocated()` unless the figure's name says otherwise;
  *requested* and *reserved* are the peaks of `torch.cuda.memory_stats()`. An error is the
  prediction minus the measurement: below zero, fxmem promised too little.
- *configuration* was classified before anything was predicted. *stated*: the source says all that
  memory depends on (the torch version may be inferred). *inferred*: a part was concluded, as
  listed. *weak*: something needed is unknown, or the figure is rounded to more than 1 MiB.
- *equal*: to the KiB, or to the last digit that was published where that is coarser.
- *in the stated range*: the report states a range where cuDNN chooses, and the measurement is
  equal or within the range. The errors are those of the lower end, the report's first line.
- *another torch*: predictions are those of the torch version above, most measurements are older,
  and a figure whose difference has the version as its cause is counted apart.
"""


@dataclass(frozen=True)
class Row:
    """One figure: measured, and predicted, or why it could not be.

    Attributes:
        case: What was measured.
        figure: Its name.
        measured_bytes: As published.
        predicted_bytes: As fxmem predicts; None where it failed.
        most_bytes: The upper end of the range that fxmem states; None where it states none.
        failure: Why there is no prediction.
    """

    case: Case
    figure: str
    measured_bytes: int
    predicted_bytes: int | None
    most_bytes: int | None = None
    failure: str = ""

    @property
    def measure(self) -> str:
        """``allocated``, ``requested`` or ``reserved``."""
        return self.figure.split()[0]

    @property
    def error_bytes(self) -> int | None:
        """Predicted minus measured."""
        return None if self.predicted_bytes is None else self.predicted_bytes - self.measured_bytes

    @property
    def relative(self) -> float:
        """The error as a part of what was measured; a failure counts as all of it, low."""
        return -1.0 if self.error_bytes is None else self.error_bytes / self.measured_bytes

    @property
    def is_equal(self) -> bool:
        """Tells whether the prediction is the published figure."""
        return self.error_bytes is not None and is_equal(self.case, self.error_bytes)

    @property
    def is_in_range(self) -> bool:
        """Tells whether a library's choice, within the stated range, explains what was measured."""
        if self.predicted_bytes is None or self.most_bytes is None:
            return self.is_equal
        return self.is_equal or self.predicted_bytes <= self.measured_bytes <= self.most_bytes

    @property
    def group(self) -> str:
        """The knowledge of the configuration, with differences between versions apart."""
        is_other = self.case.cause_kind == "torch version" and not self.is_equal
        return f"{self.case.configuration}{OTHER_TORCH if is_other else ''}"


def list_rows(case: Case, predicted: Mapping[str, int], failure: str = "") -> list[Row]:
    """One row for each figure of a case."""
    return [
        Row(case, name, nbytes, predicted.get(name), predicted.get(name + AT_MOST), failure)
        for name, nbytes in case.measured.items()
    ]


def list_recorded_rows() -> list[Row]:
    """The rows of all cases, from the errors that were recorded."""
    return [
        row
        for case in load_all()
        for row in list_rows(
            case, {name: case.measured[name] + error for name, error in case.error.items()}
        )
    ]


def write_headline(rows: Sequence[Row]) -> str:
    """The answer in two sentences."""
    stated = [row for row in rows if row.group == "stated" and row.measure != "reserved"]
    equal = sum(row.is_equal for row in stated)
    repositories = {row.case.repository for row in rows}
    return (
        f"{len(rows)} figures of {len(repositories)} publications. Of {len(stated)} allocated and "
        f"requested figures whose configuration is wholly stated, {equal} "
        f"({100 * equal / max(len(stated), 1):.0f} %) are predicted to the KiB."
    )


def write_summary(rows: Sequence[Row]) -> str:
    """Counts the equal figures, by kind and by the knowledge of the configuration."""
    groups = [name + end for end in ("", OTHER_TORCH) for name in CONFIGURATIONS]
    cells = []
    for group, measure in itertools.product(groups, MEASURES):
        ours = [row for row in rows if row.group == group and row.measure == measure]
        if ours:
            cells.append([group, measure, *_summarise(ours)])
    headers = [
        "configuration",
        "measure",
        "figures",
        "sources",
        "equal",
        "in the stated range",
        "within 1 %",
        "low by more than 1 %",
        "lowest",
        "highest",
    ]
    return str(tabulate(cells, headers, tablefmt="github", disable_numparse=True))


def write_publications(rows: Sequence[Row]) -> str:
    """Counts the equal figures, by publication."""
    cells = []
    for repository in dict.fromkeys(row.case.repository for row in rows):
        ours = [row for row in rows if row.case.repository == repository]
        errors = [row.relative for row in ours]
        cells.append(
            [
                repository,
                ", ".join(sorted({row.case.gpu or "not named" for row in ours})),
                str(len(ours)),
                _share(sum(row.is_equal for row in ours), len(ours)),
                _share(sum(row.is_equal or abs(row.relative) <= 0.01 for row in ours), len(ours)),
                format_percent(min(errors)),
                format_percent(max(errors)),
            ]
        )
    headers = ["publication", "GPUs", "figures", "equal", "within 1 %", "lowest", "highest"]
    return str(tabulate(cells, headers, tablefmt="github", disable_numparse=True))


def write_shortages(rows: Sequence[Row]) -> str:
    """Peaks of reserved memory that were predicted too low: who would have run out of memory."""
    reserved = [row for row in rows if row.measure == "reserved"]
    low = [row for row in reserved if row.relative < 0 and not row.is_equal]
    low.sort(key=lambda row: row.relative)
    text = f"{len(low)} of {len(reserved)} figures of reserved memory are predicted too low."
    if not low:
        return text
    cells = [
        [
            str(row.case),
            row.case.configuration,
            f"{row.measured_bytes:,}",
            _write_error(row),
            format_percent(row.relative),
            row.case.cause_kind,
        ]
        for row in low
    ]
    headers = ["case", "configuration", "measured B", "error B", "error", "cause"]
    table = str(tabulate(cells, headers, tablefmt="github", disable_numparse=True))
    return f"{text}\n\n{table}"


def write_page(rows: Sequence[Row], traces: str, stamp: str) -> str:
    """The whole page.

    Args:
        rows: Of all cases.
        traces: Tables of the traces that were compared event by event.
        stamp: When, from what and how it was made.
    """
    sources: dict[str, list[Row]] = {}
    for row in rows:
        sources.setdefault(row.case.source, []).append(row)
    parts = [
        "# Measured by others on real GPUs",
        write_headline(rows),
        stamp,
        INTRODUCTION.rstrip(),
        "## How many are equal",
        write_summary(rows),
        write_publications(rows),
        "## Event by event",
        TRACES.rstrip(),
        traces,
        "## Why figures differ",
        write_causes(rows),
        "## Who would have run out of memory",
        write_shortages(rows),
    ]
    for source, ours in sources.items():
        origins = dict.fromkeys(row.case.origin for row in ours)
        parts += [f"## {source}", "\n".join(f"- {origin}" for origin in origins)]
        parts.append(write_source(ours))
    return "\n\n".join(parts) + "\n"


def _summarise(rows: Sequence[Row]) -> list[str]:
    errors = [row.relative for row in rows]
    return [
        str(len(rows)),
        str(len({row.case.repository for row in rows})),
        _share(sum(row.is_equal for row in rows), len(rows)),
        str(sum(row.is_in_range for row in rows)),
        _share(sum(row.is_equal or abs(row.relative) <= 0.01 for row in rows), len(rows)),
        str(sum(row.relative < -0.01 and not row.is_equal for row in rows)),
        format_percent(min(errors)),
        format_percent(max(errors)),
    ]


def _share(count: int, total: int) -> str:
    return f"{count} ({100 * count / total:.0f} %)"


def write_causes(rows: Iterable[Row]) -> str:
    """Counts the figures that differ, by the kind of cause."""
    kinds = Counter(row.case.cause_kind or "none" for row in rows if not row.is_equal)
    cells = [[kind, count] for kind, count in kinds.most_common()]
    return str(tabulate(cells, ["cause of a difference", "figures"], tablefmt="github"))


def write_source(rows: Sequence[Row]) -> str:
    """A table of one source's figures, and the causes of what differs."""
    cells = [
        [
            row.case.id,
            row.figure,
            row.case.gpu or "not named",
            row.case.torch,
            row.case.configuration,
            f"{row.measured_bytes:,}",
            _write_prediction(row),
            _write_error(row),
            format_percent(row.relative),
        ]
        for row in rows
    ]
    headers = [
        *("case", "figure", "GPU", "torch", "configuration"),
        *("measured B", "predicted B", "error B", "error"),
    ]
    table = str(tabulate(cells, headers, tablefmt="github", disable_numparse=True))
    return "\n\n".join([table, *_list_remarks(rows)])


def _write_prediction(row: Row) -> str:
    if row.predicted_bytes is None:
        return "-"
    if row.most_bytes is None or row.most_bytes <= row.predicted_bytes or row.is_equal:
        return f"{row.predicted_bytes:,}"
    return f"{row.predicted_bytes:,} to {row.most_bytes:,}"


def _write_error(row: Row) -> str:
    if row.error_bytes is None:
        return row.failure
    return "0" if row.error_bytes == 0 else f"{row.error_bytes:+,}"


def _list_remarks(rows: Sequence[Row]) -> list[str]:
    """Causes and inferences, each once, with the cases that they concern."""
    remarks: dict[str, dict[str, None]] = {}
    for row in rows:
        ours = [f"Inferred: {text}." for text in row.case.inferred]
        if not row.is_equal:
            ours.append(
                f"Differs ({row.case.cause_kind}): {row.case.cause}"
                if row.case.cause
                else "Differs; cause unknown."
            )
        for text in ours:
            remarks.setdefault(text, {})[row.case.id] = None
    everything = {row.case.id for row in rows}
    lines = [
        f"- {text}" + ("" if set(ids) == everything else f" ({'; '.join(ids)})")
        for text, ids in remarks.items()
    ]
    return ["\n".join(lines)] if lines else []


def format_percent(value: float) -> str:
    """A relative error in percent; ``0`` only where it is exactly zero."""
    if value == 0:
        return "0"
    return f"{100 * value:+.3f} %" if abs(value) >= 5e-6 else f"{'+' if value > 0 else '-'}<0.001 %"
