"""`fxmem check` around an analysis that is made by hand."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hand_made import make_analysis, make_graph

import fxmem
from fxmem.cli import main

JSON_DOC = (Path(__file__).parents[3] / "docs" / "json.md").read_text(encoding="utf-8")
PROJECT = """
[tool.fxmem]
optimizer = "adamw"
device = "cpu"

[[tool.fxmem.checks]]
target = "nets/net.py:Net"
input = { ids = "8x128:int64", use_cache = false }
keep_gradients = true
budget = "31MiB"

[[tool.fxmem.checks]]
name = "small"
target = "nets/net.py:Net"
input = ["8x1024", "8"]
optimizer = "sgd"
budget = "BUDGET"
"""


class Project:
    """A folder with two checks; the options of each analysis."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[tuple[Any, ...]] = []
        self.write(PROJECT.replace("BUDGET", "31MiB"))

    def write(self, text: str) -> None:
        (self.folder / "pyproject.toml").write_text(text)

    def analyze(self, target: str, args: Any, kwargs: Any, **options: Any) -> fxmem.Analysis:
        self.calls.append((target, args, kwargs, options))
        if "small" not in (self.folder / "nets" / "net.yaml").read_text():
            raise fxmem.TraceError("no size of nonzero(), net.py:12", hint="give --size-hint")
        graph, net = make_graph(), str(self.folder / "nets" / "net.py")
        nodes = (replace(n, source=n.source and replace(n.source, file=net)) for n in graph.nodes)
        graph = replace(graph, nodes=tuple(nodes))
        return make_analysis(graph, optimizer=options["optimizer"])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "net.yaml").write_text("small")
    project = Project(tmp_path)
    monkeypatch.setattr(fxmem, "analyze", project.analyze)
    monkeypatch.chdir(tmp_path / "nets")
    return project


def test_options_of_the_table_hold_for_all_checks(project: Project) -> None:
    assert main(["check"]) == 0
    first, second = project.calls
    assert [str(spec) for spec in first[2].values()] == ["8x128:int64", "False"]
    assert (first[3]["optimizer"], second[3]["optimizer"]) == ("adamw", "sgd")
    assert (first[3]["device"], first[3]["set_to_none"]) == ("cpu", False)
    assert [str(spec) for spec in second[1]] == ["8x1024:float32", "8:float32"]
    assert os.getcwd() == str(project.folder / "nets")


def test_a_peak_over_its_budget_is_a_finding_with_its_storages(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write(PROJECT.replace("BUDGET", "24MiB"))
    assert main(["check"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 of 2 checks failed"
    assert lines[4] == "nets/net.py:Net  30.00 MiB  31.00 MiB  ok"
    assert lines[5].split("  ")[-1] == "over budget, net.py:12"
    assert lines[7] == (
        "small: Peak 30.00 MiB in backward of block.relu, net.py:12, 6.00 MiB over the budget of "
        "24.00 MiB"
    )
    assert lines[10].split() == [
        *("8.00", "MiB", "PARAMETER", "fc1.weight", "and", "1", "alike", "8x1024", "float32")
    ]


def test_the_others_are_checked_where_one_cannot_be(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    (project.folder / "nets" / "net.yaml").write_text("large")
    (project.folder / "nets" / "net.py").write_text("")
    assert main(["check", "--format", "json"]) == 2
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["verdict"]["rule"] for check in checks] == ["not-analysed"] * 2
    assert checks[-1]["verdict"]["message"] == (
        "small: no size of nonzero(), net.py:12 (give --size-hint)"
    )


def test_quiet_shows_failures_alone(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "-q"]) == 0
    assert capsys.readouterr().out == ""
    project.write(PROJECT.replace("BUDGET", "24MiB"))
    assert main(["check", "-q"]) == 1
    assert "nets/net.py:Net  " not in capsys.readouterr().out


def test_verbose_lists_the_storages_of_every_step(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "-v"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 checks passed\n")
    assert out.count("storage at the peak") == 2


@pytest.mark.parametrize(("format", "start"), [("json", "{"), ("markdown", "### 2 checks passed")])
def test_each_format_is_written(project: Project, format: str, start: str) -> None:
    result = project.folder / "result"
    assert main(["check", "--format", format, "-o", str(result)]) == 0
    assert result.read_text().startswith(start)
    if format == "json":
        checks = json.loads(result.read_text())["checks"]
        documented = JSON_DOC.split("### `checks`")[1]
        assert re.findall(r"^\| `(\w+)` \|", documented, flags=re.MULTILINE) == [*checks[0]]
        assert [check["name"] for check in checks] == ["nets/net.py:Net", "small"]
        assert checks[0]["peak_bytes"] < checks[0]["budget_bytes"]


CHECK = '[[tool.fxmem.checks]]\ntarget = "net.py:Net"\n'
EXAMPLE = "(add [[tool.fxmem.checks]] with target, input and budget)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.black]", f"no pyproject.toml here or above has [tool.fxmem] {EXAMPLE}"),
        ("[tool.fxmem]", f"pyproject.toml: tool.fxmem.checks lists no checks {EXAMPLE}"),
        (
            "[tool.fxmem]\nchecks = ['net.py:Net']",
            f"pyproject.toml: tool.fxmem.checks lists no checks {EXAMPLE}",
        ),
        (
            "[[tool.fxmem.checks]]\ninput = ['3']",
            "pyproject.toml: tool.fxmem.checks[1].target is missing (write path/to/file.py:name)",
        ),
        (
            f"{CHECK}inputs = ['3']",
            "pyproject.toml: tool.fxmem.checks[1].inputs is not known (did you mean input?)",
        ),
        (
            f"{CHECK}{CHECK}input = ['8y3']",
            "pyproject.toml: tool.fxmem.checks[2].input: bad shape '8y3' "
            "(write sizes joined by x, e.g. 8x3x224x224 or 1x128:int64)",
        ),
        (
            f"{CHECK}mode = 'eval'",
            "pyproject.toml: tool.fxmem.checks[1].mode: invalid choice: 'eval' ",
        ),
        (
            f"{CHECK}mode = ['train', 'infer']",
            "pyproject.toml: tool.fxmem.checks[1].mode takes one value, got ['train', 'infer']",
        ),
        (
            f"{CHECK}optimizer = true",
            "pyproject.toml: tool.fxmem.checks[1].optimizer must be a text or a number, got True",
        ),
        (
            f"{CHECK}hold-outputs = 'step'",
            "pyproject.toml: tool.fxmem.checks[1].hold-outputs must be true or false, got 'step'",
        ),
        (
            f"{CHECK}budget = 8",
            "pyproject.toml: tool.fxmem.checks[1].budget: a budget of 8 is 8 bytes "
            "(8GiB? 8B if bytes are meant)",
        ),
    ],
)
def test_a_mistake_names_its_key(
    project: Project, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write(text)
    assert main(["check"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"fxmem: error: {message}") and err.count("\n") == 1


def test_a_file_that_is_not_toml_is_named(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write("[tool.fxmem")
    assert main(["check"]) == 2
    path = project.folder / "pyproject.toml"
    assert capsys.readouterr().err.startswith(f"fxmem: error: {path} is not TOML: ")
