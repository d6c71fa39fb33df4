"""The tensors of Python numbers that autograd keeps, which hooks on saved tensors do not see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.graph import Category, MemoryGraph, Storage
from fxmem.recording.losses import resolve_loss
from fxmem.transform.running import Runner


class Model(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layer(x))


def record(
    run: Callable[[Tensor], Tensor], device: str = "cpu", mode: str = "train"
) -> MemoryGraph:
    return fxmem.analyze(Model(run), ("3x4",), device=device, mode=mode).graph


def find_numbers(graph: MemoryGraph) -> list[Storage]:
    return [s for s in graph.storages if s.shape == () and s.category is Category.WORKSPACE]


@pytest.mark.parametrize(
    ("run", "sizes"),
    [
        (lambda y: y * 0.5, [8]),
        (lambda y: 2 / (3 * y), [8, 8]),
        (lambda y: y.div(2, rounding_mode="floor") + y, [8]),
        (lambda y: y * True, [1]),
        (lambda y: (y * 2j).abs(), [16]),
        (lambda y: y.sin().mul_(2).div_(3), [8, 8]),
        (lambda y: y + 1 - 2 + y**2, []),
        (lambda y: y * torch.ones(()), []),
        (lambda y: y * (y.detach() * 2), []),
    ],
    ids=["mul", "both", "rounded", "bool", "complex", "in place", "others", "tensor", "no grad"],
)
def test_what_multiplies_and_divides_is_kept(
    run: Callable[[Tensor], Tensor], sizes: list[int]
) -> None:
    assert [storage.nbytes for storage in find_numbers(record(run))] == sizes


@pytest.mark.parametrize(("device", "mode"), [("cuda", "train"), ("cpu", "infer")])
def test_nothing_is_kept_on_a_gpu_or_in_inference(device: str, mode: str) -> None:
    assert find_numbers(record(lambda y: y * 0.5, device, mode)) == []


def test_it_lives_until_its_backward_and_is_no_saved_tensor() -> None:
    graph = record(lambda y: (y * 0.5).exp())
    (number,) = find_numbers(graph)
    (save,) = [save for save in graph.saves if save.storage == number.index]
    assert number.died is not None and number.node is not None
    ran = graph.operations[number.died]
    assert (ran.autograd_node, ran.node) == ("MulBackward0", number.node)
    assert (save.node, save.unpacked, save.released) == (None, number.died, number.died)
    assert number.index not in [saved.storage for saved in graph.saved]


def test_the_peak_is_the_allocator_s() -> None:
    def run(y: Tensor) -> Tensor:
        for number in range(1, 20):
            y = (y * number).sin() / number
        return y

    model, x = Model(run), torch.randn(3, 4)
    analysis = fxmem.analyze(model, (x,), device="cpu")
    loss = resolve_loss(None)
    runner = Runner(model, ((x,), {}), loss, None, torch.device("cpu"))
    runner.prepare()
    assert analysis.peak_bytes == runner.measure(0)


def test_a_view_that_is_scaled_in_place_is_left_alone() -> None:
    def run(y: Tensor) -> Tensor:
        y = y + 1
        part = y[:, :2]
        part.mul_(0.5)
        part.add_(1)  # makes the function of the view anew, under a lock
        return y * part.sum()

    assert find_numbers(record(run)) == []
