from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fxmem
from fxmem.setup import Loop
from fxmem.training.loops import LOOPS, resolve_loop

OPTIONS: dict[str, Any] = {"device": "cpu", "optimizer": "adam", "loss": "mse"}


def test_a_loop_is_described_by_its_name_and_what_differs() -> None:
    for name in LOOPS:
        assert str(resolve_loop(name, {})[0]) == name
    loop, _ = resolve_loop("huggingface(clip_grad=False, accumulate=2)", {"accumulate": 4})
    assert str(loop) == "huggingface(accumulate=4, clip_grad=False)"
    assert resolve_loop(str(loop), {})[0] == resolve_loop(loop, {})[0] == loop


@pytest.mark.parametrize(
    ("loop", "error"),
    [
        ("ignite", "unknown loop 'ignite' (one of plain, huggingface, lightning, fabric; or a "),
        (None, "loop must be a name or a function, got NoneType (plain, huggingface, lightning"),
        ("plain(name='x')", "the loop plain has no setting 'name' (one of accumulate, outputs, "),
        ("plain(4)", "cannot read the loop's settings in 'plain(4)' (names and literals, e.g. "),
        ("plain(clip_grad=1.0)", "clip_grad of a loop must be True or False, got 1.0"),
        ("plain(accumulate=0)", "0 micro-batches are not a step (an integer, 1 or more)"),
        (
            "plain(outputs='backward')",
            "outputs='backward' is not supported by a loop ('loss' or 'step' or 'next step')",
        ),
        (lambda training: None, "the loop ended before its second step (iterate over "),
    ],
)
def test_other_loops_are_refused(loop: Any, error: str) -> None:
    with pytest.raises(fxmem.FxmemError) as raised:
        fxmem.analyze(nn.Linear(4, 2), "3x4", loop=loop)
    assert str(raised.value).startswith(error)


def test_arguments_of_their_own_replace_what_the_loop_says() -> None:
    def read(**options: Any) -> str:
        loop = fxmem.analyze(nn.Linear(4, 2), ("3x4",), loop="lightning", **options).setup.loop
        return str(loop)

    assert read() == "lightning"
    assert read(accumulate=2) == "lightning(accumulate=2)"
    assert read(set_to_none=False) == "lightning(set_to_none=False)"
    assert read(hold_outputs=True) == "lightning(outputs='next step')"
    assert read(hold_outputs=False) == "lightning(outputs='step')"


def test_gradients_are_clipped_together_on_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    graph = fxmem.analyze(model, ("3x4",), loop="plain(clip_grad=True)", autocast="fp16").graph
    names = [operation.name for operation in graph.operations]
    assert "aten._foreach_norm.Scalar" in names
    assert "aten._foreach_mul_.Tensor" in names


def test_other_micro_batches_are_inputs_too() -> None:
    def measure(loop: str) -> int:
        loop = Loop(loop, {"accumulate": 3})
        return fxmem.analyze(nn.Linear(4, 2), ("3x4",), device="cpu", loop=loop).input_bytes

    assert measure("plain") == 3 * 4 * 4
    assert measure("huggingface") == 3 * measure("plain")


def test_outputs_are_cast_before_the_loss() -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "loss": "mse"}
    graph = fxmem.analyze(nn.Linear(4, 64), ("8x4",), loop="fabric", **options).graph
    casts = [o.phase.name for o in graph.operations if o.name == "aten._to_copy.default"]
    assert casts == ["LOSS", "BACKWARD"]


def test_a_loop_may_be_named_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "loops.py"
    path.write_text(
        "def step_twice(training):\n"
        "    for batch in training.batches():\n"
        "        training.optimizer.zero_grad()\n"
        "        training.loss(training.model(*batch.args)).backward()\n"
        "        training.optimizer.step()\n"
        "        training.optimizer.step()\n"
    )
    path.write_text(
        path.read_text() + "def make_own(training):\n"
        "    import torch\n"
        "    own = torch.optim.Adam(training.model.parameters())\n"
        "    for batch in training.batches():\n"
        "        own.zero_grad()\n"
        "        training.loss(training.model(*batch.args)).backward()\n"
        "        own.step()\n"
    )
    own = fxmem.analyze(nn.Linear(4, 2), "3x4", device="cpu", loss="mse", loop=f"{path}:make_own")
    once = fxmem.analyze(nn.Linear(4, 2), "3x4", **OPTIONS).graph
    twice = fxmem.analyze(nn.Linear(4, 2), "3x4", **OPTIONS, loop=f"{path}:step_twice").graph

    def count(graph: Any) -> int:
        return sum(operation.phase.name == "OPTIMIZER" for operation in graph.operations)

    assert count(twice) == 2 * count(once) > 0
    states = fxmem.analyze(nn.Linear(4, 2), "3x4", **OPTIONS).optimizer_state_bytes
    assert own.optimizer_state_bytes == states > 0
