"""Compares fxmem's numbers with those of real steps, case by case.

    python -m benchmarks.accuracy [--only NAME ...] [--remeasure] [-o docs/results/accuracy.md]

What is real comes from `benchmarks.measure`, which keeps it; fxmem is run anew each time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.cases import Case, import_torchvision
from benchmarks.measure import THREADS, Result, measured
from benchmarks.models import CASES, find
from benchmarks.stamp import put_page, write_stamp
from benchmarks.step import MODES, Mode

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """The comparison of one case in one mode; errors are relative, None where not comparable."""

    case: str
    mode: Mode
    peak_bytes: int | None = None
    tensor_error: float | None = None
    mode_error: float | None = None
    allocator_error: float | None = None
    resident_error: float | None = None
    saved_equal: bool | None = None
    forward_equal: bool | None = None
    backward_equal: bool | None = None
    frontend: str = ""
    seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Tells whether fxmem gave no number at all."""
        return self.peak_bytes is None


def analyse(case: Case, mode: Mode) -> Any:
    """Runs fxmem on the case as the measurements ran it."""
    import fxmem

    args, kwargs = case.inputs()
    return fxmem.analyze(
        case.model(),
        args,
        kwargs,
        mode="infer" if mode == "infer" else "train",
        device="cpu",
        optimizer="adam" if mode == "train+adam" else None,
        loss=None,
    )


def peak_without_workspace(analysis: Any) -> int:
    """Returns fxmem's peak of tensors alone, without what kernels allocate inside themselves.

    That peak may lie at another moment than the one with workspace.
    """
    timeline = analysis.timeline
    workspaces = {s.index for s in analysis.graph.storages if s.category.value == "WORKSPACE"}
    live = peak = int(timeline.resident_bytes)
    for event in timeline.events:
        if event.storage is not None and event.storage not in workspaces:
            live += event.delta_bytes
            peak = max(peak, live)
    return peak


def relative(ours: int, real: Result) -> float | None:
    """Returns the relative error against the peak of a measurement that may have failed."""
    peak = real.get("peak_bytes")
    return ours / peak - 1 if peak else None


Saved = tuple[int, tuple[int, ...], str]


def _saved_key(nbytes: int, shape: Iterable[int], dtype: str) -> Saved:
    return nbytes, tuple(shape), str(dtype).removeprefix("torch.")


def compare_saved(analysis: Any, real: Result) -> tuple[bool | None, str]:
    """Returns whether activations saved are the real ones, and the first difference in words.

    Equal means the same storages in bytes, shape and dtype, as a multiset. A different order,
    or shape (two views of one storage, saved in another order), is told but not a difference.
    """
    if "storages" not in real:
        return None, f"saved: {real.get('error')}"
    theirs = [
        _saved_key(s["nbytes"], s["shape"], s["dtype"])
        for s in real["storages"]
        # PyTorch's checkpoint saves an empty tensor until 2.11, which holds nothing.
        if s["kind"] == "activation" and s["nbytes"]
    ]
    ours = [
        _saved_key(s.nbytes, s.shape, s.dtype)
        for s in analysis.saved
        if s.category.value not in ("PARAMETER", "BUFFER", "INPUT")
    ]
    if ours == theirs:
        return True, ""
    if Counter(ours) == Counter(theirs):
        return True, "saved in another order"

    def sizes(saved: list[Saved]) -> Counter[tuple[int, str]]:
        return Counter((nbytes, dtype) for nbytes, _, dtype in saved)

    if sizes(ours) == sizes(theirs):
        return True, "saved under other shapes"
    missing, extra = sizes(theirs) - sizes(ours), sizes(ours) - sizes(theirs)
    return False, f"saved: {_list_saved('missing', missing)} {_list_saved('extra', extra)}"


def _list_saved(word: str, saved: Counter[tuple[int, str]]) -> str:
    shown = [f"{n}x{nbytes} B {dtype}" for (nbytes, dtype), n in saved.most_common(2)]
    more = ", …" if len(saved) > len(shown) else ""
    return f"{word} {sum(saved.values())} ({', '.join(shown)}{more})" if saved else ""


def compare_flops(ours: int, real: Result, which: str) -> tuple[bool | None, str]:
    """Returns whether the FLOPs are equal, and the difference in words."""
    if which not in real:
        return None, f"flops: {real.get('error')}"
    if ours == real[which]:
        return True, ""
    ratio = f"{ours / real[which]:.4f} of" if real[which] else f"{ours} instead of"
    return False, f"{which} {ratio} {real[which]}"


def compare(case: Case, mode: Mode, real: Result) -> Row:
    """Analyses one case and compares; a failure becomes a row with its reason."""
    start = time.perf_counter()
    try:
        analysis = analyse(case, mode)
        seconds = time.perf_counter() - start
        tensor_peak = peak_without_workspace(analysis)
        saved, saved_note = compare_saved(analysis, real["saved"])
        forward, forward_note = compare_flops(
            analysis.forward_flops, real["flops"], "forward_flops"
        )
        backward, backward_note = compare_flops(
            analysis.backward_flops, real["flops"], "backward_flops"
        )
        resident = real["tensors"].get("resident_bytes")
        return Row(
            case.name,
            mode,
            peak_bytes=analysis.peak_bytes,
            tensor_error=relative(tensor_peak, real["tensors"]),
            mode_error=relative(tensor_peak, real["under_mode"]),
            allocator_error=relative(analysis.peak_bytes, real["allocator"]),
            resident_error=analysis.timeline.resident_bytes / resident - 1 if resident else None,
            saved_equal=saved,
            forward_equal=forward,
            backward_equal=backward,
            frontend=str(analysis.frontend),
            seconds=seconds,
            notes=tuple(filter(None, (saved_note, forward_note, backward_note))),
        )
    except Exception as error:  # a crash on one model is a row, not the end
        line = str(error).strip().splitlines() or [""]
        return Row(case.name, mode, notes=(f"{type(error).__name__}: {line[0][:160]}",))


def percent(value: float | None) -> str:
    """Returns a relative error in percent; zero only where it is exactly zero."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{100 * value:+.3f}" if abs(value) >= 5e-6 else f"{'+' if value > 0 else '-'}<0.001"


def _tick(value: bool | None) -> str:
    return {True: "yes", False: "NO", None: "-"}[value]


def table(rows: Sequence[Row]) -> str:
    """Returns all rows as a Markdown table."""
    headers = {
        "case": "model",
        "mode": "mode",
        "peak": "fxmem MiB",
        "tensors": "tensors %",
        "under": "under mode %",
        "allocator": "allocator %",
        "resident": "resident %",
        "saved": "saved",
        "flops": "FLOPs fw/bw",
        "frontend": "by",
        "seconds": "s",
        "notes": "notes",
    }
    cells = [
        {
            "case": row.case,
            "mode": row.mode,
            "peak": "-" if row.peak_bytes is None else f"{row.peak_bytes / MIB:.2f}",
            "tensors": percent(row.tensor_error),
            "under": percent(row.mode_error),
            "allocator": percent(row.allocator_error),
            "resident": percent(row.resident_error),
            "saved": _tick(row.saved_equal),
            "flops": f"{_tick(row.forward_equal)}/{_tick(row.backward_equal)}",
            "frontend": row.frontend or "-",
            "seconds": "-" if row.seconds is None else f"{row.seconds:.2f}",
            "notes": "; ".join(row.notes).replace("|", "/"),
        }
        for row in rows
    ]
    return str(tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True))


def summary(rows: Sequence[Row]) -> str:
    """Returns the medians and the worst of each mode as a Markdown table."""
    lines: list[list[str]] = []
    for mode in MODES:
        ours = [row for row in rows if row.mode == mode]
        if not ours:
            continue
        done = [row for row in ours if not row.failed]
        lines.append(
            [
                mode,
                f"{len(done)}/{len(ours)}",
                *_spread(done, lambda row: row.tensor_error),
                *_spread(done, lambda row: row.allocator_error),
                _share(row.saved_equal for row in done),
                _share(row.forward_equal for row in done),
                _share(row.backward_equal for row in done),
            ]
        )
    headers = ["mode", "analysed"]
    for truth in ("tensors", "allocator"):
        headers += [f"{truth}: median %", "exact", "worst %"]
    headers += ["saved equal", "forward FLOPs equal", "backward FLOPs equal"]
    return str(tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True))


def _spread(rows: Sequence[Row], error_of: Callable[[Row], float | None]) -> tuple[str, str, str]:
    errors = [(error, row) for row in rows if (error := error_of(row)) is not None]
    if not errors:
        return "-", "-", "-"
    median = statistics.median(abs(error) for error, _ in errors)
    worst, row = max(errors, key=lambda pair: abs(pair[0]))
    exact = sum(error == 0 for error, _ in errors)
    name = f" ({row.case})" if worst else ""
    return percent(median).lstrip("+"), f"{exact}/{len(errors)}", percent(worst) + name


def _share(values: Iterable[bool | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known)}/{len(known)}"


COMMAND = "python -m benchmarks.accuracy -o docs/results/accuracy.md"
LEGEND = f"""\
The second step of each model, fxmem (device `cpu`) against PyTorch on a CPU with {THREADS} threads.
Errors are fxmem's, in percent of what was measured; `0` is equal to the byte.

- tensors: fxmem's peak without workspace, against the peak of the live tensors' storages.
- under mode: the same, with autograd's additions out of place, as a dispatch mode makes them.
- allocator: fxmem's whole peak, against the peak of the CPU allocator's own events.
- resident: what is live when the step starts, against the tensors measured.
- saved: the storages that autograd saves for backward, by size and dtype, are the same ones.
- FLOPs: forward and backward are equal to `torch.utils.flop_counter`'s.
- s: seconds of the analysis, on a machine that is at other work too ([speed](speed.md)).
"""


def main() -> None:
    """Runs the comparison and prints it, or writes it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases alone")
    parser.add_argument("--mode", choices=MODES, help="this mode alone")
    parser.add_argument("--remeasure", action="store_true", help="measure the real steps again")
    parser.add_argument("-o", "--output", type=Path, help="write Markdown there, not to stdout")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    import_torchvision()
    cases = [find(name) for name in options.only] if options.only else CASES
    rows: list[Row] = []
    for case in cases:
        stale = options.remeasure
        for mode in MODES if options.mode is None else (options.mode,):
            try:
                real = measured(case.name, mode, remeasure=stale)
            except RuntimeError as error:
                rows.append(Row(case.name, mode, notes=(str(error),)))
                continue
            finally:
                stale = False  # one process measures all modes of a case
            rows.append(compare(case, mode, real))
            row = rows[-1]
            print(
                f"{row.case:26s} {row.mode:10s} {percent(row.tensor_error):>9s}"
                f" {percent(row.allocator_error):>9s} saved {_tick(row.saved_equal)}"
                f" {'; '.join(row.notes)}",
                file=sys.stderr,
                flush=True,
            )
    head = f"# Accuracy\n\n{write_stamp(COMMAND)}\n\n{LEGEND}"
    text = f"{head}\n{summary(rows)}\n\n## Every model\n\n{table(rows)}\n"
    put_page(text, options.output)


if __name__ == "__main__":
    main()
