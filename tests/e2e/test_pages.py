"""Every code block of the documentation runs, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pages import BLOCKS, PAGES, ROOT, Block, list_blocks, list_commands

import fxmem
from benchmarks.cases import import_torchvision
from fxmem.cli import main
from fxmem.cli.shared import step
from fxmem.finding import FINDERS, TEXTS
from fxmem.report.formats import FORMATS

RECORDED_ON = ("AVX512", 2)  # the CPU and the threads of the pages' workspaces
VARIABLES = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Settings that CUDA's numbers depend on besides."""
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

def build():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def make_optimizer(params):
    return torch.optim.AdamW(params, lr=1e-4)

def compute_loss(output):
    labels = torch.zeros(len(output), dtype=torch.int64, device=output.device)
    return F.cross_entropy(output, labels)
"""
PRELUDES = {
    "README.md": """
        from torch import nn

        model = nn.Conv2d(3, 8, 3)
    """,
    "how-it-works.md": """
        import torch
        from torch import nn

        model, inputs, loss_fn = nn.Linear(4, 2), (torch.zeros(3, 4),), torch.sum
        optimizer = torch.optim.Adam(model.parameters())
    """,
    "findings.md": """
        import torch
        from torch import nn
        from torch.nn import functional as F
        from torch.utils.checkpoint import checkpoint

        class Model(nn.Linear):
            def forward(self, x=None, input_ids=None, use_cache=True):
                return super().forward(x if input_ids is None else input_ids)

        model, head, eps, dim, losses = Model(16, 16), nn.Linear(16, 64), 1e-6, 16, []
        hidden, targets = torch.randn(2, 8, 16), torch.zeros(2, 8, dtype=torch.int64)
        x, y, ids, weight = *torch.zeros(3, 8, 16), torch.ones(16)
        query = key = value = torch.randn(2, 4, 8, 16)
        batches, conv, norm = [x, x], nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        layers = run_layers = nn.Sequential(nn.Identity())
    """,
    "refusals.md": """
        import torch
        from types import SimpleNamespace as Namespace

        self, x = Namespace(head=torch.nn.Linear(64, 64)), torch.zeros(32, 64)
    """,
}
"""Names that the Python of a page takes for granted."""
UNMARKED = {"torch.OutOfMemoryError:", "fxmem", "fxmem.analyze(model,"}
"""First words of texts that are no output: an error to start from, and signatures."""
PICTURES = (b"<?xml", b"\x89PNG", b"<!doctype html>", b"\x80\x04")
"""First bytes of the files that fxmem render writes."""
SETTING_UP = re.compile(r"python3 -m venv \S+|pip install \.|python -m pytest -n 2")
"""Commands that .ci/run runs, or that are of their kind."""

SHOWN = [
    (block, *block.mark.split(": ", 1))
    for block in BLOCKS
    if block.mark.startswith(("output of: ", "first line of: ", "fails: "))
]
COMMANDS = {
    *(c for block in BLOCKS if block.language == "bash" for c in list_commands(block)),
    *(
        line
        for path in ROOT.glob("examples/*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
    ),
}
UNSHOWN = {c for c in COMMANDS if c.startswith("fxmem ")} - {command for _, _, command in SHOWN}


SCRIPT = """
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    model(torch.ones(4, 8).cuda()).sum().backward()
    optimizer.step()
"""
"""A script of the user's, which takes any arguments."""


def is_exact(command: str) -> bool:
    """Tells whether a command prints the same here as where the pages were written."""
    if command.startswith(("fxmem plan", "fxmem verify")):  # random choices, and times
        return False
    if "--device cpu" not in command:
        return True
    return (torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()) == RECORDED_ON


ANALYZED: dict[str, fxmem.Analysis] = {}


def analyze_once(*args: Any, **options: Any) -> fxmem.Analysis:
    """Commands about one step share its analysis."""
    key = repr((args, options))
    if key not in ANALYZED:
        ANALYZED[key] = fxmem.analyze(*args, **options)
    return ANALYZED[key]


@pytest.fixture
def workplace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """A folder as the pages take it for granted, and their width of a terminal."""
    if not request.config.getoption("--overwrite"):
        request.getfixturevalue("quick_search")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    project = next(b for b in BLOCKS if (b.page.name, b.language) == ("ci.md", "toml"))
    (tmp_path / "pyproject.toml").write_text(project.text)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "model.py").write_text(MODEL)
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/train.py"):
        (tmp_path / name).write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(step, "fxmem", types.SimpleNamespace(analyze=analyze_once))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with mock.patch.dict(FORMATS), mock.patch.dict(FINDERS), mock.patch.dict(TEXTS):
        yield tmp_path


Result = tuple[int, str, str]
RAN: dict[str, tuple[Result, dict[str, bytes]]] = {}
"""By command, its exit code, stdout and stderr, and what it wrote: each is run once."""


def run(command: str) -> Result:
    """Exit code, stdout and stderr of an fxmem command, run in this process."""
    if command not in RAN:
        result = run_anew(command)
        paths = re.findall(r"-o (\S+)", command)
        RAN[command] = result, {path: Path(path).read_bytes() for path in paths}
    result, written = RAN[command]
    for path, data in written.items():
        Path(path).write_bytes(data)
    return result


def run_anew(command: str) -> Result:
    """Runs a command after those that write the files that it reads."""
    program, *arguments = shlex.split(command)
    assert program == "fxmem"
    step = "fxmem plan examples/unet.py:UNet --input 4x3x256x256 --optimizer adamw"
    if arguments[0] == "verify":
        step = command.partition(" --plan ")[0].replace("verify", "plan", 1)
    elif arguments[0] == "render" and arguments[1].endswith(".json"):
        assert run(f"{step.replace('plan', 'analyze', 1)} --json -o {arguments[1]}")[0] == 0
    if "--plan" in arguments:
        assert run(f"{step} --max-overhead 10% -o plan.json")[0] == 0
    if "hugging_face" in command:
        pytest.importorskip("transformers")
        import_torchvision()  # transformers looks for it
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


def check(block: Block, output: str, request: pytest.FixtureRequest, is_exact: bool) -> None:
    """Compares what a block shows with what came out, or writes it there with --overwrite.

    On the CPU, another machine's convolutions allocate other workspaces, and the peak may lie
    elsewhere: there the shape of the output is compared.
    """
    if request.config.getoption("--overwrite"):
        if block.text != output:
            block.rewrite(output)
    elif is_exact:
        assert output == block.text
    else:
        words = [re.findall(r"^[a-zA-Z]+", text, re.MULTILINE) for text in (output, block.text)]
        assert words[0][:1] == words[1][:1]


@pytest.mark.usefixtures("workplace")
@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # torchrun, without a file
@pytest.mark.parametrize("command", sorted(c for c in UNSHOWN if "--version" not in c))
def test_every_command_works(command: str) -> None:
    code, out, err = run(command)
    assert (code, err) == (0, "")
    written = re.search(r"-o (\S+)", command)
    if command.startswith("fxmem render") or (written and command.startswith("fxmem run")):
        assert written and Path(written[1]).read_bytes().startswith(PICTURES)
        return
    result = Path(written[1]).read_text(encoding="utf-8") if written else out
    is_json = "--json" in command or (command.startswith("fxmem plan") and written)
    firsts = {"verify": "Equal ", "fit": "Fits ", "batches": "Batch "}
    first = firsts.get(command.split()[1], "Peak ")
    assert result.startswith("{" if is_json else first)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_no_block_goes_unchecked(block: Block) -> None:
    if block.language == "bash":
        for line in list_commands(block):
            assert line.startswith("fxmem ") or SETTING_UP.fullmatch(line), line
    elif block.language == "text":
        is_output = block in [shown for shown, _, _ in SHOWN] or block.mark == "prints"
        assert is_output or block.text.split()[0] in UNMARKED
    else:
        assert block.language in ("python", "mermaid", "toml", "yaml")


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(("block", "kind", "command"), SHOWN, ids=str)
def test_what_is_shown_is_what_comes_out(
    block: Block, kind: str, command: str, request: pytest.FixtureRequest
) -> None:
    code, out, err = run(command)
    if kind == "fails":
        assert (code, out) == (2, "")
        check(block, err, request, is_exact=True)
        return
    assert (code, err) == (0, "")
    shown = out if kind == "output of" else out.splitlines(keepends=True)[0]
    check(block, shown, request, is_exact(command))


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(b.language == "python" for b in list_blocks(page))],
    ids=lambda page: page.name,
)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, request: pytest.FixtureRequest
) -> None:
    namespace: dict[str, Any] = {}
    exec(PRELUDES.get(page.name, "").replace("\n        ", "\n"), namespace)
    printed = ""
    for block in list_blocks(page):
        if block.mark == "prints":
            check(block, printed, request, is_exact=True)
        if block.language != "python" or block.mark:
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block.text, str(block), "exec"), namespace)
        printed = out.getvalue()


def test_the_readme_sets_up_once_and_shows_the_command_that_it_sets_up_for() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if re.match(r"python3 -m venv .*pytest", line)]) == 1
    blocks = list_blocks(ROOT / "README.md")
    (sample,) = (block for block in blocks if block.mark.startswith("output of: "))
    assert sample.mark.removeprefix("output of: ") == list_commands(blocks[0])[0]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.mark == "a file for pytest"], ids=str)
def test_the_recipe_for_pytest_is_one(block: Block, workplace: Path) -> None:
    (workplace / "test_memory.py").write_text(block.text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "_fxmem_pytest_plugin", "test_memory.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^=+ [1-9] passed in ", done.stdout, re.MULTILINE)
