"""The guide to CUDA says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.cuda_accuracy import DATA, list_measurements
from benchmarks.cuda_cases import CUDA_CASES
from benchmarks.published.page import list_recorded_rows
from fxmem.analysis import Analysis
from fxmem.gpus import CONTEXT_BYTES, GPUS
from fxmem.kernels.cuda.gpu import Gpu, use_gpu
from fxmem.kernels.cuda.linear import cublas_workspace_bytes

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")
GIB, MIB = 2**30, 2**20


def test_every_gpu_is_listed_with_its_memory() -> None:
    rows = GUIDE.split("\n## GPUs\n")[1].strip().splitlines()
    listed = [row for row in rows if row.startswith("| `") and "gpu=" not in row]
    assert listed == [
        f"| `{gpu.key}` | {gpu.name} | {'.'.join(map(str, gpu.capability))} | "
        f"{gpu.capacity_bytes / GIB:.2f} GiB{'' if gpu.capacity_is_measured else ' (not seen)'} |"
        for gpu in GPUS
    ]


def test_every_number_is_one_of_an_analysis() -> None:
    section = GUIDE.split("\n## The numbers\n")[1].split("\n## ")[0]
    names = re.findall(r"^\| [^|]*\| `(\w+)` \|", section, re.MULTILINE)
    assert len(names) == 5
    assert {name for name in names if not hasattr(Analysis, name)} == set()


def test_sizes_are_those_of_the_code() -> None:
    least, most = (nbytes // MIB for nbytes in CONTEXT_BYTES)
    assert f"{least} to {most} MiB of CUDA context" in GUIDE
    assert f"if the CUDA context takes {least} MiB, not if it takes {most} MiB" in GUIDE
    with use_gpu(Gpu(capability=(9, 0))):
        assert f"{cublas_workspace_bytes() // MIB} MiB from Hopper (9.0) on" in GUIDE
    assert f"else {cublas_workspace_bytes() / MIB} MiB" in GUIDE
    version = Gpu().cudnn_version
    assert f"A cuDNN of {version // 10000}.{version // 100 % 100} is taken" in GUIDE
    assert f"measures {len(CUDA_CASES)} steps" in GUIDE


def test_the_guide_says_that_no_gpu_was_there_while_none_was() -> None:
    measured = list_measurements(ROOT / DATA)
    assert ("The project itself has had no GPU yet" in GUIDE) == (not measured)


def test_the_readme_counts_published_measurements_as_they_are_recorded() -> None:
    rows = list_recorded_rows()
    stated = [row for row in rows if row.case.configuration == "stated"]
    sizes = [row for row in stated if row.measure != "reserved"]
    ours = [row for row in sizes if row.group == "stated"]
    equal = sum(row.is_equal for row in ours)
    reserved = [row for row in rows if row.measure == "reserved"]
    low = [row for row in reserved if row.relative < 0 and not row.is_equal]
    worst = min(row.relative for row in stated)
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for claim in (
        f"[{len(rows):,} figures of {len({row.case.repository for row in rows})} publications]",
        f"Of {len(ours)} allocated and requested figures whose configuration is wholly stated, "
        f"{equal} ({100 * equal / len(ours):.0f} %) are equal to the KiB.",
        f"{len(sizes) - len(ours)} more were measured with a torch version that allocates "
        "differently",
        f"low by {-100 * worst:.0f} % for a convolution of four channels",
        f"Of {len(reserved)} figures of reserved memory "
        f"{sum(row.is_equal for row in reserved)} are "
        f"equal, and {len(low)} are predicted too low, by "
        f"{-100 * min(row.relative for row in low):.0f} % at most",
    ):
        assert claim in text
