"""Calls that differ from what a graph was traced for run the model's own forward, and say why."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from leanest import plan_leanest
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fxmem

pytestmark = pytest.mark.filterwarnings("error")
X = torch.randn(32, 16)


class Block(nn.Module):
    """Reads a number, a default that instances may have another of, and a dropout's rate."""

    slope = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.shift, self.drop = 0.5, nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.layers(x), self.drop.p, self.drop.training)
        return x + self.slope * y.to(self.layers[0].weight.dtype) + self.shift


class Net(nn.Module):
    """Blocks, a teacher without gradients, and a part that no step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.blocks = nn.BatchNorm1d(16), nn.ModuleList(Block() for _ in range(3))
        self.teacher = nn.Sequential(nn.Linear(16, 16)).requires_grad_(False)
        self.judge = nn.Sequential(Block())
        self.last = nn.Dropout(0.1)

    def forward(
        self, x: Tensor, other: Any = None, *, scale: float = 1.0, double: bool = False
    ) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(x)
        y = self.norm(x)
        for block in self.blocks:
            y = block(y)
        if other is not None:
            y = y + (other["y"] if isinstance(other, dict) else other)
        return self.last((y - taught) * scale * (2 if double else 1))


Pair = tuple[Any, Any]


@functools.cache
def plan_net(autocast: str | None) -> fxmem.Plan:
    return plan_leanest(Net(), (X,), autocast=autocast)


def make(*args: Any, autocast: str | None = None, **kwargs: Any) -> Pair:
    """A model, and its twin with a plan for these arguments."""
    torch.manual_seed(0)
    model = Net()
    is_plain = not args and not kwargs
    plan = plan_net(autocast) if is_plain else plan_leanest(model, args, kwargs)
    return copy.deepcopy(model), fxmem.apply(model, plan)


def run(pair: Pair, *args: Any, **kwargs: Any) -> int:
    """Counts the calls that ran by the plan, of one that computes the same as the model."""
    results = []
    before = pair[1].plan_calls
    for model in pair:
        torch.manual_seed(1)
        model.zero_grad()
        results.append(model(*(args or (X,)), **kwargs))
        results[-1].float().square().mean().backward()
    assert torch.equal(*results)
    for one, other in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)
    return pair[1].plan_calls - before


def assert_planned(pair: Pair, *args: Any, **kwargs: Any) -> None:
    assert run(pair, *args, **kwargs) == 1


def assert_told(cause: str, pair: Pair, *args: Any, **kwargs: Any) -> None:
    with pytest.warns(fxmem.FxmemWarning) as caught:
        assert run(pair, *args, **kwargs) == 0
    assert [str(w.message) for w in caught] == [f"{cause}: this step runs without the plan"]


# -- arguments -------------------------------------------------------------------------------------


def test_arguments_are_those_that_were_traced() -> None:
    pair = make()
    assert_planned(pair)
    assert_planned(pair, X, scale=1.0)
    assert_told("argument scale was not given when the model was traced", pair, X, scale=2.0)
    assert_told("argument other was not given when the model was traced", pair, X, X)
    pair = make(X, X + 1, double=True)
    assert_planned(pair, X, X + 1, double=True)
    assert_planned(pair, X, other=X, double=True)
    assert_told("argument double is not True", pair, X, X)
    assert_told("argument double is not True", pair, X, X, double=1)


KINDS = {
    "dtype": X.double(),
    "rank": X[0],
    "requires_grad": X.clone().requires_grad_(),
    "structure": {"z": X, "y": X},
}


@pytest.mark.parametrize("kind", KINDS)
def test_structure_dtype_rank_and_requires_grad_are_compared(kind: str) -> None:
    pair = make(X, {"y": X + 1})
    assert_planned(pair, X, {"y": X + 2})
    other = KINDS[kind] if kind == "structure" else {"y": KINDS[kind]}
    cause = "argument other has another structure, dtype, rank or requires_grad"
    assert_told(cause, pair, X, other)


def test_two_arguments_that_were_one_tensor_stay_one() -> None:
    pair = make(X, X)
    assert_planned(pair, X, X)
    assert_told("two arguments are not one tensor", pair, X, X + 1)


# -- sizes -----------------------------------------------------------------------------------------


def test_sizes_that_the_graph_does_not_depend_on_may_differ() -> None:
    pair = make(X, X + 1)
    for size in (2, 7, 129):
        assert_planned(pair, torch.randn(size, 16), torch.randn(size, 16))
    one, other = torch.randn(8, 16), torch.randn(1, 16)
    assert_told("dimension 0 of x and dimension 0 of other are not equal", pair, one, other)
    many = torch.randn(130, 16)
    assert_told("dimension 0 of x is not within 2 to 129", pair, many, many)


# -- what surrounds a call -------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [None, "bf16"])
@pytest.mark.parametrize(
    "make_copy", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_autocast_is_that_of_the_analysis(autocast: str | None, make_copy: Any) -> None:
    model, planned = make(autocast=autocast)
    pair = model, make_copy(planned)
    now: Any = torch.autocast("cpu", torch.bfloat16)
    with contextlib.nullcontext() if autocast is None else now:
        assert_planned(pair)
    with now if autocast is None else contextlib.nullcontext():
        assert_told(f"autocast is not {'torch.bfloat16' if autocast else 'off'}", pair)


def test_a_step_without_the_plan_is_told_at_the_call() -> None:
    _, planned = make()
    around = nn.Sequential(planned)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.graph.disable_saved_tensors_hooks("no segment can run again"):
            planned(X)  # the call
        planned.last.register_forward_hook(lambda *_: None)
        set_slope(fxmem.unapply(planned))
        around(X)  # the call
    lines, first = inspect.getsourcelines(test_a_step_without_the_plan_is_told_at_the_call)
    calls = {first + at for at, line in enumerate(lines) if line.endswith("# the call\n")}
    assert {(w.filename, w.lineno) for w in caught} == {(__file__, line) for line in calls}
    assert {w.category for w in caught} == {fxmem.FxmemWarning}


# -- modules ---------------------------------------------------------------------------------------

Change = Callable[[Any], object]


def set_slope(model: Any) -> None:
    model.blocks[1].slope = 0.5


def add_block(model: Any) -> None:
    model.blocks.append(nn.Identity())


def replace_norm(model: Any) -> None:
    model.norm = nn.Identity()


def own_forward(model: Any) -> None:
    model.blocks[1].forward = lambda x: x * 2


CHANGES: dict[str, Change] = {
    "attribute blocks.1.shift has changed since the plan was applied": (
        lambda model: setattr(model.blocks[1], "shift", 2.0)
    ),
    "attribute blocks.1.drop.p has changed since the plan was applied": (
        lambda model: setattr(model.blocks[1].drop, "p", 0.5)
    ),
    "attribute blocks.1.slope was set after the plan was applied": set_slope,
    "attribute blocks.1.forward has changed since the plan was applied": own_forward,
    "module 'blocks.1' is in eval mode, and the plan was traced in train mode": (
        lambda model: setattr(model.blocks[1], "training", False)
    ),
    "module 'blocks.2.drop' is in eval mode, and the plan was traced in train mode": (
        lambda model: model.blocks[2].drop.eval()
    ),
    "modules of blocks were replaced after the plan was applied": add_block,
    "modules of the model were replaced after the plan was applied": replace_norm,
    "teacher.0.weight was frozen when the model was traced": (
        lambda model: model.requires_grad_(True)
    ),
    "the graph does not call blocks.1, which has hooks": (
        lambda model: model.blocks[1].register_forward_hook(lambda m, args, y: y * 2)
    ),
}


@pytest.mark.parametrize("cause", CHANGES)
def test_changes_of_the_modules_whose_code_was_traced(cause: str) -> None:
    model, planned = make()
    pair = model, copy.deepcopy(planned)
    assert_planned(pair)
    for each in (model, fxmem.unapply(pair[1])):
        CHANGES[cause](each)
    assert_told(cause, pair)
    if "has changed" in cause:
        assert_told(cause, (model, copy.deepcopy(pair[1])))  # which knows what attributes were


def test_what_modules_read_in_each_call_may_change() -> None:
    pair = make()
    for model in (pair[0], fxmem.unapply(pair[1])):
        model.norm.eval()
        model.last.p = 0.5
        model.blocks[0].requires_grad_(False)
        model.judge[0].shift = 3.0
        model.judge.eval()
        model.judge[0].register_forward_hook(lambda m, args, y: y)
        model.blocks[0].layers[1].register_forward_hook(lambda m, args, y: y * 2)
    assert_planned(pair)


def test_hooks_on_all_modules() -> None:
    pair = make()
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, y: None)
    try:
        assert_told("the graph does not call all modules, and there are hooks on all", pair)
    finally:
        handle.remove()
    with FlopCounterMode(display=False):
        assert_planned(pair)


def test_a_compiled_model_is_guarded_too() -> None:
    torch.compiler.reset()
    model, planned = make()
    torch.manual_seed(1)
    expected = model(X)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled: Any = torch.compile(planned, backend="eager")
        assert torch.equal(compiled(X), expected)
    assert planned.plan_calls == 1
    set_slope(model)
    set_slope(fxmem.unapply(planned))
    with pytest.warns(fxmem.FxmemWarning, match=r"attribute blocks\.1\.slope was set"):
        torch.manual_seed(1)
        found = compiled(X)
    torch.manual_seed(1)
    assert torch.equal(found, model(X))
