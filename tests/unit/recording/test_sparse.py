"""Steps with sparse gradients and sparse matrices: the CPU's profiler, and the sources for GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from benchmarks.scripts import predict_script

SCRIPT = """
import warnings
import torch
from torch import nn
from torch.nn import functional as F

warnings.simplefilter("ignore")  # of invariants that are not checked
torch.manual_seed(0)

class Recommender(nn.Module):  # as DLRM of facebookresearch/dlrm
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(50_000, 64, sparse=True)
        self.bags = nn.EmbeddingBag(20_000, 64, mode="sum", sparse=True)
        self.top = nn.Linear(128, 1)

    def forward(self, a, b):
        return self.top(torch.cat([self.items(a).mean(1), self.bags(b)], 1))

class Graph(nn.Module):  # as GCN of tkipf/pygcn
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(500, 64), nn.Linear(64, 7)

    def forward(self, x, edges):
        return torch.spmm(edges, self.two(torch.relu(torch.sparse.mm(edges, self.one(x)))))

def train(optimizers, compute):
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        compute().backward()
        for optimizer in optimizers:
            optimizer.step()

recommender, optim = Recommender(), torch.optim
a, b = torch.randint(0, 50_000, (256, 20)), torch.randint(0, 20_000, (256, 30))
click = lambda: F.binary_cross_entropy_with_logits(recommender(a, b), torch.ones(256, 1))
train([optim.SGD(recommender.parameters(), 0.1)], click)
train([optim.Adagrad(recommender.parameters(), 0.1)], click)
tables = [*recommender.items.parameters(), *recommender.bags.parameters()]
train([optim.SparseAdam(tables, 0.1), optim.Adam(recommender.top.parameters())], click)

words = nn.Embedding(10_000, 32, sparse=True)  # used twice, as in node2vec of PyG
pairs = lambda: -(words(a % 5000)[:, :1] * words(5000 + b % 5000)).sum(-1).sigmoid().log().mean()
train([optim.SparseAdam(words.parameters())], pairs)

graph, n = Graph(), 3000
edges = torch.sparse_coo_tensor(torch.randint(0, n, (2, 20_000)), torch.rand(20_000), (n, n))
for edges in (edges, edges.coalesce()):
    x, y = torch.rand(n, 500), torch.randint(0, 7, (n,))
    train([optim.Adam(graph.parameters())], lambda: F.cross_entropy(graph(x, edges), y))

places, weights = torch.randint(0, 300, (2, 4000)), nn.Parameter(torch.rand(4000))
spread = lambda: torch.sparse.mm(torch.sparse_coo_tensor(places, weights, (300, 300)), x[:300])
train([optim.SGD([weights])], lambda: spread().sum())

table, rows = nn.Embedding(20_000, 32, sparse=True), torch.randint(0, 20_000, (3, 400))
def accumulate():
    for part in rows[1:]:
        table(part).square().sum().backward()
    return table(rows[0]).square().sum()
train([optim.SGD(table.parameters())], accumulate)
"""


def test_steps_on_the_cpu_take_what_the_profiler_sees(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "benchmarks.scripts", "--only", "real", "--steps", "16"]
    real = subprocess.run([*command, str(script)], capture_output=True, text=True, check=True)
    measured = json.loads(real.stdout.splitlines()[-1])
    assert predict_script(str(script), [], 16, "cpu") == measured


def list_made(model: nn.Module, *inputs: Any, **options: Any) -> list[tuple[str, list[int]]]:
    """Lists the operators of backward and the optimizer on a GPU, and the bytes they make."""
    analysis = fxmem.analyze(model, inputs, device="cuda", **options)
    graph, found = analysis.graph, []
    for operation in graph.operations:
        sizes = [s.nbytes for s in graph.storages if s.born == operation.index]
        if operation.phase.value != "forward" and sizes:
            found.append((operation.name.split(".")[1], sizes))
    return found


@pytest.mark.parametrize(("ids", "count"), [(torch.arange(400) % 30, 30), ("400:int64", 400)])
def test_a_gpu_coalesces_to_as_many_rows_as_differ(ids: Any, count: int) -> None:
    """``_coalesce_sparse_cuda``: three buffers of indices, a sort's of 16 bytes, and the values."""
    made = list_made(nn.Embedding(1000, 8, sparse=True), ids, optimizer="adagrad")
    start = [operator for operator, _ in made].index("clone")
    assert made[start : start + 5] == [
        ("clone", [3200]),
        ("empty_like", [3200]),
        ("empty_like", [3200]),
        ("empty_like", [6400]),
        ("new_empty", [count * 8 * 4]),
    ]


def test_a_size_hint_says_how_many_rows_differ() -> None:
    model = nn.Embedding(1000, 8, sparse=True)
    made = list_made(model, "400:int64", optimizer="adagrad", size_hint=50)
    assert ("new_empty", [50 * 8 * 4]) in made


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return edges @ self.layer(x)


def test_a_gpu_multiplies_by_rows_that_are_compressed() -> None:
    """``s_addmm_out_sparse_dense_cuda``; backward transposes the matrix, and coalesces it again."""
    places = torch.stack([torch.arange(300) % 50, torch.arange(300) % 7])
    edges = torch.sparse_coo_tensor(places, torch.rand(300), (50, 50)).coalesce()
    assert edges._nnz() == 300
    made = list_made(Graph(), "50x16", edges)
    assert made[2:-2] == [
        *[("clone", [4800]), ("clone", [1200]), ("clone", [2400])],  # sparse_transpose_, its row
        *[("new_zeros", [1600]), ("new_empty", [1600])],  # _sparse_mm, the result
        *[("to", [16]), ("mul", [4800]), ("sum", [2400])],  # flatten_indices
        *[("empty_like", [2400]), ("empty_like", [2400]), ("empty_like", [4800])],
        *[("new_empty", [1200]), ("new_empty", [4800])],
        *[("new_empty", [204]), ("to", [1200]), ("to", [1200])],  # _to_csr_int, and columns
        *[("clone", [1600]), ("contiguous", [1600])],  # by columns; the gradient was expanded
    ]


class DeepGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 64, sparse=True)
        self.layers = nn.Sequential(
            *(each for _ in range(4) for each in (nn.Linear(64, 64), nn.ReLU()))
        )

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return torch.sparse.mm(edges, self.layers(self.table(nodes)))


def test_a_plan_of_sparse_tensors_keeps_its_promise() -> None:
    model, places = DeepGraph(), torch.randint(0, 500, (2, 900))
    inputs = (torch.arange(500), torch.sparse_coo_tensor(places, torch.rand(900), (500, 500)))
    analysis = fxmem.analyze(model, inputs, optimizer="sgd", device="cpu")
    plan = fxmem.plan(analysis, budget=int(0.85 * analysis.peak_bytes))
    report = fxmem.verify(model, fxmem.apply(model, plan), inputs, optimizer="sgd")
    assert report.equal
    assert report.planned.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)
