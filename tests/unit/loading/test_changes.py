"""Changes to a model that ``fxmem max-batch --try`` combines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fxmem
from benchmarks.cases import import_torchvision
from fxmem.cli import main
from fxmem.errors import UsageError
from fxmem.loading.changes import change_optimizer, list_combinations, write_changed

import_torchvision()  # transformers, which peft imports, looks for it
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NET = """
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 1024), nn.Linear(1024, 512)
    def forward(self, x):
        return x + self.down(self.up(x).relu())
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(512, 8)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
def lonely():
    return nn.Linear(8, 8)
"""
WEIGHTS = 4 * 2 * 512 * 1024
BIASES = 4 * (1024 + 512)
HEAD = 512 * 8 + 8
LORA = 4 * 2 * 16 * (512 + 1024)


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:Net"


def analyze(net: str, *changes: str, optimizer: str = "adamw") -> fxmem.Analysis:
    target = write_changed(net, changes) if changes else net
    return fxmem.analyze(target, "4096x512", optimizer=change_optimizer(optimizer, changes))


def count(analysis: fxmem.Analysis, category: str) -> int:
    """Bytes of the tensors of a category, as they are."""
    return sum(s.nbytes for s in analysis.graph.storages if s.category.name == category)


def test_lora_trains_its_own_weights_alone(net: str) -> None:
    step = analyze(net, "lora")
    assert count(step, "PARAMETER") == 4 * (WEIGHTS + BIASES + HEAD + LORA)
    assert count(step, "OPTIMIZER_STATE") == pytest.approx(2 * 4 * LORA, rel=0.01)


def test_qlora_packs_the_layers_that_it_adapts(net: str) -> None:
    step = analyze(net, "qlora")
    # bitsandbytes turns biases to bfloat16, which it computes in, when a layer first runs.
    assert count(step, "PARAMETER") == WEIGHTS // 2 + 2 * BIASES + 4 * (HEAD + LORA)
    # 8 bits for each 64 weights, 32 for each 256 of these; two codes of 256 and 16, an offset.
    states = WEIGHTS // 64 + WEIGHTS // 64 // 256 * 4 + 8 * (256 * 4 + 16 * 4 + 4)
    assert count(step, "BUFFER") == states


def test_checkpoints_keep_the_inputs_of_blocks(net: str) -> None:
    plain, step = analyze(net), analyze(net, "checkpoint")
    saved = {s.nbytes for s in step.saved if s.category.name == "ACTIVATION"}
    assert saved == {4096 * 512 * 4}
    assert step.peak_bytes < plain.peak_bytes


def test_states_in_8_bits(net: str) -> None:
    plain, step = analyze(net), analyze(net, "8bit")
    assert count(step, "OPTIMIZER_STATE") < 0.3 * count(plain, "OPTIMIZER_STATE")


def test_advice_tries_them(net: str) -> None:
    advice = fxmem.advise(net, ("4096x512",), optimizer="adamw")
    peaks = {finding.code: finding.peak_bytes for finding in advice}
    for code, change in (("FX305", "lora"), ("FX306", "qlora"), ("FX205", "8bit")):
        assert peaks[code] == analyze(net, change).peak_bytes
    frozen = fxmem.advise(write_changed(net, ["lora"]), ("4096x512",), optimizer="adamw")
    assert not {"FX305", "FX306"} & {finding.code for finding in frozen}


def test_lora_and_qlora_exclude_each_other() -> None:
    assert list_combinations(["qlora", "lora"]) == [(), ("lora",), ("qlora",)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--try sparse", "--try sparse: no such change (lora or qlora or checkpoint or 8bit)"),
        (
            "--try 8bit --optimizer sgd",
            "--try 8bit with --optimizer sgd (adam or adamw)",
        ),
    ],
)
def test_refusals(net: str, options: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = ["max-batch", net, "--input", "64x512", "--memory", "64MiB", *options.split()]
    assert main(step) == 2
    assert capsys.readouterr().err.endswith(f"fxmem: error: {text}\n")


def test_a_model_without_blocks(net: str) -> None:
    target = write_changed(net.replace(":Net", ":lonely"), ["checkpoint"])
    with pytest.raises(fxmem.FxmemError, match="the model has no list of blocks of one class"):
        fxmem.analyze(target, "4x8")


def test_a_package_that_is_not_installed(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fxmem.loading import changes

    def find_nothing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(changes.importlib, "import_module", find_nothing)
    with pytest.raises(UsageError, match="--try lora needs peft, which is not installed"):
        changes.add_lora(torch.nn.Linear(2, 2))


def test_a_table(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = ["max-batch", net, "--input", "64x512", "--memory", "1GiB", "--optimizer", "adamw"]
    assert main([*step, "--try", "lora,checkpoint"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("  ")[0].strip() for line in lines if "MiB" in line]
    assert [row for row in rows if "Memory" not in row] == [
        "nothing",
        "lora",
        "checkpoint",
        "lora + checkpoint",
    ]
    assert str(lines[1]).startswith(net)
