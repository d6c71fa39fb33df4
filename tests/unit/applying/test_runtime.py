"""Segments: the semantics of PyTorch's checkpoint, and an error where gradients would be wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fxmem
from fxmem.applying.runtime import checkpoint

Run = Callable[[Any, Tensor], Tensor]


def run_by_hand(segment: Any, x: Tensor) -> Tensor:
    return torch_checkpoint(segment, x, use_reentrant=False)  # type: ignore[no-any-return]


def get_gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_segment_just_runs(context: Callable[[], Any]) -> None:
    with context():
        assert checkpoint(lambda x, y: x + y, torch.ones(2), torch.ones(2)).tolist() == [2, 2]


def test_a_segment_saves_its_inputs_alone_and_stops_early_when_it_runs_again() -> None:
    begun, ended = [], []

    def segment(x: Tensor) -> Tensor:
        begun.append(1)
        y = x.sin().exp()
        ended.append(1)
        return y + 1

    kept: list[Tensor] = []
    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = checkpoint(segment, x)
    assert all(t is x for t in kept)
    y.sum().backward()
    assert (len(begun), len(ended)) == (2, 1)
    assert torch.equal(get_gradient(x), x.cos() * x.sin().exp())


def list_lives(run: Run) -> list[list[bool]]:
    """Lists the live results of a nested segment whenever backward asks for a gradient."""
    made: list[weakref.ref[Any]] = []
    lives: list[list[bool]] = []

    def note(_: Tensor) -> None:
        lives.append([reference() is not None for reference in made])

    def step(x: Tensor) -> Tensor:
        y = (x * 2).sin()
        made.append(weakref.ref(y.untyped_storage()))
        if y.requires_grad:
            y.register_hook(note)
        return y

    def inner(x: Tensor) -> Tensor:
        return step(step(x))

    def outer(x: Tensor) -> Tensor:
        return run(inner, step(run(inner, step(x)))).exp()

    run(outer, torch.ones(3, requires_grad=True)).sum().backward()
    return lives


def test_a_segment_that_saves_its_result_runs_whole() -> None:
    ended = []

    def segment(x: Tensor) -> Tensor:
        y = x.sin().exp()
        ended.append(1)
        return y

    x = torch.randn(3, requires_grad=True)
    checkpoint(segment, x, whole=True).sum().backward()
    assert len(ended) == 2
    again = x.detach().requires_grad_()
    again.sin().exp().sum().backward()
    assert torch.equal(get_gradient(x), get_gradient(again))


def test_a_segment_that_draws_nothing_reads_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr("fxmem.applying.runtime.list_generators", lambda x: read.append(x) or [])
    x = torch.randn(3, requires_grad=True)
    checkpoint(torch.sin, x, draws=False).sum().backward()
    assert not read


def test_nested_segments_run_and_free_memory_as_pytorch_s() -> None:
    lives = list_lives(checkpoint)
    assert len(lives) == 6
    assert lives == list_lives(run_by_hand)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_second_backward_runs_the_segment_again(create_graph: bool) -> None:
    runs = []

    def segment(x: Tensor) -> Tensor:
        runs.append(1)
        return checkpoint(torch.sin, x.exp()).exp()  # type: ignore[no-any-return]

    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    y = checkpoint(segment, x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True, create_graph=create_graph)[0]
    (second,) = torch.autograd.grad(first.sum() if create_graph else y, x)
    expected = x.exp().sin().exp().sum()
    one = torch.autograd.grad(expected, x, create_graph=True)[0]
    other = torch.autograd.grad(one.sum(), x)[0] if create_graph else one
    assert torch.equal(first, one)
    torch.testing.assert_close(second, other)
    assert len(runs) >= 3


@pytest.mark.parametrize("has_backward", [False, True])
def test_nothing_is_held_when_backward_is_over_or_its_graph_is_gone(has_backward: bool) -> None:
    with pytest.warns(FutureWarning):
        normalised = weight_norm(nn.Linear(3, 3))  # keeps what it computed last, with its graph
    layer = normalised if has_backward else nn.Linear(3, 3)
    given = torch.ones(2, 3, requires_grad=True) * 1
    held = weakref.ref(given.untyped_storage())
    y = checkpoint(lambda x: layer(x).sin(), given)
    del given
    assert held() is not None
    if has_backward:
        y.sum().backward()
    del y
    assert held() is None


def test_statistics_are_themselves_again_after_an_error() -> None:
    norm = nn.BatchNorm1d(3)
    before, runs = dict(norm.named_buffers()), []

    def segment(x: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) == 2:
            raise KeyError("the second time")
        return norm(x).sin()  # type: ignore[no-any-return]

    y = checkpoint(segment, torch.randn(5, 3), norms=(norm,))
    with pytest.raises(KeyError):
        y.sum().backward()
    assert all(buffer is before[name] for name, buffer in norm.named_buffers())


@pytest.mark.parametrize("is_outside", [False, True])
def test_autocast_is_as_in_the_first_run(is_outside: bool) -> None:
    layer, kinds = nn.Linear(4, 4), []

    def segment(x: Tensor) -> Tensor:
        y = layer(x).sin()
        kinds.append(y.dtype)
        return y.exp().sum()

    x = torch.randn(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_outside):
        y = checkpoint(segment, x)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_outside):
        y.backward()
    assert kinds == [torch.float32 if is_outside else torch.bfloat16] * 2


def test_inputs_that_are_one_object_are_one_again() -> None:
    seen = []

    def run(query: Tensor, number: int, key: Tensor, other: Tensor) -> Tensor:
        seen.append((query is key, key is other))
        return (query * key).tanh() * other + number

    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    checkpoint(run, x, 1, x, y).sum().backward()
    assert seen == [(True, False), (True, False)]


def test_an_inner_segment_may_take_a_view_of_a_parameter() -> None:
    """As timm's attention pooling has it, whose queries are latents that are parameters."""
    latent, layer = nn.Parameter(torch.randn(1, 4)), nn.Linear(4, 4)
    gradients = []
    for inner in (checkpoint, run_by_hand):

        def run(x: Tensor, inner: Run = inner) -> Tensor:
            query = inner(lambda query: layer(query).tanh(), latent.expand(3, 4))
            return query.softmax(-1) * x.exp()

        latent.grad = None
        inner(run, torch.ones(3, 4, requires_grad=True)).pow(2).sum().backward()
        gradients.append(get_gradient(latent))
    assert torch.equal(*gradients)


def change_input(layer: nn.Linear, x: Tensor) -> None:
    x.data_ptr()
    with torch.no_grad():
        x.mul_(2)


def step_optimizer(layer: nn.Linear, x: Tensor) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def replace_weight(layer: nn.Linear, x: Tensor) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def freeze_weight(layer: nn.Linear, x: Tensor) -> None:
    layer.weight.requires_grad_(False)


CHANGES = {
    "its input was modified in place since forward": change_input,
    r"its parameter of \(torch.Size\(\[4, 4\]\), torch.float32\) was modified or": step_optimizer,
    r"its parameter of \(torch.Size\(\[4, 4\]\), torch.float32\) was mod": replace_weight,
    "parameters were frozen or unfrozen since forward": freeze_weight,
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("told", CHANGES)
def test_what_changed_since_forward_is_told(told: str, nested: bool) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(4, 4, requires_grad=True) * 1

    def segment(x: Tensor) -> Tensor:
        return layer(x).sin()  # type: ignore[no-any-return]

    def outer(x: Tensor) -> Tensor:
        return checkpoint(segment, x, name="layer").exp()  # type: ignore[no-any-return]

    y = checkpoint(outer if nested else segment, x, name="layer")
    CHANGES[told](layer, x)
    with pytest.raises(fxmem.UsageError, match=f"^layer of the plan cannot be recomputed.* {told}"):
        y.sum().backward()


def test_other_shapes_and_fewer_tensors_are_told() -> None:
    for later in (r"it saves \(torch.Size\(\[3\]\), .* in the place of", "it saves 0 of 1"):
        sizes = iter([4, 3])

        def segment(x: Tensor, later: str = later, sizes: Any = sizes) -> Tensor:
            size = next(sizes)
            return x[:size].sin().sum() if "place" in later or size == 4 else x.sum()

        y = checkpoint(segment, torch.ones(4, requires_grad=True))
        with pytest.raises(fxmem.UsageError, match=later):
            y.backward()


def test_more_tensors_than_before_are_told() -> None:
    runs = iter([torch.sin, lambda x: x.sin().exp()])
    y = checkpoint(lambda x: next(runs)(x), torch.ones(4, requires_grad=True), whole=True)
    with pytest.raises(fxmem.UsageError, match="it saves more tensors than before"):
        y.sum().backward()


def test_an_optimizer_may_step_within_backward() -> None:
    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(get_gradient(parameter), alpha=0.1)

    def train(run: Run) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            y = torch.ones(2, 4)
            for block in model:
                y = run(block, y)
            y.square().sum().backward()
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, train(checkpoint), train(lambda segment, x: segment(x))))


@pytest.mark.filterwarnings("ignore:.*", "ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiler_leaves_segments_alone(backend: str) -> None:
    torch.compiler.reset()
    norm, drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def train(run: Run) -> list[Any]:
        norm.reset_running_stats()
        x = torch.linspace(0, 1, 20).reshape(5, 4).requires_grad_()

        def block(x: Tensor) -> Tensor:
            return drop(norm(x).sin()).exp()  # type: ignore[no-any-return]

        torch.manual_seed(0)
        torch.compile(lambda x: run(block, x.cos()).sum(), backend=backend)(x).backward()
        return [get_gradient(x), norm.running_mean, norm.num_batches_tracked]

    expected = [tensor.clone() for tensor in train(lambda segment, x: segment(x))]
    found = train(lambda segment, x: checkpoint(segment, x, norms=(norm,)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
