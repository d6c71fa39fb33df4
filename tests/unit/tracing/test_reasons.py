"""Code that no graph would do again: it is analysed, and the reason is told."""

from __future__ import annotations

import contextlib
import inspect
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxmem
from fxmem.tracing.state import read_random_states


class Counter:
    __slots__ = ("turns",)

    def __init__(self) -> None:
        self.turns = 0


class Net(nn.Module):
    """A layer, and what some function makes of its result."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.other, self.run = nn.Linear(4, 4), nn.Linear(4, 4), run
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("table", None)
        self.done, self.counter = False, Counter()

    def forward(self, x: Tensor, **others: Any) -> Any:
        return self.run(self, self.layer(x), **others)


def analyse(run: Callable[..., Any], *given: Any, **others: Any) -> fxmem.Analysis:
    size_hint = others.pop("size_hint", None)
    return fxmem.analyze(Net(run), given or ("3x4",), others, device="cpu", size_hint=size_hint)


def find_line(run: Callable[..., Any]) -> str:
    """The place of the line that ends in `# here`."""
    lines, start = inspect.getsourcelines(run)
    at = next(i for i, line in enumerate(lines) if line.rstrip().endswith("# here"))
    return f"test_reasons.py:{start + at}"


def warm_up(net: Net, y: Tensor) -> Tensor:
    net.count += 1
    return y * min(1.0, net.count.item() / 4)  # here


def initialise(net: Net, y: Tensor) -> Tensor:
    if not net.ready:  # here
        with torch.no_grad():
            net.bias.copy_(-y.mean(0))
            net.ready.fill_(True)
    return y + net.bias


def copy_into_own(net: Net, y: Tensor) -> Tensor:
    own = torch.zeros(2, dtype=torch.long)
    own[0] = net.count
    return y * own.max().item()  # here


def look_at_input(net: Net, y: Tensor, mask: Tensor) -> Tensor:
    return y * 2 if mask.all() else y  # here


def clamp_overflow(net: Net, y: Tensor) -> Tensor:
    if not torch.isfinite(y).all():  # here
        y = y.clamp(-1e4, 1e4)
    return y


def guess_size(net: Net, y: Tensor, lengths: Tensor) -> Tensor:
    return y[: lengths.max().item()]  # here


def seed(net: Net, y: Tensor) -> Tensor:
    torch.manual_seed(0)  # here
    return F.dropout(y, 0.5)


def set_state(net: Net, y: Tensor) -> Tensor:
    state = torch.get_rng_state()
    y = F.dropout(y, 0.5)
    torch.set_rng_state(state)  # here
    return y


def hook(net: Net, y: Tensor) -> Tensor:
    y.register_hook(lambda grad: grad.clamp(-1, 1))  # here
    return y * 2


def ask_for_gradient(net: Net, y: Tensor) -> Tensor:
    z = y.detach()
    z.requires_grad = True  # here
    return y + z


LINES = {
    "warm-up": (warm_up, {}, "a value that may change decides"),
    "initialisation": (initialise, {}, "a value that may change decides"),
    "a buffer's value in a tensor of its own": (
        copy_into_own,
        {},
        "a value that may change decides",
    ),
    "input": (look_at_input, {"mask": torch.ones(3) > 0}, "a value that may change decides"),
    "overflow": (clamp_overflow, {}, "a value that may change decides"),
    "size hint": (
        guess_size,
        {"lengths": "3:int64", "size_hint": 2},
        "a value that may change decides",
    ),
    "seed": (seed, {}, "it sets the state of the random numbers"),
    "state": (set_state, {}, "it sets the state of the random numbers"),
    "hook": (hook, {}, "it calls register_hook of a tensor"),
    "requires_grad": (ask_for_gradient, {}, "it sets requires_grad of a tensor"),
}


@pytest.mark.parametrize("name", LINES)
def test_the_line_is_told(name: str) -> None:
    run, others, reason = LINES[name]
    analysis = analyse(run, **others)
    found = analysis.frontend, analysis.setup.frontend_reason
    assert found == ("record", f"{reason} at {find_line(run)}")


def initialise_attribute(net: Net, y: Tensor) -> Tensor:
    if not net.done:
        net.bias, net.done = -y.detach().mean(0), True
    return y + net.bias


def count_in_slots(net: Net, y: Tensor) -> Tensor:
    net.counter.turns += 1
    return y * net.counter.turns


def fill_table(net: Net, y: Tensor) -> Tensor:
    if net.table is None:
        net.table = torch.arange(float(y.shape[1]))
    return y + net.table


def seed_python(net: Net, y: Tensor) -> Tensor:
    random.seed(0)
    return y * random.random()


def choose_kernels(net: Net, y: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(y[None], y[None], y[None])


def round_saved(net: Net, y: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.round(), lambda t: t):
        return torch.sin(y)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_doubles(net: Net, y: Tensor) -> Tensor:
    with default_dtype(torch.float64):
        return y * torch.ones(4)


def cast(net: Net, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.other(y).float()


def freeze(net: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        shift = net.other(y)
    return y + shift


def remember(net: Net, y: Tensor) -> Tensor:
    net.last = y.detach()
    return y * 2


def draw_number(net: Net, y: Tensor) -> Tensor:
    return y * random.random()


def drop(net: Net, y: Tensor) -> Tensor:
    return net.other(y) if torch.rand([]) < 0.9 else y * 2


OTHERS = {
    "autocast": (cast, "the code itself turns autocast on or off"),
    "gradients": (freeze, "the code itself turns gradients on or off"),
    "tensor": (remember, "the model changes what it holds in its forward"),
    "random": (draw_number, "it draws random numbers that are not PyTorch's"),
    "drawn way": (drop, "a random draw decides which way it goes"),
    "attribute": (initialise_attribute, "the model changes what it holds in its forward"),
    "counter in slots": (count_in_slots, "the model changes what it holds in its forward"),
    "lazy table": (fill_table, "the model changes what it holds in its forward"),
    "python's seed": (seed_python, "it draws random numbers that are not PyTorch's"),
    "kernels": (choose_kernels, "the code itself sets which kernels run"),
    "saved": (round_saved, "the code itself sets what autograd does with what it saves"),
    "dtype": (make_doubles, "the code itself sets the default dtype"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_graph_would_leave_out_is_told(name: str) -> None:
    run, reason = OTHERS[name]
    random.seed(0)
    random.random()
    analysis = analyse(run)
    assert (analysis.frontend, analysis.setup.frontend_reason) == ("record", reason)


def ask_own(net: Net, y: Tensor) -> Tensor:
    return y * torch.arange(3).max().item()


def check(net: Net, y: Tensor) -> Tensor:
    assert net.count < 10
    if not torch.isfinite(y).all():
        raise ValueError("diverged")
    return y


def warn(net: Net, y: Tensor, ids: Tensor) -> Tensor:
    if 0 in ids:
        text = "an input is"
        text += " padded"
        warnings.warn(text, stacklevel=1)
    return y


def keep_state(net: Net, y: Tensor) -> Tensor:
    torch.get_rng_state()
    return F.dropout(y, 0.5)


SAME = {
    "values of its own": (ask_own, {}),
    "a check": (check, {}),
    "a warning": (warn, {"ids": torch.ones(3, dtype=torch.int64)}),
    "a state that is only read": (keep_state, {}),
}


@pytest.mark.parametrize("name", SAME)
def test_what_every_step_does_alike_has_a_graph(name: str) -> None:
    run, others = SAME[name]
    analysis = analyse(run, **others)
    assert (analysis.frontend, analysis.setup.frontend_reason) == ("fx", "")


def draw_and_raise(net: Net, y: Tensor) -> Tensor:
    random.random()
    np.random.random()
    raise ValueError("never")


def draw(net: Net, y: Tensor) -> Tensor:
    return y * random.random() * np.random.random()


@pytest.mark.parametrize("run", [seed, seed_python, draw, draw_and_raise])
def test_an_analysis_sets_no_state(run: Callable[..., Any]) -> None:
    model = Net(run)
    random.seed(3)
    random.gauss()  # keeps a second number
    np.random.seed(3)
    torch_state, others = torch.get_rng_state(), read_random_states()
    with contextlib.suppress(fxmem.TraceError):
        fxmem.analyze(model, ("3x4",), device="cpu")
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert read_random_states() == others
    assert isinstance(torch.random.default_generator, torch.Generator)


def test_hooks_that_the_first_call_installs_are_in_the_graph() -> None:
    def install(net: Net, y: Tensor) -> Tensor:
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
