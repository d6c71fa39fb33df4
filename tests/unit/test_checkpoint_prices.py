"""Prices of the checkpoints that a library's switch turns on."""

from __future__ import annotations

from typing import Any

import pytest
import torch.utils.checkpoint
from torch import Tensor, nn

import fxmem
from fxmem.cli import main
from fxmem.integrations.checkpoints import price_checkpoints

INPUT = "512x32"


class Net(nn.Module):
    """As timm's models: ``set_grad_checkpointing`` and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpoints = False
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(4)
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.checkpoints = enable

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            run: Any = block
            if self.checkpoints:
                x = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
            else:
                x = run(x)
        return x


class Refusing(Net):
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        raise ValueError("not supported")


def test_the_price_is_that_of_the_model_with_checkpoints() -> None:
    net = Net()
    analysis = fxmem.analyze(net, INPUT, device="cpu", accumulate=2)
    price = price_checkpoints(analysis)
    assert price is not None
    assert not net.checkpoints
    net.set_grad_checkpointing()
    again = fxmem.analyze(net, INPUT, device="cpu", accumulate=2)
    assert price.peak_bytes == again.peak_bytes < analysis.peak_bytes
    # Of 8 products in forward and 15 in backward, the first of each block runs again.
    assert price.overhead_flops == pytest.approx(4 / 23)
    assert 0.05 < price.overhead < 0.5


def test_models_without_a_switch_have_no_price() -> None:
    for model in (nn.Linear(32, 4), Refusing()):
        assert price_checkpoints(fxmem.analyze(model, INPUT, device="cpu")) is None


def test_the_table_of_plans_names_the_price(
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = ["--input", INPUT, "--device", "cpu", "--time-limit", "0.5"]
    assert main(["plan", f"{__file__}:Net", *step]) == 0
    price = price_checkpoints(fxmem.analyze(Net(), INPUT, device="cpu"))
    assert price is not None
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("For comparison, model.set_grad_checkpointing(): ")
    assert last.endswith(" more FLOPs.")
