"""What lies in memory before a step, and what it is for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fxmem.graph import Category
from fxmem.kernels.registry import Target
from fxmem.recording.recorder import Recorder
from fxmem.recording.residents import (
    allocate_model,
    iterate_held,
    label_gradients,
    label_residents,
)
from fxmem.tracing.fakes import make_fake_mode


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.cache = [torch.zeros(7)]
        self.mask = torch.zeros(9)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(Target("test"))
    with make_fake_mode(), recorder:
        yield recorder


def list_labels(recorder: Recorder) -> list[tuple[str, Category]]:
    return [(storage.name, storage.category) for storage in recorder.ledger.storages]


def test_a_module_s_own_tensors_follow_its_children_s(recorder: Recorder) -> None:
    with torch.utils._python_dispatch._disable_current_modes():
        model = Net()
    allocate_model(recorder, model)
    shapes = [storage.shape for storage in recorder.ledger.storages]
    assert shapes == [(5,), (5,), (), (3,)]


def test_each_is_named_by_the_most_specific(recorder: Recorder) -> None:
    model = Net()
    x, target = torch.zeros(2), torch.zeros(2)
    optimizer = torch.optim.SGD([model.scale], lr=0.1)
    optimizer.state[model.scale]["momentum_buffer"] = torch.zeros(3)
    model.scale.grad = torch.zeros(3)
    label_residents(
        recorder,
        model,
        [("x", x), ("again", model.mask)],
        target=target,
        loss=None,
        optimizer=optimizer,
        scaler_state=None,
    )
    assert set(list_labels(recorder)) - {("", Category.TEMPORARY)} == {
        ("scale", Category.PARAMETER),
        ("norm.running_mean", Category.BUFFER),
        ("norm.running_var", Category.BUFFER),
        ("norm.num_batches_tracked", Category.BUFFER),
        ("x", Category.INPUT),
        ("again", Category.INPUT),
        ("target", Category.INPUT),
        ("scale.momentum_buffer", Category.OPTIMIZER_STATE),
        ("scale.grad", Category.GRADIENT),
        ("held by cache", Category.BUFFER),
    }


def test_gradients_of_inputs_have_a_name_too(recorder: Recorder) -> None:
    x = torch.zeros(2, requires_grad=True)
    x.grad = torch.zeros(2)
    label_gradients(recorder, nn.ReLU(), [("x", [x, x.exp()])])
    assert ("x.grad", Category.GRADIENT) in list_labels(recorder)


def test_what_code_reaches_is_held_by_an_attribute() -> None:
    model = Net()
    held = {name: value for name, value in iterate_held(model) if isinstance(value, torch.Tensor)}
    assert held["held by cache"] is model.cache[0]
    assert held["mask"] is model.mask
