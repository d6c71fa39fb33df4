"""Holds fxmem to PyTorch's own measurements under each supported release of torch.

    python -m benchmarks.versions --short -o docs/results/versions.md
    python -m benchmarks.versions [--only RELEASE ...] -o docs/results/versions-in-full.md

Each release runs in an environment of its own (environments.py). The results are also written as
JSON beside the page, which has those of earlier calls for the releases that are not measured anew.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tabulate import tabulate

from benchmarks.environments import (
    ENVIRONMENTS,
    ROOT,
    Environment,
    look_up_in_first,
    open_folder,
    prepare_environment,
)
from benchmarks.stamp import write_time

if TYPE_CHECKING:
    from benchmarks.published.traces import Comparison


ACCURACY = """
    resnet18 frozen_resnet18 input_grad_resnet18 mobilenet_v3_small shufflenet_v2 squeezenet
    regnet_y_400mf swin_t vit_b_16 unet timm_mixer timm_mobilevit hf_bert hf_gpt2_labels
    hf_llama_labels hf_t5 hf_whisper lstm gru_bidirectional hand_rolled_rnn transformer_encoder
    transformer_pre_norm norms low_precision embedding_bag inplace custom_function
    checkpoint_non_reentrant dict_output mixture_of_experts reused_module tied_weights views
""".split()
EQUIVALENCE = """
    resnet18 efficientnet_b0 vision_transformer timm_test_convnext hf/gpt2 hf/llama hf/bert hf/t5
    lstm transformer_encoder
""".split()
SHORT_ACCURACY = ["resnet18", "hf_bert", "lstm", "transformer_encoder"]
SHORT_EQUIVALENCE = ["resnet18", "lstm"]
COMPILED = ["tied_weights", "reused_module", "checkpoint_non_reentrant"]


@dataclass(frozen=True)
class Result:
    """All that was held to one release.

    Attributes:
        torch: Version and build.
        python: Version.
        measured: The commit and the date.
        names: How many private names of torch fxmem relies on in this release.
        wrong: Names that are missing, or are there in a release that should lack them, in words.
        rows: Models times modes whose accuracy was measured.
        exact: Of them, those whose tensors' peak is the measured one, to the byte.
        allocator: Those whose peak is that of the allocator's events, to the byte.
        saved: Those for which autograd saves what was predicted.
        flops: Those whose FLOPs are those of ``torch.utils.flop_counter``.
        plans: Applied plans.
        equal: Of them, those that changed no bit.
        compiled: Models times modes that inductor compiled for the CPU.
        compiled_exact: Of them, those whose peak is that of the allocator's events.
        figures: Published figures that were measured with this release, or at its time.
        matching: Of them, those that were predicted, to the KiB.
        events: Allocations and frees of published traces that were recorded with this release.
        same: Of them, those that are predicted in their order and size.
        differences: What is not exact or equal, in words.
    """

    torch: str
    python: str
    measured: str
    names: int
    wrong: tuple[str, ...]
    rows: int
    exact: int
    allocator: int
    saved: int
    flops: int
    plans: int
    equal: int
    figures: int
    matching: int
    events: int
    same: int
    differences: tuple[str, ...]
    compiled: int = 0
    compiled_exact: int = 0

    @property
    def is_good(self) -> bool:
        """Tells whether all of it holds that has to hold."""
        is_proven = self.rows == self.exact == self.saved and self.plans == self.equal > 0
        return is_proven and self.compiled == self.compiled_exact and not self.wrong


def look_up_names() -> tuple[int, tuple[str, ...]]:
    """Looks up the private names in the torch that is running.

    Returns how many should be there, and in words what is wrong with any.
    """
    from fxmem.versions.interfaces import INTERFACES, find_missing, find_owner
    from fxmem.versions.release import is_release

    due = [each for each in INTERFACES if is_release(each.since, each.before)]
    early = [
        f"{each.owner}.{name} is there"
        for each in INTERFACES
        if each not in due
        for name in each.names
        if hasattr(find_owner(each.owner), name)
    ]
    missing = [f"{name} is missing" for name in find_missing()]
    wrong = tuple(f"{torch.__version__}: {text}" for text in (*missing, *early))
    return sum(len(each.names) for each in due), wrong


def measure_here(release: str, is_short: bool) -> Result:
    """Measures under the torch that is running."""
    from benchmarks import equivalence
    from benchmarks.accuracy import compare, percent
    from benchmarks.cases import import_torchvision
    from benchmarks.equivalence_cases import CASES
    from benchmarks.measure import THREADS, measured
    from benchmarks.models import find
    from benchmarks.step import MODES

    torch.set_num_threads(THREADS)
    import_torchvision()
    rows, differences = [], []
    names, wrong = look_up_names()
    for name in SHORT_ACCURACY if is_short else ACCURACY:
        for mode in MODES:
            rows.append(row := compare(find(name), mode, measured(name, mode)))
            print(release, name, mode, percent(row.tensor_error), file=sys.stderr, flush=True)
            if row.tensor_error or row.tensor_error is None or not row.saved_equal:
                notes = "; ".join(row.notes)
                differences.append(f"{name} {mode}: tensors {percent(row.tensor_error)} % {notes}")
    torch.set_num_threads(equivalence.THREADS)
    plans = equal = 0
    for case in CASES:
        if case.name not in (SHORT_EQUIVALENCE if is_short else EQUIVALENCE):
            continue
        for held in equivalence.run_case(case):
            plans, equal = plans + int(held["plans"]), equal + int(held["equal"])
            print(release, case.name, held, file=sys.stderr, flush=True)
            if held["plans"] != held["equal"] or held["plans"] == "0":
                differences.append(f"{case.name}, {held['style']}: {held['note']}")
    compiled = list(compare_compiled(COMPILED[:1] if is_short else COMPILED))
    differences += [f"{row[0]} compiled, {row[1]}: {row[5:]}" for row in compiled if row[5] != "0"]
    figures = [] if is_short else list(compare_published(release))
    differences += [text for text, is_equal in figures if not is_equal]
    traces = [] if is_short else list(compare_traces(release))
    return Result(
        torch=torch.__version__,
        python=".".join(map(str, sys.version_info[:2])),
        measured=write_time(),
        names=names,
        wrong=wrong,
        rows=len(rows),
        exact=sum(row.tensor_error == 0 for row in rows),
        allocator=sum(row.allocator_error == 0 for row in rows),
        saved=sum(row.saved_equal is True for row in rows),
        flops=sum(bool(row.forward_equal and row.backward_equal) for row in rows),
        plans=plans,
        equal=equal,
        figures=len(figures),
        matching=sum(is_equal for _, is_equal in figures),
        events=sum(comparison.measured for comparison in traces),
        same=sum(comparison.common for comparison in traces),
        differences=tuple(differences),
        compiled=len(compiled),
        compiled_exact=sum(row[5] == "0" for row in compiled),
    )


def compare_compiled(names: Sequence[str]) -> Iterator[list[Any]]:
    """Compares steps with those that inductor compiles for the CPU; rows of that page's table."""
    from benchmarks.compiled import compare, run_apart
    from benchmarks.step import MODES

    for name in names:
        real, ours = (run_apart(what, name, anew=True) for what in ("measure", "predict"))
        yield from (compare(name, mode, real[mode], ours[mode]) for mode in MODES)


def compare_published(release: str) -> Iterator[tuple[str, bool]]:
    """Compares published figures of a release: each in words, and whether it was predicted.

    A figure that names no release counts for the newest one that was out in its month.
    """
    from benchmarks.published.cases import is_equal, load_all
    from benchmarks.published.predicting import predict

    for case in load_all():
        if find_release(case.torch) != release:
            continue
        try:
            predicted = predict(case)
        except Exception as error:  # one that fails is a line, not the end
            yield f"{case}: {type(error).__name__}: {str(error)[:160]}", False
            continue
        for name, nbytes in case.measured.items():
            error_bytes = predicted[name] - nbytes
            cause = f" ({case.cause})" if case.cause else ""
            text = f"{case}, {name}: {error_bytes:+,} of {nbytes:,} bytes{cause}"
            yield text, is_equal(case, error_bytes)


def compare_traces(release: str) -> Iterator[Comparison]:
    """Compares published traces of a release, each event with the prediction."""
    from benchmarks.published.cases import load_all
    from benchmarks.published.traces import compare_case

    for case in load_all():
        if "trace" in case.config and find_release(case.torch) == release:
            yield compare_case(case)


def find_release(text: str) -> str | None:
    """Finds the release that a figure was measured with, as far as it is known."""
    named = re.match(r"(\d+\.\d+)(\.\d+)?$", text)
    if named:
        return named[1]
    month = re.search(r"measured (\d{4}-\d{2})", text)
    known = [e.release for e in ENVIRONMENTS if month is not None and e.month <= month[1]]
    return known[-1] if known else None


def measure_in(python: Path, environment: Environment, is_short: bool) -> Result:
    """Measures under another Python, which has the release."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [python, "-m", "benchmarks.versions", "--here", environment.release, "-o", output]
        command += ["--short"] if is_short else []
        subprocess.run(list(map(str, command)), check=True, cwd=ROOT)
        fields: dict[str, Any] = json.loads(output.read_text())
    fields["wrong"] += look_up_in_first(python, environment)
    return _make_result(fields)


def _make_result(fields: dict[str, Any]) -> Result:
    lists = {name: tuple(fields[name]) for name in ("wrong", "differences")}
    return Result(**{**fields, **lists})


def load_results(path: Path) -> dict[str, Result]:
    """Loads what earlier calls measured, by release; nothing where there is no such file."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return {release: _make_result(fields) for release, fields in found.items()}


def write_page(results: Sequence[Result], is_short: bool) -> str:
    """Writes the page, as Markdown."""
    command = "python -m benchmarks.versions" + (" --short" if is_short else "")
    table = [
        {
            "torch": r.torch,
            "Python": r.python,
            **({"private names": f"{r.names}, {len(r.wrong)} wrong"} if is_short else {}),
            "tensors to the byte": f"{r.exact}/{r.rows}",
            "allocator to the byte": f"{r.allocator}/{r.rows}",
            "saved sets equal": f"{r.saved}/{r.rows}",
            "FLOPs equal": f"{r.flops}/{r.rows}",
            "plans bit-equal": f"{r.equal}/{r.plans}",
            "compiled steps": f"{r.compiled_exact}/{r.compiled}" if r.compiled else "-",
            **({} if is_short else _write_published(r)),
            "measured at": r.measured,
        }
        for r in results
    ]
    parts = [
        "# Releases of torch" + ("" if is_short else ", in full"),
        f"`{command}`, each release at the commit and on the date in its row, on the CPU.",
        _write_legend(is_short),
        tabulate(table, "keys", "github", disable_numparse=True),
    ]
    for result in results:
        if result.differences or result.wrong:
            lines = "\n".join(f"- {text}" for text in (*result.wrong, *result.differences))
            parts.append(f"## Differences with {result.torch}\n\n{lines}")
    return "\n\n".join(parts) + "\n"


def _write_published(result: Result) -> dict[str, str]:
    return {
        "published figures": f"{result.matching}/{result.figures}" if result.figures else "-",
        "events of traces": f"{result.same:,}/{result.events:,}" if result.events else "-",
    }


def _write_legend(is_short: bool) -> str:
    models, planned = (SHORT_ACCURACY, SHORT_EQUIVALENCE) if is_short else (ACCURACY, EQUIVALENCE)
    compiled = 1 if is_short else len(COMPILED)
    legend = LEGEND.format(models=len(models), planned=len(planned), compiled=compiled)
    return legend.strip() + (NAMES if is_short else PUBLISHED).rstrip()


LEGEND = """
Each release ran in an environment of its own, with transformers, timm and torchvision of its time.
Predictions are held to measurements of that release.

- tensors, allocator, saved sets, FLOPs: {models} models, each trained without and with Adam,
  and run for inference, held to the second real step on the CPU: the peak of tensors' bytes, that
  of the CPU profiler's allocation events, what `saved_tensors_hooks` see, and
  `torch.utils.flop_counter`.
- plans: of {planned} models, applied and held against the plain model over three steps,
  bit by bit.
- compiled steps: {compiled} of the models, compiled by inductor for the CPU, held to the profiler's
  events of the third step.
"""
NAMES = """
- private names: [those](../private-interfaces.md) that fxmem relies on in that release, looked up
  in its last patch and in its first; one is wrong that is missing, or that is there in a release
  that should lack it.

More models and published figures are on [a page of their own](versions-in-full.md).
"""
PUBLISHED = """
- published figures: measured on GPUs by others, with that release or, where none was named, in the
  months in which it was the newest of these; equal to the KiB. All figures, predicted under the
  newest release, have [a page of their own](cuda.md).
- events of traces: allocations and frees of whole steps, recorded on GPUs by others with that
  release, that are predicted one by one.

[Fewer models](versions.md) ran under every release, in one go.
"""


def main() -> int:
    """Measures under all releases, and prints the page or writes it; 1 where a proof fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    releases = [environment.release for environment in ENVIRONMENTS]
    parser.add_argument(
        "--only", nargs="+", choices=releases, metavar="RELEASE", help="these alone"
    )
    parser.add_argument("--short", action="store_true", help="a few models, for CI")
    parser.add_argument("--here", metavar="RELEASE", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, help="write there, not to stdout")
    options = parser.parse_args()
    if options.here:
        warnings.simplefilter("ignore")  # the models' own
        result = measure_here(options.here, options.short)
        options.output.write_text(json.dumps(asdict(result)))
        return 0
    store = options.output and options.output.with_suffix(".json")
    results, measured = load_results(store) if store else {}, []
    for environment in ENVIRONMENTS:
        if options.only is None or environment.release in options.only:
            with open_folder() as folder:
                python = prepare_environment(environment, folder)
                result = measure_in(python, environment, options.short)
            results[environment.release] = result
            measured.append(result)
            if store:  # after each, as a later one may fail
                store.write_text(json.dumps({k: asdict(v) for k, v in results.items()}, indent=1))
    known = [results[release] for release in releases if release in results]
    page = write_page(known, options.short)
    if options.output is None:
        print(page)
    else:
        options.output.write_text(page)
    return 0 if all(result.is_good for result in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
