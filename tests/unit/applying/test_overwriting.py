"""In-place operations of plans: the model's results for all sizes, settings and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from leanest import build_module, read_code
from running import Call
from steps import check_same_step
from torch import Tensor, nn
from torch.nn import functional as F

import fxmem
from fxmem.applying.runtime import (
    overwrite_by_function,
    overwrite_by_method,
    overwrite_by_module,
)
from fxmem.planning.inplace.inplace_changes import find_inplace
from fxmem.planning.model.index import build_index
from fxmem.planning.plan import GRAPH, Plan


class Net(nn.Module):
    """A convolution, and a function of its result."""

    def __init__(self, function: Callable[..., Any], *, module: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.module = module
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        x = self.linear(inputs[0])
        if self.module is not None:
            x = self.module(x)
        return self.function(x, *inputs[1:]) + 1.0


def overwrite(model: nn.Module, *shapes: str) -> Any:
    """The model with all that it can do in place, for inference."""
    analysis = fxmem.analyze(model, shapes, device="cpu", mode="infer")
    changes = find_inplace(build_index(analysis.graph))
    assert changes
    return build_module(model.eval(), analysis.fx_graph, (), changes, mode="infer").eval()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "method": lambda x: x.relu(),
    "of torch": lambda x: torch.sub(input=x, other=2.0),
    "with scale": lambda x: torch.add(x, 2.0, alpha=3),
    "operator": lambda x: (x + 1) * 2 - 3,
    "reflected": lambda x: 2 * (1 + x),
    "second value": lambda x: torch.ones(8).add(x),
    "flag given": lambda x: F.hardtanh(x, -0.5, 0.5, False),
    "flag of relu": lambda x: F.relu(x, False),
    "flag by name": lambda x: F.relu(x, inplace=False),
    "leaky": lambda x: F.leaky_relu(x, 0.3),
    "dropout": lambda x: F.dropout(x, 0.3, True),
    "torch's dropout": lambda x: torch.dropout(x, 0.3, train=True),
    "mask": lambda x: x.masked_fill(torch.eye(8, dtype=torch.bool), -1.0),
    "itself": lambda x: x.addcmul(x, x, value=0.5),
    "square": lambda x: x.neg().clamp(min=-0.2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_form_computes_the_same_in_place(name: str) -> None:
    model = Net(FUNCTIONS[name])
    applied = overwrite(model, "8x8")
    assert "overwrite_by" in read_code(applied)
    check_same_step(model, applied, torch.randn(8, 8), train=False)


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Hardswish(), nn.Tanh(), nn.ELU(2)])
def test_modules_are_left_as_they_are_and_read_each_time(module: nn.Module) -> None:
    model = Net(lambda x: x, module=module)
    applied = overwrite(model, "8x8")
    assert "overwrite_by_module(module" in read_code(applied)
    before = dict(vars(module))
    check_same_step(model, applied, torch.randn(8, 8), train=False)
    assert vars(module) == {**before, "training": module.training}
    if isinstance(module, nn.ELU):
        module.alpha = 3.0
        check_same_step(model, applied, torch.randn(8, 8), train=False)


def test_what_takes_a_value_more_than_once_takes_what_is_promised() -> None:
    def run(x: Tensor) -> Tensor:
        x.sin().addcmul(x, x)
        y = x.exp()
        y.addcmul(y, y)
        is_large = x > 1
        is_large.masked_fill(is_large, False)
        return x.repeat(2, 1)

    model, x = Call(run), torch.randn(16, 16)
    analysis = fxmem.analyze(model, (x,), device="cpu", mode="infer")
    plan = fxmem.plan(analysis)
    assert {change.node for change in plan.inplace} == {"addcmul", "addcmul_1"}
    applied = fxmem.apply(model, plan)
    recorded = fxmem.analyze(applied, (x,), device="cpu", mode="infer")
    assert recorded.peak_bytes == plan.peak_bytes
    check_same_step(model, applied, x, train=False)


@torch.no_grad()
def test_it_does_run_in_place() -> None:
    x = torch.randn(4, 4)
    assert overwrite_by_method("mul_", x, 2.0) is x
    assert overwrite_by_function("relu", x) is x
    assert overwrite_by_function("dropout", x, p=0.5, train=True) is x
    assert overwrite_by_module(nn.Sigmoid(), x) is x
    assert overwrite_by_module(nn.Dropout(), x) is x


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_inputs_and_parameters_are_never_changed(batch: int) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        y = y.transpose(0, 1).contiguous()  # of one row, its input itself
        return F.relu(y).transpose(0, 1) + (x * 2).relu()

    model = Net(function, module=nn.Dropout())  # with nothing to drop, its input itself
    applied = overwrite(model, "2x8", "2x8")
    inputs = (torch.randn(batch, 8), torch.randn(batch, 8))
    before = [t.clone() for t in (*inputs, *model.parameters())]
    check_same_step(model, applied, *inputs, train=False)
    assert all(map(torch.equal, before, (*inputs, *model.parameters())))


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu, self.last = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sub(self.last(self.relu(self.linear(x))), 1.0)


def keep_all(seen: list[tuple[Tensor, Tensor]], *given: Any) -> None:
    """Keeps tensors of a hook beside copies of them, as one that gathers features does."""
    tensors = [t for each in given for t in (each if isinstance(each, tuple) else (each,))]
    seen.extend((t, t.clone()) for t in tensors if isinstance(t, Tensor))


@pytest.mark.parametrize(
    ("name", "kind", "is_seen"),
    [
        ("linear", "forward_hook", True),
        ("relu", "forward_hook", True),
        ("last", "forward_hook", True),
        ("linear", "forward_pre_hook", False),
        ("relu", "forward_pre_hook", True),
    ],
)
def test_what_hooks_have_seen_stays_as_they_saw_it(name: str, kind: str, is_seen: bool) -> None:
    model = Hooked()
    applied = overwrite(model, "4x8")
    seen: list[tuple[Tensor, Tensor]] = []
    module = model.get_submodule(name)
    handle = getattr(module, f"register_{kind}")(lambda _, *given: keep_all(seen, *given))
    if is_seen:
        with (
            torch.no_grad(),
            pytest.warns(fxmem.FxmemWarning, match=f"hooks of {name} may keep a value that"),
        ):
            applied(torch.randn(4, 8))
    else:
        with torch.no_grad():
            applied(torch.randn(4, 8))
    assert seen and all(torch.equal(now, then) for now, then in seen)
    handle.remove()
    check_same_step(model, applied, torch.randn(4, 8), train=False)


def test_a_plan_of_inference_is_for_inference_and_comes_back_from_a_file() -> None:
    model = Hooked()
    analysis = fxmem.analyze(model, ("4x8",), device="cpu", mode="infer")
    plan = fxmem.plan(analysis)
    assert (plan.mode, plan.style) == ("infer", GRAPH)
    read = Plan.from_json(plan.to_json())
    assert read == plan
    applied = fxmem.apply(model, read, ("4x8",))
    assert read_code(applied) == read_code(fxmem.apply(model, plan))
    x = torch.randn(4, 8)
    for train, grad in ((False, False), (False, True), (True, False), (True, True)):
        with torch.set_grad_enabled(grad):
            assert torch.equal(applied.train(train)(x), model(x))
        assert applied.plan_calls == 1, "only the first is what the plan is for"
