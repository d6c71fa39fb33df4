"""`fxmem analyze` around an analysis that is made by hand."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hand_made import make_analysis

import fxmem
from fxmem.cli import main
from fxmem.specs import TensorSpec

COMMAND = ["analyze", "nets/net.py:Net"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Replaces fxmem.analyze; the calls that it got."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def analyze(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        print("the model prints something")
        return make_analysis()

    monkeypatch.setattr(fxmem, "analyze", analyze)
    return calls


@pytest.mark.usefixtures("calls")
class TestResult:
    def test_stdout_is_the_report_and_nothing_else(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(COMMAND) == 0
        out, err = capsys.readouterr()
        assert out.startswith("Peak 30.00 MiB in backward of block.relu, net.py:12\n")
        assert "prints" not in out
        assert err == "the model prints something\n"

    def test_json_is_the_whole_analysis(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        path = tmp_path / "result.json"
        assert main([*COMMAND, "--json", "--budget", "31457284", "-o", str(path)]) == 0
        assert capsys.readouterr().out == ""
        assert json.loads(path.read_text()) == make_analysis().to_dict()

    @pytest.mark.parametrize(
        ("name", "start"),
        [
            ("peak.txt", "Peak 30.00 MiB in backward of block.relu, net.py:12\nnets/net.py:Net; "),
            ("peak.log", "Peak 30.00 MiB in backward of block.relu, net.py:12\nnets/net.py:Net; "),
            ("peak.md", "### Peak 30.00 MiB in backward of block.relu, net.py:12\n\nnets/"),
            ("peak.csv", "over the step,total\nparameters,"),
            ("peak.json", '{\n  "schema_version": 2,'),
            ("peak.HTML", "<!doctype html>\n<html"),
            ("peak.svg", "<?xml "),
        ],
    )
    def test_the_suffix_decides(self, tmp_path: Path, name: str, start: str) -> None:
        assert main([*COMMAND, "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text().startswith(start)

    def test_top_and_nodes(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        check_golden: Callable[[str, str], None],
    ) -> None:
        monkeypatch.delenv("COLUMNS", raising=False)
        assert main([*COMMAND, "--top", "6", "--nodes"]) == 0
        check_golden("hand_made.txt", capsys.readouterr().out)

    def test_modules_to_a_depth(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*COMMAND, "--modules", "--depth", "1"]) == 0
        assert re.search(r"^- block +- .* 12.00 MiB$", capsys.readouterr().out, re.MULTILINE)
        for wrong, cause in (
            (["--modules", "--depth", "0"], "must be 1 or more"),
            (["--depth", "2"], "is for the table of --modules"),
        ):
            assert main([*COMMAND, *wrong]) == 2
            assert capsys.readouterr().err == (
                f"fxmem: error: --depth {cause} (--modules --depth 2)\n"
            )

    def test_over_budget_is_exit_1_and_still_reports(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*COMMAND, "--budget", "24MiB"]) == 1
        out, err = capsys.readouterr()
        assert out.startswith("Peak 30.00 MiB")
        assert err.splitlines()[-1] == (
            "fxmem: over budget: the peak of 30.00 MiB is 6.00 MiB over 24.00 MiB"
        )


def test_options_reach_analyze(calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    main(
        [
            *COMMAND,
            *["--input", "8x3", "--input", "mask=8x3:bool", "--input", "scalar:int64"],
            *["--mode", "infer", "--device", "cuda", "--dtype", "bf16", "--optimizer", "adam"],
            *["--loss", "mse", "--frontend", "record", "--size-hint", "7", "--autocast", "bf16"],
            "--compile",
            *["--accumulate", "4", "--keep-gradients", "--hold-outputs", "--loop", "lightning"],
            "--inference-mode",
            *["--gpu", "h100", "--attention", "flash", "--alloc-conf", "expandable_segments:True"],
            *["--mesh", "dp=8,tp=4", "--parallelize", "train.py:parallelize", "--rank", "5"],
        ]
    )
    (args, options) = calls[0]
    assert args == (
        "nets/net.py:Net",
        (TensorSpec((8, 3)), TensorSpec((), "int64")),
        {"mask": TensorSpec((8, 3), "bool")},
    )
    assert options == {
        "mode": "infer",
        "inference_mode": True,
        "device": "cuda",
        "gpu": "h100",
        "reserve": None,
        "routing": "balanced",
        "new_tokens": 128,
        "attention": "flash",
        "dtype": "bfloat16",
        "autocast": "bf16",
        "optimizer": "adam",
        "loss": "mse",
        "loop": "lightning",
        "accumulate": 4,
        "set_to_none": False,
        "hold_outputs": True,
        "alloc_conf": "expandable_segments:True",
        "frontend": "record",
        "compile": True,
        "activation_memory_budget": None,
        "size_hint": 7,
        "mesh": {"dp": 8, "tp": 4},
        "parallelize": "train.py:parallelize",
        "rank": 5,
    }


@pytest.mark.parametrize("name", ["fsdp", "ddp"])
def test_plain_ways_to_share_a_step(
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]], name: str
) -> None:
    main([*COMMAND, f"--{name}", "8"])
    options = calls[0][1]
    assert (options["mesh"], options["parallelize"]) == ({"dp": 8}, name)


def test_two_ways_to_share_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--fsdp", "8", "--mesh", "dp=8"]) == 2
    assert "more than one way to share the step" in capsys.readouterr().err


@pytest.mark.filterwarnings("default::fxmem.FxmemWarning")
def test_a_warning_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def analyze(*args: Any, **kwargs: Any) -> Any:
        warnings.warn("a hook is\x1b[2J left out", fxmem.FxmemWarning, stacklevel=2)
        return make_analysis()

    monkeypatch.setattr(fxmem, "analyze", analyze)
    show = warnings.showwarning
    assert main(COMMAND) == 0
    assert capsys.readouterr().err == "fxmem: warning: a hook is\\x1b[2J left out\n"
    assert warnings.showwarning is show
