"""``fxmem run`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxmem.cli import main

SCRIPT = """
import sys
import torch

size, device = int(sys.argv[1]), "cuda" if torch.cuda.is_available() else "cpu"
print("training on", torch.cuda.get_device_name() if device == "cuda" else device)
model = torch.nn.Linear(size, size).to(device)
optimizer = torch.optim.Adam(model.parameters())
for step in range(9):
    optimizer.zero_grad()
    loss = model(torch.ones(4, size, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return "train.py"


def test_the_report_is_on_stdout_and_the_script_s_words_on_stderr(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--gpu", "h100", "--top", "2", script, "512"]) == 0
    out, err = capsys.readouterr()
    first, second = out.splitlines()[:2]
    assert first.startswith("Peak ") and first.endswith("updating 2 parameters together")
    assert second == "step 1 of train.py; NVIDIA H100 80GB HBM3; optimizer Adam"
    assert "step 3 " in out and "train.py:14" in out and "Fits NVIDIA H100" in out
    assert err.startswith("training on NVIDIA H100 80GB HBM3\nloss 1.0\n")


def test_modules_limits_and_files(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "--budget", "1MiB", "--steps", "1", "--json", "-o", "step.json"]
    assert main([*arguments, "-m", "train", "512"]) == 1
    assert "fxmem: over budget: the peak of" in capsys.readouterr().err
    report = json.loads((tmp_path / "step.json").read_text())
    assert [step["name"] for step in report["script"]["steps"]] == ["step 1"]
    assert [read["source"]["line"] for read in report["script"]["reads"]] == [14]
    assert main(["run", "--device", "cpu", "-o", "step.html", script, "64"]) == 0
    assert "<svg" in (tmp_path / "step.html").read_text()
    assert main(["run", "-o", "step.json", "nope.py"]) == 2
    assert "no script 'nope.py' (fxmem run train.py; -m package.module;" in (
        capsys.readouterr().err
    )


COMPILED = """
import torch

model = torch.compile(torch.nn.Linear(1 << 15, 1 << 15, device="cuda"))
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(1, 1 << 15, device="cuda")).sum().backward()
optimizer.step()
"""


def test_eager_figures_give_no_verdict_on_a_script_that_compiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(COMPILED)
    eager = ["run", "--eager", "--gpu", "rtx3070"]
    assert main([*eager, str(script)]) == 0
    out, err = capsys.readouterr()
    assert "Eager would not fit NVIDIA GeForce RTX 3070 (7.66 GiB), in " in out
    assert "; the script compiles." in out
    assert err.startswith("fxmem: eager would not fit NVIDIA GeForce RTX 3070: ")
    assert main([*eager, "--budget", "1GiB", "--json", str(script)]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is None
    script.write_text(COMPILED.replace("))\n", "), disable=True)\n", 1))
    assert main(["run", "--gpu", "rtx3070", str(script)]) == 1


@pytest.mark.parametrize("steps", [0, 2])
def test_ctrl_c_reports_the_steps_so_far(
    steps: int, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = f"if step == {steps}:\n        import signal; signal.raise_signal(signal.SIGINT)"
    path = tmp_path / script
    path.write_text(path.read_text().replace("optimizer.zero_grad()", stop))
    assert main(["run", "--json", script, "64"]) == 130
    out, err = capsys.readouterr()
    if not steps:
        assert out == "" and err.endswith(
            "fxmem: interrupted before a step was recorded: no report\n"
        )
        return
    found = json.loads(out)["script"]
    assert found["partial"] and [step["name"] for step in found["steps"]] == ["step 1", "step 2"]


def test_a_script_that_fails_is_reported_up_to_there(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(script).read_text().replace("for step in range(9):", "for step in range(2):")
    Path(script).write_text(f"{text}torch.load('best.pt')\n")
    assert main(["run", "--json", script, "512"]) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)["script"]
    assert found["partial"] and [step["name"] for step in found["steps"]] == ["step 1", "step 2"]
    assert "fxmem: error: train.py failed at train.py:15: FileNotFoundError" in err


def test_a_script_that_fails_in_its_first_step_is_not_reported(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(script).read_text().replace("    loss.backward()", "    raise ValueError('no')")
    Path(script).write_text(text)
    assert main(["run", script, "512"]) == 2
    assert capsys.readouterr().out == ""
