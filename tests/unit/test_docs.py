"""The documentation says what the code does."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hand_made import add_first_step, make_analysis, make_graph
from hand_made_plans import make_plan, make_verification

import fxmem
from benchmarks.cuda_accuracy import DATA, list_measurements
from benchmarks.cuda_cases import CUDA_CASES
from benchmarks.published.page import list_recorded_rows
from fxmem import analyze
from fxmem.analysis import Analysis
from fxmem.batching.largest import MaxBatch
from fxmem.cli import COMMANDS, _build_parser
from fxmem.comparison.changes import Change
from fxmem.comparison.comparison import Comparison
from fxmem.finding import Finding
from fxmem.fitting.meshes import Fitting, MeshFit
from fxmem.gpus import CONTEXT_BYTES, GPUS, NCCL_BYTES
from fxmem.graph import Category, Phase
from fxmem.kernels.cuda.gpu import Gpu, use_gpu
from fxmem.kernels.cuda.linear import cublas_workspace_bytes
from fxmem.memory.liveness import Peak
from fxmem.memory.module_tree import Module
from fxmem.pipelines.pipeline import Pipeline, RankMemory, StageMemory
from fxmem.planning.plan import Plan, Segment
from fxmem.report.json_report import list_finding
from fxmem.report.result import Result
from fxmem.training.losses import LOSSES
from fxmem.training.optimizers import OPTIMIZERS
from fxmem.verifying.verification import Difference, Kind, Promise, Verification

ROOT = Path(__file__).parents[2]
JSON_DOC = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
CLI_DOC = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
API_DOC = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")
GIB, MIB = 2**30, 2**20
STEP = CLI_DOC.split("## The step")[1].split("## The result")[0]


def make_examples() -> dict[str, Any]:
    """An object of each kind by its title in the page on JSON, with the marks of the title."""
    result = make_analysis(add_first_step(make_graph(), 1)).to_dict()
    plan = json.loads(make_plan().to_json())
    verification = make_verification(
        differences=(Difference(1, Kind.LOSS, "loss"),), promise=Promise(1, True, 0.0, True)
    ).to_dict()
    return {
        "## analysis": result,
        "## peak": result["peak"],
        "## first_step": result["first_step"],
        "## source": result["peak"]["source"],
        "## nodes": result["nodes"][1],
        "## modules": result["modules"][0],
        "## storages": result["storages"][0],
        "## operations": result["operations"][0],
        "## saved": result["saved"][0],
        "## findings": list_finding(Finding("FX101", "", "", 0, 0, "")),
        "## timeline": result["timeline"],
        "## events": result["timeline"]["events"][0],
        "### plan": plan,
        **{f"### {name}": plan[name][0] for name in ("segments", "inplace", "dels")},
        "### verification": verification,
        "### differences": verification["differences"][0],
        **{f"### {name}": verification[name] for name in ("baseline", "promise")},
        "### comparison": fxmem.diff(make_analysis(), make_analysis()).to_dict(),
    }


def test_every_field_of_the_json_is_documented_in_order() -> None:
    examples = make_examples()
    titles = [title.replace("`", "") for title in re.findall(r"^## `\w+`", JSON_DOC, re.MULTILINE)]
    assert titles == [title for title in examples if title.startswith("## ")]
    for title, example in examples.items():
        level, name = title.split()
        text = JSON_DOC.split(f"\n{level} `{name}`\n")[1].split("\n##")[0]
        assert re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) == list(example), title


def test_every_category_and_phase_is_documented() -> None:
    assert [word for word in [*Category, *Phase] if f"`{word.value}`" not in JSON_DOC] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_documented(command: str) -> None:
    text = CLI_DOC if command == "analyze" else CLI_DOC.split(f"## `fxmem {command}`")[1] + STEP
    help_text = _build_parser()._subparsers._group_actions[0].choices[command].format_help()
    options = set(re.findall(r"--[a-z-]+", help_text)) - {"--help"}
    assert {option for option in options if option not in text} == set()


def list_names(section: str, text: str) -> list[str]:
    """The names in the first column of a section's table."""
    section = re.split(r"\n##+ ", text.split(f"# {section}\n")[1])[0]
    rows = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    return re.findall(r"`(\w[\w-]*)", " ".join(rows))


def test_every_loss_and_optimizer_is_documented() -> None:
    assert set(list_names("Losses", CLI_DOC)) == set(LOSSES)
    assert list_names("Optimizers", CLI_DOC) == list(OPTIMIZERS)


@pytest.mark.parametrize(
    "kind",
    [
        *(Analysis, Peak, Module, Plan, Segment, Finding, Verification, Difference),
        *(Comparison, Change, MaxBatch, Fitting, MeshFit, Pipeline, RankMemory, StageMemory),
    ],
)
def test_every_attribute_is_documented(kind: type) -> None:
    fields = {field.name for field in dataclasses.fields(kind)}
    public = fields | {name for name in vars(kind) if not name.startswith("_")}
    if kind is RankMemory:
        public -= {field.name for field in dataclasses.fields(Analysis)}
    shared = {name for name in vars(Result) if not name.startswith("_")}
    assert set(list_names(f"`{kind.__name__}`", API_DOC)) | shared == public | shared
    assert shared == set(list_names("Every result", API_DOC)) - {"fxmem"}


def test_every_argument_is_documented_in_order() -> None:
    assert list_names("`fxmem.analyze`", API_DOC) == list(inspect.signature(analyze).parameters)
    calls = re.findall(r"^(?:\| `)?fxmem\.(\w+)\((.*?)\)(?:` \||$)", API_DOC, re.M | re.S)
    assert {name for name, _ in calls} >= {
        *("analyze", "plan", "pareto", "apply", "auto", "verify", "advise", "diff"),
        *("max_batch", "pipeline", "fit"),
    }
    for name, arguments in calls:
        shown = inspect.signature(eval(f"lambda {' '.join(arguments.split())}: None"))
        real = inspect.signature(getattr(fxmem, name))
        assert [(p.name, p.kind, p.default) for p in shown.parameters.values()] == [
            (p.name, p.kind, p.default) for p in real.parameters.values()
        ], name


def test_every_public_name_is_documented() -> None:
    names = {*fxmem.__all__} - {"__version__"}
    errors = {name for name in names if name.endswith(("Error", "Warning"))}
    assert {name for name in names if not re.search(rf"\b{name}\b", API_DOC)} == set()
    assert set(list_names("Errors", API_DOC)) == errors - {"FxmemError", "FxmemWarning"}
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: fxmem\.(\w+)$", text, flags=re.MULTILINE))
    assert named >= (names - errors) | {"errors"}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


def test_links_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), (page, link)


def list_anchors(page: Path) -> set[str]:
    """The anchors that mkdocs and GitHub make of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


def test_links_lead_to_headings() -> None:
    dead = [
        (page.name, path, anchor)
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
        for path, anchor in re.findall(
            r"\]\(([^)#:\s]*\.md|)#([^)]+)\)", page.read_text(encoding="utf-8")
        )
        if anchor not in list_anchors(page.parent / path if path else page)
    ]
    assert dead == []


def test_every_folder_is_listed_below_those_that_it_imports_from() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", text.split("## The folders")[1], re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)", row)]
    layers = re.findall(r'^  "([a-z_ |]+)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    ranks = {name: i for i, layer in enumerate(layers) for name in layer.split(" | ")}
    assert set(listed) == ranks.keys() - {"__main__"}
    assert listed == sorted(listed, key=lambda name: -ranks[name])


def test_every_gpu_is_listed_with_its_memory() -> None:
    rows = GUIDE.split("\n## GPUs\n")[1].strip().splitlines()
    listed = [row for row in rows if row.startswith("| `") and "gpu=" not in row]
    assert listed == [
        f"| `{gpu.key}` | {gpu.name} | {'.'.join(map(str, gpu.capability))} | "
        f"{gpu.capacity_bytes / GIB:.2f} GiB{'' if gpu.capacity_is_measured else ' (not seen)'} |"
        for gpu in GPUS
    ]


def test_figures_of_the_guide_are_those_of_the_code() -> None:
    section = GUIDE.split("\n## The numbers\n")[1].split("\n## ")[0]
    names = re.findall(r"^\| [^|]*\| `(\w+)` \|", section, re.MULTILINE)
    assert len(names) == 5 and all(hasattr(Analysis, name) for name in names)
    least, most = (nbytes // MIB for nbytes in CONTEXT_BYTES)
    assert f"{least} to {most} MiB of CUDA context" in GUIDE
    assert f"if the CUDA context takes {least} MiB, not if it takes {most} MiB" in GUIDE
    least_bytes, most_bytes = NCCL_BYTES
    many_gpus = (ROOT / "docs/many-gpus.md").read_text()
    assert f"{least_bytes // MIB} MiB to {most_bytes / GIB} GiB for each group" in many_gpus
    with use_gpu(Gpu(capability=(9, 0))):
        assert f"{cublas_workspace_bytes() // MIB} MiB from Hopper (9.0) on" in GUIDE
    assert f"else {cublas_workspace_bytes() / MIB} MiB" in GUIDE
    version = Gpu().cudnn_version
    assert f"cuDNN {version // 10000}.{version // 100 % 100} is assumed" in GUIDE
    assert f"measures {len(CUDA_CASES)} steps" in GUIDE
    measured = list_measurements(ROOT / DATA)
    assert ("The project itself has not measured on a GPU yet" in GUIDE) == (not measured)


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
