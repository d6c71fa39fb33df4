"""Sparse gradients, the optimizers that take them, and sparse matrices, against the real step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from benchmarks.accuracy import analyse
from benchmarks.cases import Case, ids, image
from benchmarks.measure import measure_allocator
from fxmem.graph import Category

pytestmark = pytest.mark.usefixtures("one_thread", "frozen_heap")

ROWS, WIDTH = 300, 16
Layer = Callable[[], nn.Module]


IDS = ids(24, 8, high=90)


class Looks(nn.Module):
    """Looks up rows, so many times; what follows decides whether their gradient is contiguous."""

    def __init__(self, embedding: Layer, times: int, *, head: bool) -> None:
        super().__init__()
        self.embedding, self.times = embedding(), times
        self.head = nn.Linear(WIDTH, 3).requires_grad_(False) if head else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(sum(self.embedding(ids) for _ in range(self.times)))
        return result


def step_in_backward(model: nn.Module, kind: Any) -> nn.Module:
    """The optimizer takes its step as soon as the gradient is there."""
    weight = model.get_parameter("embedding.weight")
    optimizer = kind([weight])

    def update(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    weight.register_post_accumulate_grad_hook(update)
    return model


LAYERS: dict[str, Layer] = {
    "rows": lambda: nn.Embedding(ROWS, WIDTH, sparse=True),
    "rows with padding": lambda: nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=7),
    "bags": lambda: nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum"),
    "bags with padding": lambda: nn.EmbeddingBag(ROWS, WIDTH, sparse=True, padding_idx=7),
}
OPTIMIZERS: dict[str, Any] = {
    "nothing": None,
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "sparse adam": torch.optim.SparseAdam,
    "adagrad": torch.optim.Adagrad,
}


def check(build: Layer, *args: Any) -> None:
    case = Case("case", build, args)
    analysis, real = analyse(case, "train"), measure_allocator(case, "train")
    assert analysis.timeline.resident_bytes == real["resident_bytes"]
    assert analysis.peak_bytes == real["peak_bytes"]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_allocator_peaks_where_it_does(layer: str, optimizer: str) -> None:
    for times, head in ((1, True), (2, True), (3, False)):
        kind = OPTIMIZERS[optimizer]

        def build(times: int = times, head: bool = head, kind: Any = kind) -> nn.Module:
            model = Looks(LAYERS[layer], times, head=head)
            return model if kind is None else step_in_backward(model, kind)

        check(build, IDS)


class Tied(nn.Module):
    """One matrix that is looked up sparsely and densely."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.dense = nn.Embedding(ROWS, WIDTH, _weight=self.sparse.weight)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.sparse(ids) * self.dense(ids)
        return result


class Graph(nn.Module):
    """A graph convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(ROWS).to_sparse())
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.edges @ torch.sparse.mm(self.edges, self.linear(x)).relu()


def test_a_sparse_gradient_meets_a_dense_one() -> None:
    check(Tied, IDS)


def test_a_sparse_matrix_is_multiplied() -> None:
    check(Graph, image(ROWS, WIDTH))


def test_sparse_gradients_are_counted() -> None:
    rows, model = 24 * 8, Looks(LAYERS["rows"], 1, head=True)
    given = torch.zeros(24, 8, dtype=torch.int64)
    analysis = fxmem.analyze(model, (given,), optimizer=torch.optim.SparseAdam, device="cpu")
    assert analysis.gradient_bytes == rows * WIDTH * 4  # the indices are the input's memory
    assert analysis.optimizer_state_bytes == 2 * ROWS * WIDTH * 4
    names = {s.name for s in analysis.graph.storages if s.category is Category.GRADIENT}
    assert names == {"embedding.weight.grad"}
    analysis = fxmem.analyze(Looks(LAYERS["rows"], 2, head=True), (given,), device="cpu")
    assert analysis.gradient_bytes == 2 * rows * (WIDTH * 4 + 8)


def test_how_many_rows_are_left_depends_on_the_ids() -> None:
    model = Looks(LAYERS["rows"], 1, head=True)
    with pytest.raises(fxmem.DataDependentError, match=r"aten\._coalesce\.default"):
        fxmem.analyze(model, ("24x8:int64",), optimizer=torch.optim.SparseAdam, device="cpu")
    hinted = [
        fxmem.analyze(
            model, ("24x8:int64",), optimizer=torch.optim.SparseAdam, size_hint=hint, device="cpu"
        )
        for hint in (10, 24 * 8, 10**6)
    ]
    assert hinted[0].peak_bytes < hinted[1].peak_bytes == hinted[2].peak_bytes


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")
def test_other_layouts_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("edges", torch.eye(4).to_sparse_csr())
    with pytest.raises(fxmem.TraceError, match=r"'edges': a tensor of layout sparse_csr"):
        fxmem.analyze(model, ("3x2",), device="cpu")
