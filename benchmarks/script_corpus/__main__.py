"""Runs public training scripts, unchanged, under ``fxmem run``, and writes the page of results.

    python -m benchmarks.script_corpus --sources DIR [--only NAME ...] [-o docs/results/scripts.md]

DIR has a folder for each repository: a checkout, or files with the commit in a file COMMIT. What
is not there, or at another commit, is skipped. Nothing is downloaded: data sets, tokenizers and
models are made up. Scripts whose packages are not installed end in the line that says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.script_corpus.launches import LAUNCHES
from benchmarks.script_corpus.page import write_page
from benchmarks.script_corpus.runner import Data, Outcome, find_sources, measure_launch, run_launch
from benchmarks.stamp import write_stamp


def main() -> None:
    """Runs the launches and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--data", type=Path, help="keep the made-up data here")
    parser.add_argument("--results", type=Path, help="keep results here, and run what has none")
    parser.add_argument("--timeout", type=float, default=120, metavar="S")
    parser.add_argument("--cpu", action="store_true", help="compare steps with real ones as well")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Outcome] = {}
    if arguments.results and arguments.results.exists():
        rows = json.loads(arguments.results.read_text())
        found = {name: Outcome(**row) for name, row in rows.items()}
    with tempfile.TemporaryDirectory() as temporary:
        data = Data(arguments.data or Path(temporary))
        for launch in LAUNCHES:
            source = find_sources(launch, arguments.sources)
            is_asked = launch.name in (arguments.only or [launch.name])
            outcome = found.get(launch.name)
            if source is None or not is_asked:
                continue
            if outcome is None or arguments.only:
                outcome = run_launch(launch, source, data, arguments.timeout)
            if launch.cpu is not None and arguments.cpu and outcome.peaks and not outcome.measured:
                outcome = measure_launch(launch, source, data, outcome, arguments.timeout)
            found[launch.name] = outcome
            peaks = [f"{peak / 2**20:,.1f}" for peak in outcome.peaks]
            print(f"{launch.name}: {peaks or outcome.line} {outcome.seconds:.0f} s", flush=True)
            if arguments.results:
                saved = {name: asdict(row) for name, row in found.items()}
                arguments.results.write_text(json.dumps(saved, indent=1))
    page = write_page(found, write_stamp("python -m benchmarks.script_corpus --sources DIR --cpu"))
    if arguments.output:
        arguments.output.write_text(page)
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main()
