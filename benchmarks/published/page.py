"""The page of published measurements, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from benchmarks.published.cases import CONFIGURATIONS, Case, is_equal

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
- All predictions are those of the torch version above; most measurements are of older ones, and a
  difference between versions counts as an error, with *torch version* as its cause.
"""


@dataclass(frozen=True)
class Row:
    """One figure: measured, and predicted, or why it could not be."""

    case: Case
    figure: str
    measured_bytes: int
    predicted_bytes: int | None
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
        """Whether the prediction is the published figure."""
        return self.error_bytes is not None and is_equal(self.case, self.error_bytes)


def list_rows(case: Case, predicted: Mapping[str, int], failure: str = "") -> list[Row]:
    """One row for each figure of a case."""
    return [
        Row(case, name, nbytes, predicted.get(name), failure)
        for name, nbytes in case.measured.items()
    ]


def write_summary(rows: Sequence[Row]) -> str:
    """How many figures are equal, by kind and by how well the configuration is known."""
    cells = []
    for configuration in CONFIGURATIONS:
        for measure in MEASURES:
            ours = [
                row
                for row in rows
                if row.case.configuration == configuration and row.measure == measure
            ]
            if ours:
                cells.append([configuration, measure, *_summarise(ours)])
    headers = [
        "configuration",
        "measure",
        "figures",
        "sources",
        "equal",
        "within 1 %",
        "low by more than 1 %",
        "lowest",
        "highest",
    ]
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


def write_page(rows: Sequence[Row], stamp: str) -> str:
    """The whole page.

    Args:
        rows: Of all cases.
        stamp: When, from what and how it was made.
    """
    sources: dict[str, list[Row]] = {}
    for row in rows:
        sources.setdefault(row.case.source, []).append(row)
    repositories = {row.case.repository for row in rows}
    parts = [
        "# Measured by others on real GPUs",
        stamp,
        INTRODUCTION.rstrip(),
        f"## {len(rows)} figures of {len(repositories)} publications",
        write_summary(rows),
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
        _share(sum(row.is_equal or abs(row.relative) <= 0.01 for row in rows), len(rows)),
        str(sum(row.relative < -0.01 and not row.is_equal for row in rows)),
        format_percent(min(errors)),
        format_percent(max(errors)),
    ]


def _share(count: int, total: int) -> str:
    return f"{count} ({100 * count / total:.0f} %)"


def write_causes(rows: Iterable[Row]) -> str:
    """How many figures differ, by the kind of cause."""
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
            "-" if row.predicted_bytes is None else f"{row.predicted_bytes:,}",
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
