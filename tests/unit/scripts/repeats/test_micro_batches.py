"""Micro-batches that a script repeats: a copy is what a recording would have been."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fxmem
from fxmem import ScriptRun
from fxmem.scripts.repeats.micro_batches import MicroBatches

MODEL = """
import random
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

random.seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.norm(self.conv(x))) + x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.drop, self.head = nn.Dropout(), nn.Linear(8, 10)

    def forward(self, x, y=None):
        print("a call")
        x = self.blocks[1](self.blocks[0](x))
        x = self.drop(checkpoint(self.blocks[2], x, use_reentrant=False).mean((2, 3)))
        logits = self.head(x)
        if y is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}

def make_batch():
    return torch.randn(4, 8, 16, 16).cuda(), torch.randint(0, 10, (4,)).cuda()

model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
"""
ACCUMULATE = """
for _ in range(4):
    for _ in range(6):
        x, y = make_batch()
        loss = model(x, y)["loss"] / 6
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
AUTOCAST = """
for _ in range(4):
    for _ in range(6):
        x, y = make_batch()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x)["logits"], y)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WITHOUT_BACKWARD = """
for _ in range(4):
    for number in range(6):
        x, y = make_batch()
        loss = nn.functional.cross_entropy(model(x)["logits"], y)
        if number != 4:
            loss.backward()
        held = torch.ones(1 << 20, device="cuda").sum()
    optimizer.step()
    optimizer.zero_grad()
"""
TWO_OUTPUTS = """
for _ in range(4):
    for _ in range(6):
        x, y = make_batch()
        output = model(x, y)
        (output["loss"] + output["logits"].square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PREFETCH = """
x, y = make_batch()
for _ in range(4):
    for _ in range(6):
        loss = model(x, y)["loss"] / 6
        x, y = make_batch()  # as nanoGPT does
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COMPILED = "model = torch.compile(model)" + PREFETCH
EVALUATE = """
def measure(x):
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=CASTS):
        output = model(x)
    return output["logits"].float().argmax(1).sum().item()

for _ in range(2):
    model.eval()
    print([measure(make_batch()[0]) for _ in range(5)])
    model.train()
    x, y = make_batch()
    model(x, y)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# As pytorch-grad-cam's ActivationsAndGradients does.
COLLECT = """
features = []
model.head.register_forward_hook(lambda _module, _inputs, output: features.append(output.cpu()))
""" + EVALUATE.replace("CASTS", "False")
EVALUATE_UNEVENLY = EVALUATE.replace(
    "in range(5)]", "in range(4)] + [measure(make_batch()[0][:3])]"
)
A_CACHE = """
class Cached(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, past):
        logits = self.model(x)["logits"]
        past.seen += 1
        if past.seen % 3 == 0:  # as transformers' QuantizedCache
            past.pieces.append(torch.zeros(1 << 20, device="cuda"))
        return logits

class Cache:
    seen, pieces = 0, []

cached = Cached(model)
for _ in range(2):
    cached.eval()
    with torch.no_grad():
        cache = Cache()
        for _ in range(5):
            cached(make_batch()[0], cache)
    model.train()
    x, y = make_batch()
    model(x, y)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
"""
A_COUNTER = """
class Counting(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.count = model, 0

    def forward(self, x, y):
        self.count += 1
        size = 4 if self.count % 6 else 2
        return self.model(x[:size], y[:size])["loss"]

model = Counting(model)
for _ in range(4):
    for _ in range(6):
        model(*make_batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
A_DRAW = A_COUNTER.replace("if self.count % 6", "if random.random() < 0.5").replace(
    "self.count += 1", "pass"
)


def run(script: Path, output: Any) -> tuple[ScriptRun, int]:
    found = fxmem.run(str(script), steps=2, gpu="h100")
    return found, output.readouterr().out.count("a call")


@pytest.mark.parametrize(
    ("loop", "calls"),
    [
        (ACCUMULATE, 6),
        (AUTOCAST, 6),
        (PREFETCH, 6),
        (COMPILED, None),  # how often the compiler reads forward is its own affair
        (TWO_OUTPUTS, 12),
        (A_COUNTER, 12),
        (A_DRAW, 12),
        # Of five evaluations the first makes workspaces, or its input was made before; two alike
        # are recorded after it.
        (EVALUATE.replace("CASTS", "False"), 8),
        (EVALUATE.replace("CASTS", "True"), 8),
        (EVALUATE_UNEVENLY.replace("CASTS", "True"), 10),
        (COLLECT, 12),
        (A_CACHE, 12),
    ],
)
def test_a_copy_is_what_a_recording_would_be(
    loop: str, calls: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    script = tmp_path / "train.py"
    script.write_text(MODEL + textwrap.dedent(loop))
    copied, called = run(script, capsys)
    assert calls is None or called == calls  # of six for each of two steps

    def call(_: MicroBatches, run: Callable[[], Any], *_arguments: Any) -> Any:
        return run()

    monkeypatch.setattr(MicroBatches, "call", call)
    recorded, called = run(script, capsys)
    assert called == (18 if loop is COMPILED else 12)  # a step follows in eager mode
    for one, other in zip(copied.steps, recorded.steps, strict=True):
        assert one.graph == other.graph
        assert one.reserved_bytes == other.reserved_bytes


def test_a_copy_without_backward_is_freed_with_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    script = tmp_path / "train.py"
    script.write_text(MODEL + textwrap.dedent(WITHOUT_BACKWARD))
    copied, called = run(script, capsys)
    assert called == 6
    monkeypatch.setattr(MicroBatches, "call", lambda _, run, *arguments: run())
    recorded, _ = run(script, capsys)
    for one, other in zip(copied.steps, recorded.steps, strict=True):
        assert one.peak_bytes == other.peak_bytes
        assert one.peak.operation == other.peak.operation
