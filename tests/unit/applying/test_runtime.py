"""Checkpoints of planned modules: none without gradients, state as after one run."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fxmem.applying import runtime
from fxmem.applying.runtime import checkpoint


def test_without_gradients_there_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("checkpoint is called")

    monkeypatch.setattr(runtime, "torch_checkpoint", refuse)
    with torch.no_grad():
        assert checkpoint(lambda x, y: x + y, torch.ones(2), torch.ones(2)).tolist() == [2, 2]
    with torch.inference_mode():
        assert checkpoint(torch.neg, torch.ones(1)).tolist() == [-1]
    with pytest.raises(AssertionError, match="checkpoint is called"):
        checkpoint(torch.neg, torch.ones(1))


def test_a_segment_runs_twice_and_saves_nothing() -> None:
    calls = []

    def segment(x: Tensor) -> Tensor:
        calls.append(x)
        return x.sin().exp()

    kept: list[Tensor] = []
    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = checkpoint(segment, x)
    assert not [t for t in kept if t is not x]
    y.sum().backward()
    assert len(calls) == 2
    assert x.grad is not None
    assert torch.equal(x.grad, x.cos() * x.sin().exp())


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_are_updated_once(momentum: float | None) -> None:
    norm = nn.BatchNorm1d(3, momentum=momentum)
    expected = copy.deepcopy(norm)
    before = dict(norm.named_buffers())
    for seed in range(2):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        expected(x).sin().sum().backward()
        checkpoint(lambda x: norm(x).sin(), x, norms=(norm,)).sum().backward()
    assert norm.num_batches_tracked == 2
    for name, buffer in norm.named_buffers():
        assert buffer is before[name]
        assert torch.equal(buffer, expected.get_buffer(name))
    assert torch.equal(norm.weight.grad, expected.weight.grad)


def test_a_norm_without_statistics_has_none_to_spare() -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    checkpoint(lambda x: norm(x).sin(), torch.randn(5, 3), norms=(norm,)).sum().backward()
    assert norm.running_mean is None


def test_statistics_come_back_where_the_second_run_fails() -> None:
    norm = nn.BatchNorm1d(3)
    before = dict(norm.named_buffers())
    runs = []

    def segment(x: Tensor) -> Tensor:
        runs.append(x)
        if len(runs) == 2:
            raise KeyError("the second time")
        return norm(x).sin()

    y = checkpoint(segment, torch.randn(5, 3), norms=(norm,))
    with pytest.raises(KeyError):
        y.sum().backward()
    assert all(buffer is before[name] for name, buffer in norm.named_buffers())


def test_dropout_draws_the_same_mask_again() -> None:
    x = torch.ones(1000, requires_grad=True)
    torch.manual_seed(0)
    y = checkpoint(lambda x: F.dropout(x.exp()).sin(), x, random=True)
    torch.manual_seed(7)  # what is drawn between forward and backward
    between = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), between)
    assert x.grad is not None
    dropped = y.detach() == 0
    assert 300 < int(dropped.sum()) < 700
    assert torch.equal(x.grad == 0, dropped)


class Halving(nn.Module):
    """Multiplies by a buffer that it halves each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.scale *= 0.5
        return (x * self.scale).sin()


@pytest.mark.parametrize("backwards", [1, 2])
def test_the_second_run_begins_with_the_state_of_the_first(backwards: int) -> None:
    module, x = Halving(), torch.randn(3, requires_grad=True)
    buffer = module.scale
    result = checkpoint(module, x, states=((module, "scale"),)).sum()
    for again in reversed(range(backwards)):
        result.backward(retain_graph=bool(again))
    assert module.scale is buffer
    assert buffer.tolist() == [0.5] * 3
    assert x.grad is not None
    assert torch.equal(x.grad, backwards * 0.5 * (x * 0.5).cos())


def test_a_naive_second_run_begins_with_the_state_of_the_end() -> None:
    module, x = Halving(), torch.randn(3, requires_grad=True)
    torch_checkpoint(module, x, use_reentrant=False).sum().backward()
    assert module.scale.tolist() == [0.25] * 3
    assert x.grad is not None
    assert not torch.equal(x.grad, 0.5 * (x * 0.5).cos())


def test_inputs_that_are_one_object_are_one_again() -> None:
    seen = []

    def run(query: Tensor, number: int, key: Tensor, other: Tensor) -> Tensor:
        seen.append((query is key, key is other))
        return (query * key).tanh() * other + number

    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    checkpoint(run, x, 1, x, y).sum().backward()
    assert seen == [(True, False), (True, False)]


def test_a_second_run_that_stops_early_leaves_what_wants_gradients_as_it_is() -> None:
    layer = nn.Linear(3, 3)

    def freeze(x: Tensor) -> Tensor:
        layer.requires_grad_(False)
        y = layer(x).sin()
        layer.requires_grad_(True)  # nothing is saved after it
        return y

    x = torch.randn(2, 3, requires_grad=True)
    checkpoint(freeze, x, reads={"layer": layer}).sum().backward()
    assert layer.weight.requires_grad and layer.weight.grad is None
    assert x.grad is not None
    assert torch.equal(x.grad, layer(x).cos() @ layer.weight)


def test_a_segment_within_another_does_not_hold_what_it_is_given() -> None:
    given = []

    def outer(x: Tensor) -> Tensor:
        mask = torch.ones(3)
        given.append(weakref.ref(mask))
        return checkpoint(lambda y, m: (y * m).exp(), x.sin(), mask)  # type: ignore[no-any-return]

    x = torch.randn(3, requires_grad=True)
    y = checkpoint(outer, x)
    assert given[0]() is None
    y.sum().backward()
    assert torch.equal(x.grad, y.detach() * x.detach().cos())  # type: ignore[arg-type]
