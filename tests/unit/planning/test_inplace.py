"""Operations that could run in place, and the step with them in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from running import Runs
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cases import Case, Spec
from benchmarks.step import Mode
from fxmem import analyze
from fxmem.analysis import Analysis
from fxmem.graph import MemoryGraph
from fxmem.memory.timeline import build_timeline
from fxmem.planning.inplace.inplace_changes import apply_inplace, find_inplace
from fxmem.planning.model.index import build_index
from fxmem.planning.plan import InplaceChange

ONLY_INFERENCE = ("silu",)


def analyse(model: nn.Module, *shape: int, mode: str = "train") -> Analysis:
    result: Analysis = analyze(model, torch.zeros(shape), device="cpu", mode=mode)
    return result


def find(model: nn.Module, *shape: int, mode: str = "train") -> dict[str, InplaceChange]:
    facts = build_index(analyse(model, *shape, mode=mode).graph)
    return {change.node: change for change in find_inplace(facts)}


def find_peak(graph: MemoryGraph) -> int:
    return max(build_timeline(graph).profile())


def make_called(function: Callable[[Tensor], object], *, bias: bool = False) -> Any:
    """A linear layer, and a function of its result."""
    linear = nn.Linear(8, 8, bias=bias)
    return Runs(lambda net, x: net.function(net.linear(x)), linear=linear, function=function)


def make_convolutions(activate: Callable[[Tensor, bool], Tensor]) -> nn.Module:
    """Forward's frame holds the first result until it returns."""

    def run(net: Any, x: Tensor) -> Tensor:
        wide = net.first(x)
        active = activate(wide, net.training)
        return net.second(active)  # type: ignore[no-any-return]

    first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)
    return Runs(run, first=first, second=second)


def make_leaky(*, inplace: bool) -> nn.Module:
    """Backward keeps the inputs of leaky ReLU, and the results where it is in place."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.LeakyReLU(0.1, inplace=inplace),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Sigmoid(),
    )


def make_residual(add: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """The sum's first operand is needed later, and its second is not."""

    def run(net: Any, x: Tensor) -> Tensor:
        x = net.stem(x)
        y = net.block(x)
        return add(x, y).mean(-1) + x.amax(-1)

    stem, block = nn.Linear(16, 256, bias=False), nn.Linear(256, 256, bias=False)
    return Runs(run, stem=stem, block=block)


def make_shifted(shift: Callable[[Tensor], Tensor]) -> nn.Module:
    """Backward needs nothing of the two largest, so training peaks where both are there."""
    first = nn.Conv2d(3, 32, 3, padding=1)
    return Runs(lambda net, x: shift(net.first(x)).mean((2, 3)), first=first)


class Attention(nn.Module):
    """Scores are scaled and masked before the softmax, one of both in place if so named."""

    def __init__(self, in_place: str = "") -> None:
        super().__init__()
        self.inner = nn.Linear(16, 48)
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).triu(1))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1)
        scaled = scores.div_(4.0) if self.in_place == "div_" else scores / 4.0
        hide = scaled.masked_fill_ if self.in_place == "masked_fill_" else scaled.masked_fill
        hidden = hide(self.mask, float("-inf"))
        return hidden.softmax(-1) @ v


Pair = tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[Spec, ...], str, str]

IMAGE = (Spec((4, 3, 32, 32)),)
SCORES = (Spec((8, 64, 16)),)
PAIRS: dict[str, Pair] = {
    "relu": (
        lambda: make_convolutions(lambda x, _: F.relu(x)),
        lambda: make_convolutions(lambda x, _: F.relu(x, inplace=True)),
        *(IMAGE, "relu", "relu_"),
    ),
    "dropout": (
        lambda: make_convolutions(lambda x, training: F.dropout(x, 0.5, training)),
        lambda: make_convolutions(lambda x, training: F.dropout(x, 0.5, training, inplace=True)),
        *(IMAGE, "dropout", "F.dropout(inplace=True)"),
    ),
    # Backward needs the input, so only inference can do it in place.
    "silu": (
        lambda: make_convolutions(lambda x, _: F.silu(x)),
        lambda: make_convolutions(lambda x, _: F.silu(x, inplace=True)),
        *(IMAGE, "silu", "F.silu(inplace=True)"),
    ),
    "leaky_relu": (
        partial(make_leaky, inplace=False),
        partial(make_leaky, inplace=True),
        *(IMAGE, "1", "LeakyReLU(inplace=True)"),
    ),
    "shift": (
        lambda: make_shifted(lambda x: 1.0 + x),
        lambda: make_shifted(lambda x: x.add_(1.0)),
        *(IMAGE, "add", "add_"),
    ),
    "residual": (
        lambda: make_residual(lambda x, y: x + y),
        lambda: make_residual(lambda x, y: y.add_(x)),
        *((Spec((64, 16)),), "add", "add_"),
    ),
    "div": (Attention, partial(Attention, "div_"), SCORES, "div", "div_"),
    "masked_fill": (
        Attention,
        partial(Attention, "masked_fill_"),
        *(SCORES, "masked_fill", "masked_fill_"),
    ),
}
"""By name: the module, the same with a change, its inputs, the changed node, and the call."""


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", PAIRS)
def test_the_step_becomes_that_of_the_changed_module(name: str, mode: Mode, device: str) -> None:
    build, build_changed, specs, node, call = PAIRS[name]
    analysis = analyze(build(), Case(name, build, specs).inputs()[0], device=device, mode=mode)
    graph = analysis.allocated_graph
    changes = {c.node: c for c in find_inplace(build_index(graph))}
    # CUDA's dropout keeps a mask of one byte for each element; that in place, one of four.
    is_missing = (name in ONLY_INFERENCE and mode == "train") or (
        name == "dropout" and (mode == "infer" or device == "cuda")
    )
    assert (node in changes) == (not is_missing)
    if is_missing:
        return
    assert changes[node].call == call
    assert changes[node].saving_bytes > 0 or mode == "train" or name == "leaky_relu"
    inputs = Case(name, build_changed, specs).inputs()[0]
    written = analyze(build_changed(), inputs, device=device, mode=mode)
    predicted = apply_inplace(graph, [changes[node]])
    assert build_timeline(predicted).profile() == written.timeline.profile()
    assert changes[node].saving_bytes == analysis.peak_bytes - written.peak_bytes
    if device == "cpu":
        graph = written.graph
        assert [s.nbytes for s in predicted.storages] == [s.nbytes for s in graph.storages]
        assert [s.category for s in predicted.storages] == [s.category for s in graph.storages]
        assert [o.writes for o in predicted.operations] == [o.writes for o in graph.operations]
        assert [o.name for o in predicted.operations] == [o.name for o in graph.operations]


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (torch.tanh, "tanh_"),
        (lambda x: -x, "neg_"),
        (lambda x: x + 1, "add_"),
        (lambda x: 1 + x, "add_"),
        (lambda x: 2 * x, "mul_"),
        (lambda x: x.sub(1), "sub_"),
        (lambda x: torch.multiply(x, 2), "multiply_"),
        (lambda x: x * torch.ones(8), "mul_"),
        (F.sigmoid, "sigmoid_"),
        (nn.Sigmoid(), "torch.sigmoid_"),
        (nn.ReLU(), "ReLU(inplace=True)"),
        (nn.Dropout1d(), "Dropout1d(inplace=True)"),
        (F.alpha_dropout, ""),  # not in training, as it is called
        (lambda x: F.alpha_dropout(x, training=True), "F.alpha_dropout(inplace=True)"),
        (lambda x: F.leaky_relu(x, 0.2), "F.leaky_relu(inplace=True)"),
    ],
)
def test_the_call_is_named(function: Any, call: str) -> None:
    found = find(make_called(function), 2, 4, 8)
    assert [change.call for change in found.values()] == ([call] if call else [])
    assert all(change.overwrites == "linear" for change in found.values())


@pytest.mark.parametrize(
    "function",
    [
        F.gelu,
        F.silu,
        F.elu,  # in place, its backward rounds otherwise
        F.relu6,
        lambda x: x.clamp(0),
        lambda x: x * x,
        lambda x: x.exp() + x.abs(),  # abs saves what exp would overwrite
        lambda x: 1 - x,
        lambda x: x.neg() + x.sum(),
        lambda x: (x, x.relu()),  # it is returned
        lambda x: x.relu_(),
        lambda x: F.leaky_relu(x) + x.neg(),
        lambda x: x + torch.ones(2, 4, 8),  # of another shape
        lambda x: x + torch.ones(4, 8, dtype=torch.double),  # of another dtype
        lambda x: (x > 0, x),
        lambda x: x.t() + 1,  # autograd would copy: a view
        lambda x: torch.sub(torch.ones(8), x),
        lambda x: torch.add(torch.ones(8), x, alpha=2),
    ],
)
def test_what_must_not_run_in_place(function: Any) -> None:
    changes = find(make_called(lambda x: (function(x), torch.ones(1, requires_grad=True))), 4, 8)
    assert not [change for change in changes.values() if change.overwrites == "linear"]


def test_a_view_is_overwritten_where_nothing_is_recorded() -> None:
    # A linear layer with a bias and three dimensions returns a view of its product.
    assert not find(make_called(F.relu, bias=True), 2, 4, 8)
    assert (
        find(make_called(F.relu, bias=True), 2, 4, 8, mode="infer")["relu"].overwrites == "linear"
    )


class Through(torch.autograd.Function):
    """Returns its input, or not; no operator of backward reads what it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2 if len(x) > 1 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.dim()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t().contiguous(),  # of one row, it is its input
        lambda x: x.t().reshape(-1),
        lambda x: x.to(torch.double),
        lambda x: F.dropout(x, 0.5, training=True),
        nn.Dropout(),
        lambda x: torch.einsum("ij->i", x),
        lambda x: Through.apply(x),
    ],
)
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_what_other_sizes_or_settings_return_themselves_is_not_overwritten(
    mode: str, function: Any
) -> None:
    # Neither what such an operation makes, nor what it took while its result is needed.
    assert "relu" not in find(make_called(lambda x: (x.sum(), function(x).relu())), 4, 8, mode=mode)
    changes = find(make_called(lambda x: function(x).sum() * x.relu()), 4, 8, mode=mode)
    assert "relu" not in changes
    # A copy that always is one can be.
    assert "relu" in find(make_called(lambda x: (x.sum(), x.clone().relu())), 4, 8, mode=mode)


def add_results(x: Tensor) -> Tensor:
    """The sum could overwrite the second result, which the node's name does not tell."""
    low, high = torch.aminmax(x, dim=1)
    return (low + high) * low


def compute_again(x: Tensor) -> Tensor:
    y = x.neg()
    return torch.utils.checkpoint.checkpoint(torch.sin, y, use_reentrant=False) + y.relu()


@pytest.mark.parametrize(
    ("function", "node", "mode"),
    [
        (lambda x: Through.apply(x) + x.neg(), "neg", "train"),  # saved, though nothing reads it
        (add_results, "add", "infer"),
        (compute_again, "relu", "train"),
    ],
)
def test_what_is_needed_otherwise_is_not_overwritten(function: Any, node: str, mode: str) -> None:
    assert node not in find(make_called(function), 4, 8, mode=mode)


def test_parameters_buffers_and_inputs_are_not_overwritten() -> None:
    model = make_called(lambda x: (x, model.linear.weight.neg()))
    assert not find(model, 4, 8)
    assert not find(nn.Sequential(nn.Flatten(), nn.ReLU()), 4, 8, mode="infer")


def test_chains_lie_on_one_storage() -> None:
    # The first is held to the end, by its caller; the peak is where the third is made.
    graph = analyse(make_called(lambda x: (x / 2 + 1).relu()), 4, 8, mode="infer").graph
    changes = find_inplace(build_index(graph))
    assert sorted(change.call for change in changes) == ["add_", "div_", "relu_"]
    changed = apply_inplace(graph, changes)
    assert len(changed.storages) == len(graph.storages) - 3
    assert find_peak(graph) - find_peak(changed) == 2 * (4 * 8 * 4)
    assert find_peak(apply_inplace(graph, [])) == find_peak(graph)


def test_what_leaky_relu_keeps_is_not_overwritten_after_it() -> None:
    graph = analyse(make_called(lambda x: F.leaky_relu(x).neg().exp()), 512, 8).graph
    changes = {change.node: change for change in find_inplace(build_index(graph))}
    assert set(changes) == {"leaky_relu", "exp"}


def test_the_most_is_first() -> None:
    def function(x: Tensor) -> Tensor:
        narrow = x.cos()
        wide = x.repeat(1, 100)
        return wide.neg().sum() * narrow.sin().sum()

    found = find(make_called(function), 4, 8, mode="infer")
    assert next(iter(found)) == "neg"
    savings = [change.saving_bytes for change in found.values()]
    assert savings == sorted(savings, reverse=True)
    assert savings[0] > savings[-1] == 0
    assert {"neg", "cos", "sin", "mul"} >= set(found)
