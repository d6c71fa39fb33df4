"""Code that no graph would do again: it is analysed, and the reason is told."""

from __future__ import annotations

import contextlib
import inspect
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from running import Runs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxmem
from fxmem.tracing.state import read_random_states


class Counter:
    __slots__ = ("turns",)

    def __init__(self) -> None:
        self.turns = 0


def build(run: Callable[..., Any]) -> nn.Module:
    """Makes a model of a layer and a function of its result."""
    layers = {"layer": nn.Linear(4, 4), "other": nn.Linear(4, 4)}
    count = nn.Buffer(torch.zeros((), dtype=torch.long))
    forward = lambda net, x, **others: run(net, net.layer(x), **others)  # noqa: E731
    return Runs(forward, **layers, count=count, counter=Counter())


def analyse(run: Callable[..., Any], *given: Any, **others: Any) -> fxmem.Analysis:
    size_hint = others.pop("size_hint", None)
    return fxmem.analyze(build(run), given or ("3x4",), others, device="cpu", size_hint=size_hint)


def find_line(run: Callable[..., Any]) -> str:
    """The place of the line that ends in `# here`."""
    lines, start = inspect.getsourcelines(run)
    at = next(i for i, line in enumerate(lines) if line.rstrip().endswith("# here"))
    return f"test_reasons.py:{start + at}"


def warm_up(net: Any, y: Tensor) -> Tensor:
    net.count += 1
    return y * min(1.0, net.count.item() / 4)  # here


def look_at_input(net: Any, y: Tensor, mask: Tensor) -> Tensor:
    return y * 2 if mask.all() else y  # here


def clamp_overflow(net: Any, y: Tensor) -> Tensor:
    if not torch.isfinite(y).all():  # here
        y = y.clamp(-1e4, 1e4)
    return y


def guess_size(net: Any, y: Tensor, lengths: Tensor) -> Tensor:
    return y[: lengths.max().item()]  # here


def seed(net: Any, y: Tensor) -> Tensor:
    torch.manual_seed(0)  # here
    return F.dropout(y, 0.5)


def hook(net: Any, y: Tensor) -> Tensor:
    y.register_hook(lambda grad: grad.clamp(-1, 1))  # here
    return y * 2


def ask_for_gradient(net: Any, y: Tensor) -> Tensor:
    z = y.detach()
    z.requires_grad = True  # here
    return y + z


DECIDES = "a value that may change decides"
LINES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (warm_up, {}, DECIDES),
    (look_at_input, {"mask": torch.ones(3) > 0}, DECIDES),
    (clamp_overflow, {}, DECIDES),
    (guess_size, {"lengths": "3:int64", "size_hint": 2}, DECIDES),
    (seed, {}, "it sets the state of the random numbers"),
    (hook, {}, "it calls register_hook of a tensor"),
    (ask_for_gradient, {}, "it sets requires_grad of a tensor"),
]


@pytest.mark.parametrize("run, others, reason", LINES)
def test_the_line_is_told(run: Callable[..., Any], others: dict[str, Any], reason: str) -> None:
    analysis = analyse(run, **others)
    found = analysis.frontend, analysis.setup.frontend_reason
    assert found == ("record", f"{reason} at {find_line(run)}")


def find_mean(net: Any, y: Tensor) -> Tensor:
    found = y[y[:, 0] > 0]
    return found.sum() / max(len(found), 1)


def skip_idle_expert(net: Any, y: Tensor) -> Tensor:
    """The loop over experts of transformers' and Mixtral's mixtures."""
    (tokens,) = torch.where(y[:, 0] > 0)
    return y.index_add(0, tokens, net.other(y[tokens])) if tokens.numel() > 0 else y


def embed_found(net: Any, y: Tensor) -> Tensor:
    found = y[y[:, 0] > 0]
    return net.other(found).mean() + torch.arange(found.shape[0]).sum()


@pytest.mark.parametrize("run", [find_mean, skip_idle_expert, embed_found])
def test_a_graph_goes_by_no_size_hint(run: Callable[..., Any]) -> None:
    analysis = analyse(run, size_hint=2)
    reason = "" if run is embed_found else "its code goes by a size that depends on data"
    assert analysis.setup.frontend_reason == reason
    assert "Sizes that depend on data are taken as 2 (size_hint)." in analysis.setup.notes


def count_in_slots(net: Any, y: Tensor) -> Tensor:
    net.counter.turns += 1
    return y * net.counter.turns


def choose_kernels(net: Any, y: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(y[None], y[None], y[None])


def round_saved(net: Any, y: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.round(), lambda t: t):
        return torch.sin(y)


def cast(net: Any, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.other(y).float()


def freeze(net: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        shift = net.other(y)
    return y + shift


def remember(net: Any, y: Tensor) -> Tensor:
    net.last = y.detach()
    return y * 2


def draw_number(net: Any, y: Tensor) -> Tensor:
    return y * random.random()


def drop(net: Any, y: Tensor) -> Tensor:
    return net.other(y) if torch.rand([]) < 0.9 else y * 2


OTHERS = [
    (cast, "the code itself turns autocast on or off"),
    (freeze, "the code itself turns gradients on or off"),
    (remember, "the model changes what it holds in its forward"),
    (count_in_slots, "the model changes what it holds in its forward"),
    (draw_number, "it draws random numbers that are not PyTorch's"),
    (drop, "a random draw decides which way it goes"),
    (choose_kernels, "the code itself sets which kernels run"),
    (round_saved, "the code itself sets what autograd does with what it saves"),
]


@pytest.mark.parametrize("run, reason", OTHERS)
def test_what_a_graph_would_leave_out_is_told(run: Callable[..., Any], reason: str) -> None:
    random.seed(0)
    random.random()
    analysis = analyse(run)
    assert (analysis.frontend, analysis.setup.frontend_reason) == ("record", reason)


def ask_own(net: Any, y: Tensor) -> Tensor:
    return y * torch.arange(3).max().item()


def check(net: Any, y: Tensor) -> Tensor:
    assert net.count < 10
    if not torch.isfinite(y).all():
        raise ValueError("diverged")
    return y


def warn(net: Any, y: Tensor, ids: Tensor) -> Tensor:
    if 0 in ids:
        text = "an input is"
        text += " padded"
        warnings.warn(text, stacklevel=1)
    return y


@pytest.mark.parametrize(
    "run, others", [(ask_own, {}), (check, {}), (warn, {"ids": torch.ones(3, dtype=torch.int64)})]
)
def test_what_every_step_does_alike_has_a_graph(run: Any, others: dict[str, Any]) -> None:
    analysis = analyse(run, **others)
    assert (analysis.frontend, analysis.setup.frontend_reason) == ("fx", "")


def seed_and_raise(net: Any, y: Tensor) -> Tensor:
    random.seed(0)
    np.random.random()
    raise ValueError("never")


@pytest.mark.parametrize("run", [seed, seed_and_raise])
def test_an_analysis_sets_no_state(run: Callable[..., Any]) -> None:
    model = build(run)
    random.seed(3)
    random.gauss()  # keeps a second number
    np.random.seed(3)
    torch_state, others = torch.get_rng_state(), read_random_states()
    with contextlib.suppress(fxmem.TraceError):
        fxmem.analyze(model, ("3x4",), device="cpu")
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert read_random_states() == others


def test_hooks_that_the_first_call_installs_are_in_the_graph() -> None:
    def install(net: Any, y: Tensor) -> Tensor:
        if not hasattr(net, "installed"):
            net.layer.register_forward_hook(lambda module, args, output: output * 2)
            net.installed = True
        return y

    assert analyse(install).frontend == "fx"


@pytest.mark.parametrize("owner", ["transformers.utils.output_capturing", "my.features"])
def test_hooks_that_collect_hidden_states_are_in_the_graph(owner: str) -> None:
    def collect(module: nn.Module, args: Any, output: Tensor) -> None:
        return None

    collect.__module__ = owner
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    model[0].register_forward_hook(collect)
    reason = fxmem.analyze(model, ("3x4",), device="cpu").setup.frontend_reason
    expected = "" if owner.startswith("transformers") else "0 has hooks, which no graph calls"
    assert reason == expected
