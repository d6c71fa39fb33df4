"""Why storages are alive at the peak, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from running import Runs
from torch import Tensor, nn

import fxmem
from fxmem.analysis import Analysis
from fxmem.cli import main
from fxmem.cli.explain import explain_storage
from fxmem.errors import UsageError
from fxmem.report.blocks import render_text


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.gate = nn.Linear(64, 512), nn.Linear(64, 512)
        self.last = nn.Linear(512, 2048)

    def forward(self, x: Tensor) -> Any:
        gate = self.gate(x)
        x = self.wide(x)
        x = torch.tanh(x)
        x = x * gate
        return self.last(x.exp())


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return fxmem.analyze(Net(), "256x64", optimizer="sgd-momentum", device="cpu")


def explain(analysis: Analysis, name: str) -> dict[str, str]:
    """The rows of the first storage, by their names; those without one are joined."""
    text = render_text(explain_storage(analysis, name))
    rows: dict[str, str] = {"title": text.splitlines()[0]}
    for line in text.split("\n\n")[1].splitlines():
        key = line[:12].strip() or "saved by"
        rows[key] = f"{rows[key]}; {line[12:]}" if key in rows else line[12:]
    return rows


def test_a_saved_activation(analysis: Analysis) -> None:
    rows = explain(analysis, "tanh")
    assert rows["title"] == "tanh holds 512.00 KiB at the peak"
    assert rows["storage"] == "tanh, 512.00 KiB, ACTIVATION, 256x512:float32"
    assert rows["made by"].startswith("aten.tanh in forward of tanh, test_explanation_text.py:")
    assert rows["saved by"] == "tanh, for TanhBackward0; mul, for MulBackward0"
    assert rows["held by"] == "autograd, for backward"
    assert rows["let go"].startswith("by the code in forward of mul, test_explanation_text.py:")
    assert rows["freed"].startswith("after backward of tanh, test_explanation_text.py:")


@pytest.mark.parametrize(
    ("name", "holder", "freed"),
    [
        ("wide.weight", "the model, for good", "not within the step"),
        ("wide.weight.momentum_buffer", "the optimizer, for good", "not within the step"),
        ("x", "the caller, for the whole step", "not within the step"),
        ("last", "a variable of the training loop", "not within the step"),
        ("gradient of exp", "the operators that compute with it", "after backward of exp"),
        ("last.weight.grad", "the parameter's .grad", "not within the step"),
    ],
)
def test_what_holds_a_storage(analysis: Analysis, name: str, holder: str, freed: str) -> None:
    rows = explain(analysis, name)
    assert rows["held by"] == holder
    assert rows["freed"].startswith(freed)


def test_a_storage_that_is_gone(analysis: Analysis) -> None:
    rows = explain(analysis, "wide")
    assert rows["title"] == "wide holds nothing at the peak"
    assert rows["held by"] == "a variable of the code"
    assert rows["freed"].startswith("after forward of tanh")


def test_names_as_a_narrow_table_shortens_them(analysis: Analysis) -> None:
    text = render_text(explain_storage(analysis, "wi...weight.mom..."))
    assert text.startswith("wi...weight.mom... holds 128.00 KiB at the peak\n")


def test_several_storages_of_one_name(analysis: Analysis) -> None:
    text = render_text(explain_storage(analysis, "..."))
    assert text.count("\nstorage ") == 5
    assert text.rstrip().splitlines()[-1].startswith("... and ")


def test_a_view_is_the_storage_that_it_shares() -> None:
    net = Runs(lambda net, x: net.last(x).flatten().exp(), last=nn.Linear(8, 64))
    text = render_text(explain_storage(fxmem.analyze(net, "64x8"), "flatten"))
    assert "made by     aten.addmm in forward of last" in text


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("tanhh", r"no node or storage is called 'tanhh' \(did you mean 'tanh'\?\)"),
        ("conv1", r"called 'conv1' \(fxmem analyze --nodes lists the names\)"),
    ],
)
def test_a_name_that_nothing_has(analysis: Analysis, name: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        explain_storage(analysis, name)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["explain", "fx301"]) == 0
    assert capsys.readouterr().out.startswith("FX301: Forward runs in full precision\n\nUnder ")
    monkeypatch.setenv("COLUMNS", "72")
    assert main(["explain", "FX203"]) == 0
    out = capsys.readouterr().out
    assert "\n\nIt is slower for many small parameters. FX204 needs" in out  # without the link
    assert "```python\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, f" in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("optimizer")) <= 72
    assert main(["explain", "FX999"]) == 2
    assert "unknown finding FX999" in capsys.readouterr().err
    assert main(["explain", "net.py:Net"]) == 2
    assert capsys.readouterr().err == (
        "fxmem: error: explain needs the code of a finding, or a TARGET and a NODE (fxmem explain "
        "FX101, or fxmem explain net.py:Net NODE)\n"
    )
    options = ["--input", "1x16:int64", "--device", "cpu"]
    assert main(["explain", "examples/gpt.py:GPT(layers=1)", "tokens.weight", *options]) == 0
    assert capsys.readouterr().out.startswith("tokens.weight holds 12.00 MiB at the peak\n")
