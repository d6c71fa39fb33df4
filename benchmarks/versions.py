"""Holds fxmem to PyTorch's own measurements under each supported release of torch.

    python -m benchmarks.versions [--only RELEASE ...] [--short] [-o docs/results/versions.md]

Each release has an environment of its own, with libraries of its time, in the folder that the
variable FXMEM_ENVIRONMENTS names, else in a temporary one; what is there is not installed again.
The wheels of a release that is not installed here bring CUDA's libraries, 3 GB to download.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tabulate import tabulate

from benchmarks.stamp import write_stamp

if TYPE_CHECKING:
    from benchmarks.published.traces import Comparison

COMMAND = "python -m benchmarks.versions -o docs/results/versions.md"
FOLDER_VARIABLE = "FXMEM_ENVIRONMENTS"
ROOT = Path(__file__).parents[1]

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


@dataclass(frozen=True)
class Environment:
    """A release of torch, and what is installed beside it.

    Attributes:
        release: Major and minor number, as in ``2.6``.
        month: In which it came out; figures published later were measured with it or an older one.
        torch: Version.
        packages: Libraries of models, with the versions of that time.
    """

    release: str
    month: str
    torch: str
    packages: tuple[str, ...]


def _describe(release: str, month: str, torch: str, vision: str, hf: str, timm: str) -> Environment:
    names = (f"torchvision=={vision}", f"transformers=={hf}", f"timm=={timm}")
    return Environment(release, month, torch, names)


ENVIRONMENTS = [
    _describe("2.6", "2025-01", "2.6.0", "0.21.0", "4.49.0", "1.0.15"),
    _describe("2.8", "2025-08", "2.8.0", "0.23.0", "4.55.4", "1.0.19"),
    _describe("2.9", "2025-10", "2.9.1", "0.24.1", "4.57.1", "1.0.20"),
    _describe("2.10", "2026-01", "2.10.0", "0.25.0", "4.57.6", "1.0.24"),
    _describe("2.11", "2026-03", "2.11.0", "0.26.0", "5.3.0", "1.0.25"),
    _describe("2.12", "2026-05", "2.12.1", "0.27.1", "5.23.0", "1.0.31"),
    _describe("2.13", "2026-07", "2.13.0", "0.28.0", "5.23.0", "1.0.31"),
]


@dataclass(frozen=True)
class Result:
    """All that was held to one release.

    Attributes:
        torch: Version and build.
        python: Version.
        rows: Models times modes whose accuracy was measured.
        exact: Of them, those whose tensors' peak is the measured one, to the byte.
        allocator: Those whose peak is that of the allocator's events, to the byte.
        saved: Those for which autograd saves what was predicted.
        flops: Those whose FLOPs are those of ``torch.utils.flop_counter``.
        plans: Applied plans.
        equal: Of them, those that changed no bit.
        figures: Published figures that were measured with this release, or at its time.
        matching: Of them, those that were predicted, to the KiB.
        events: Allocations and frees of published traces that were recorded with this release.
        same: Of them, those that are predicted in their order and size.
        differences: What is not exact or equal, in words.
    """

    torch: str
    python: str
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

    @property
    def is_good(self) -> bool:
        """Tells whether all of it holds that has to hold."""
        return self.rows == self.exact == self.saved and self.plans == self.equal > 0


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
    figures = [] if is_short else list(compare_published(release))
    differences += [text for text, is_equal in figures if not is_equal]
    traces = [] if is_short else list(compare_traces(release))
    return Result(
        torch=torch.__version__,
        python=".".join(map(str, sys.version_info[:2])),
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
    )


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


def prepare_environment(environment: Environment, folder: Path) -> Path:
    """Installs an environment unless it is there, and returns its Python."""
    if environment.torch == torch.__version__.split("+")[0]:
        return Path(sys.executable)
    home = folder / f"torch-{environment.torch}"
    python, done = home / "bin" / "python", home / "complete"
    if not done.exists():
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        needed = importlib.metadata.requires("fxmem") or []
        own = [entry for entry in needed if "extra ==" not in entry and "torch" not in entry]
        torch_itself = f"torch=={environment.torch}"
        subprocess.run([*install, torch_itself, *environment.packages, *own], check=True)
        done.touch()
        print(f"{home}: {time.perf_counter() - start:.0f} s to install", file=sys.stderr)
    return python


def measure_in(python: Path, environment: Environment, is_short: bool) -> Result:
    """Measures under another Python, which has the release."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [python, "-m", "benchmarks.versions", "--here", environment.release, "-o", output]
        command += ["--short"] if is_short else []
        subprocess.run(list(map(str, command)), check=True, cwd=ROOT)
        fields: dict[str, Any] = json.loads(output.read_text())
    return Result(**{**fields, "differences": tuple(fields["differences"])})


def write_page(results: Sequence[Result]) -> str:
    """Writes the page, as Markdown."""
    table = [
        {
            "torch": r.torch,
            "Python": r.python,
            "tensors to the byte": f"{r.exact}/{r.rows}",
            "allocator to the byte": f"{r.allocator}/{r.rows}",
            "saved sets equal": f"{r.saved}/{r.rows}",
            "FLOPs equal": f"{r.flops}/{r.rows}",
            "plans bit-equal": f"{r.equal}/{r.plans}",
            "published figures": f"{r.matching}/{r.figures}" if r.figures else "-",
            "events of traces": f"{r.same:,}/{r.events:,}" if r.events else "-",
        }
        for r in results
    ]
    parts = [
        "# Releases of torch",
        write_stamp(COMMAND),
        LEGEND.strip(),
        tabulate(table, "keys", "github", disable_numparse=True),
    ]
    for result in results:
        if result.differences:
            lines = "\n".join(f"- {text}" for text in result.differences)
            parts.append(f"## Differences with {result.torch}\n\n{lines}")
    return "\n\n".join(parts) + "\n"


LEGEND = f"""
Each release ran in an environment of its own, with transformers, timm and torchvision of its time.
Predictions are held to measurements of that release.

- tensors, allocator, saved sets, FLOPs: {len(ACCURACY)} models, each trained without and with Adam,
  and run for inference, held to the second real step on the CPU: the peak of tensors' bytes, that
  of the CPU profiler's allocation events, what `saved_tensors_hooks` see, and
  `torch.utils.flop_counter`.
- plans: of {len(EQUIVALENCE)} models, applied and held against the plain model over three steps,
  bit by bit.
- published figures: measured on GPUs by others, with that release or, where none was named, in the
  months in which it was the newest of these; equal to the KiB. All figures, predicted under the
  newest release, have [a page of their own](cuda.md).
- events of traces: allocations and frees of whole steps, recorded on GPUs by others with that
  release, that are predicted one by one.
"""


@contextmanager
def _open_folder() -> Iterator[Path]:
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        yield Path(named)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


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
    results = []
    with _open_folder() as folder:
        for environment in ENVIRONMENTS:
            if options.only is None or environment.release in options.only:
                python = prepare_environment(environment, folder)
                results.append(measure_in(python, environment, options.short))
    page = write_page(results)
    if options.output is None:
        print(page)
    else:
        options.output.write_text(page)
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
