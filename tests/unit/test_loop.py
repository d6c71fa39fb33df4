from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import fxmem
from fxmem.loop import LOOPS, Loop, resolve_loop


def test_a_loop_is_described_by_its_name_and_what_differs() -> None:
    for name, loop in LOOPS.items():
        assert loop.name == loop.describe() == name
        assert resolve_loop(name, {}) == resolve_loop(loop, {}) == loop
    loop = resolve_loop("huggingface(clip_grad=False, accumulate=2)", {"accumulate": 4})
    assert loop.describe() == "huggingface(accumulate=4, clip_grad=False)"
    assert resolve_loop(loop.describe(), {}) == loop
    assert Loop("mine", outputs="loss").describe() == "mine(outputs='loss')"


@pytest.mark.parametrize(
    ("loop", "error"),
    [
        ("ignite", "unknown loop 'ignite' (one of plain, huggingface, lightning, fabric)"),
        (
            None,
            "loop must be a name or an fxmem.Loop, got NoneType (plain, huggingface, lightning",
        ),
        ("plain(name='x')", "a loop has no setting 'name' (one of accumulate, outputs, zero_grad,"),
        ("plain(4)", "cannot read the loop's settings in 'plain(4)' (names and literals, e.g. "),
        ("plain(clip_grad=1.0)", "clip_grad of a loop must be True or False, got 1.0"),
        ("plain(accumulate=0)", "0 micro-batches are not a step (an integer, 1 or more)"),
        (
            "plain(outputs='backward')",
            "outputs='backward' is not supported by a loop ('loss' or 'step' or 'next step')",
        ),
    ],
)
def test_other_loops_are_refused(loop: Any, error: str) -> None:
    with pytest.raises(fxmem.UsageError) as raised:
        resolve_loop(loop, {})
    assert str(raised.value).startswith(error)


def test_arguments_of_their_own_replace_what_the_loop_says() -> None:
    def read(**options: Any) -> Loop:
        return fxmem.analyze(nn.Linear(4, 2), ("3x4",), loop="lightning", **options).setup.loop

    assert read() == LOOPS["lightning"]
    assert read(accumulate=2).describe() == "lightning(accumulate=2)"
    assert read(set_to_none=False).describe() == "lightning(set_to_none=False)"
    assert read(hold_outputs=True).describe() == "lightning(outputs='next step')"
    assert read(hold_outputs=False).describe() == "lightning(outputs='step')"


def test_gradients_are_clipped_together_on_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    graph = fxmem.analyze(model, ("3x4",), loop=Loop(clip_grad=True), autocast="fp16").graph
    names = [operation.name for operation in graph.operations]
    assert "aten._foreach_norm.Scalar" in names
    assert "aten._foreach_mul_.Tensor" in names


def test_other_micro_batches_are_inputs_too() -> None:
    def measure(**settings: Any) -> int:
        loop = Loop(accumulate=3, **settings)
        return fxmem.analyze(nn.Linear(4, 2), ("3x4",), device="cpu", loop=loop).input_bytes

    assert measure() == 3 * 4 * 4
    assert measure(prefetch=True) == 3 * measure()


@pytest.mark.parametrize("loop", ["fabric", "plain(float_outputs=True)"])
def test_outputs_are_cast_before_the_loss(loop: str) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "loss": "mse"}
    graph = fxmem.analyze(nn.Linear(4, 64), ("8x4",), loop=loop, **options).graph
    casts = [o.phase.name for o in graph.operations if o.name == "aten._to_copy.default"]
    assert casts == ["LOSS", "BACKWARD"]
