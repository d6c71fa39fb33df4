"""Predicts every published measurement; the package says how."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.published.cases import Case, load_all, record_errors
from benchmarks.published.page import Row, list_recorded_rows, list_rows, write_page
from benchmarks.published.predicting import predict
from benchmarks.published.traces import compare_all, write_traces
from benchmarks.stamp import write_stamp

COMMAND = "python -m benchmarks.published --recorded -o docs/results/cuda.md"


def predict_rows(case: Case) -> list[Row]:
    """The rows of a case; a failure is a row too."""
    try:
        return list_rows(case, predict(case))
    except Exception as error:  # one case is a row, not the end
        line = (str(error).strip().splitlines() or [""])[0]
        return list_rows(case, {}, f"{type(error).__name__}: {line[:160]}".replace("|", "/"))


def main() -> None:
    """Predicts, and prints or writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose source and id have this text")
    parser.add_argument("--fast", action="store_true", help="leave the slow cases out")
    parser.add_argument("--record", action="store_true", help="write the errors into the data")
    parser.add_argument("--recorded", action="store_true", help="show the errors in the data")
    parser.add_argument("-o", "--output", type=Path, help="write Markdown there, not to stdout")
    arguments = parser.parse_args()
    rows: list[Row] = list_recorded_rows() if arguments.recorded else []
    errors: dict[str, dict[str, dict[str, int]]] = {}
    for case in load_all():
        if arguments.recorded or arguments.only not in str(case):
            continue
        if arguments.fast and case.slow:
            continue
        ours = predict_rows(case)
        rows += ours
        found = {row.figure: row.error_bytes for row in ours if row.error_bytes is not None}
        errors.setdefault(case.source, {})[case.id] = found
        print(case, found or ours[0].failure, file=sys.stderr, flush=True)
    if arguments.record:
        for source, mine in errors.items():
            record_errors(source, mine, torch.__version__)
    traces = write_traces(compare_all(arguments.only))
    text = write_page(rows, traces, write_stamp(COMMAND))
    if arguments.output:
        arguments.output.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
