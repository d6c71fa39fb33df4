"""A plan in one line: made at once for inputs that are given, else at the first training step."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from steps import train_steps
from torch import Tensor, nn

import fxmem
from fxmem.applying import auto as auto_module

pytestmark = pytest.mark.usefixtures("quick_search")

LIMIT: dict[str, Any] = {"max_overhead": 1.0, "device": "cpu"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Dropout(0.3))
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.feed(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@fxmem.auto(**LIMIT)
class Decorated(Net):
    """Plans itself."""


def take_steps(model: nn.Module, sizes: tuple[int, ...] = (6, 6, 3)) -> list[Tensor]:
    torch.manual_seed(1)
    return train_steps(model, [torch.randn(size, 8) for size in sizes])


def make(kind: Any = Net) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = kind()
    return model


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("style", ["graph", "modules"])
def test_with_inputs_the_plan_is_applied_at_once(style: str) -> None:
    model = make()
    expected = take_steps(copy.deepcopy(model))
    planned = fxmem.auto(model, (torch.zeros(6, 8),), style=style, **LIMIT)
    assert planned is not model
    assert planned.plan.style == style
    assert planned.plan.segments
    assert planned.plan.peak_bytes < planned.plan.baseline_peak_bytes
    check_same(take_steps(planned), expected)


def test_a_step_that_fits_keeps_the_model() -> None:
    model = make()
    assert fxmem.auto(model, "6x8", budget="1GiB", device="cpu") is model
    assert fxmem.auto(model, kwargs={"x": "6x8"}, budget=2**30, device="cpu") is model
    assert not hasattr(model, "plan")


def test_without_a_limit_it_is_what_the_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    assert fxmem.auto(model, "6x8", gpu="rtx4090") is model
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    properties = [SimpleNamespace(total_memory=memory) for memory in (10, 20)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    with pytest.raises(fxmem.InfeasibleError, match="no plan within 20 B"):
        fxmem.auto(model, "6x8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(fxmem.UsageError) as error:
        fxmem.auto(make(), "6x8")
    assert str(error.value) == (
        "a plan needs a limit, and there is no GPU whose memory could be one"
        " (budget='8GiB', gpu='a100-40gb' or max_overhead=0.1)"
    )


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Tanh(), {"max_overhead": 0.1}, "budget and max_overhead are two limits (give one of"),
        (3, {}, "int is not a model, and makes none (a module, a class of modules, or a function"),
    ],
)
def test_what_is_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(fxmem.UsageError) as error:
        fxmem.auto(model, budget="1GiB", **options)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("style", ["graph", "modules"])
@pytest.mark.parametrize("way", ["model", "class", "function"])
def test_without_inputs_the_first_step_is_planned_for(
    way: str, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_for = []
    plan_step = auto_module._plan_step

    def watch(planning: Any, options: Any, model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        planned: Any = plan_step(planning, options, model, args, kwargs)
        planned_for.append((tuple(args[0].shape), planned.plan.segments, planned.plan.style))
        return planned  # type: ignore[no-any-return]

    monkeypatch.setattr(auto_module, "_plan_step", watch)
    expected = take_steps(make())

    class Own(Net):
        pass

    if way == "model":
        model = fxmem.auto(make(Own), style=style, **LIMIT)
    else:
        maker: Any = Own if way == "class" else (lambda: Own())
        model = make(fxmem.auto(maker, style=style, **LIMIT))
    assert isinstance(model, Own)
    assert [*model.state_dict()] == [*Net().state_dict()]
    with torch.no_grad():
        model(torch.randn(5, 8))
    state = model.state_dict()
    model.load_state_dict(make().state_dict())
    assert [*state] == [*model.state_dict()]
    assert planned_for == [], "no step yet"
    check_same(take_steps(model), expected)
    ((shape, segments, made),) = planned_for
    assert model.plan.segments == segments
    assert (shape, made) == ((6, 8), style)
    assert segments


@pytest.mark.parametrize("style", ["graph", "modules"])
def test_a_model_that_planned_itself_is_the_model(style: str) -> None:
    plain = make()
    model = fxmem.auto(copy.deepcopy(plain), style=style, **LIMIT)
    for net in (plain, model):
        take_steps(net)
        net.eval()
    x = torch.randn(4, 8)
    assert torch.equal(model(x), plain(x))
    for net in (plain, model):
        net.train()
        net.blocks[1].norm.eval()
        net.blocks[0].feed[2].p = 0.7
        net.blocks[1].requires_grad_(False)
    check_same(take_steps(model), take_steps(plain))
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    take_steps(model, (2,))
    assert calls == [1]


@pytest.mark.parametrize(("style", "is_planned"), [("graph", True), ("modules", False)])
def test_copies_plan_themselves(style: str, is_planned: bool) -> None:
    torch.manual_seed(0)
    model = fxmem.auto(Net(), style=style, **LIMIT)
    if is_planned:
        take_steps(model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = take_steps(model)
    for other in copies:
        assert isinstance(other, Net)
        assert other.blocks[0].back.weight is not model.blocks[0].back.weight
        check_same(take_steps(other), expected)
        assert other.plan.segments


def test_a_class_with_a_decorator_stays_itself() -> None:
    model = make(Decorated)
    assert type(model) is Decorated
    check_same(take_steps(model), take_steps(make()))
    assert model.plan.segments
    assert type(pickle.loads(pickle.dumps(model))) is Decorated


def test_analyses_and_transforms_of_functions_are_no_steps() -> None:
    x = torch.randn(6, 8)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model = fxmem.auto(copy.deepcopy(plain), **LIMIT)
    peaks = [fxmem.analyze(each, ("6x8",), device="cpu").peak_bytes for each in (model, plain)]
    torch.func.grad(lambda x: model(x).sum())(x)
    assert peaks[0] == peaks[1] and not hasattr(model, "plan")
    model(x)
    assert isinstance(model.plan, fxmem.Plan)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("way", "style"), [("model", "modules"), ("class", "graph")])
def test_a_model_from_which_the_plan_is_taken_makes_no_other(
    way: str, style: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Net):
        pass

    if way == "class":
        fxmem.auto(Own, style=style, **LIMIT)
    model = make(Own)
    if way == "model":
        fxmem.auto(model, style=style, **LIMIT)
    take_steps(model, (6,) * steps)
    assert hasattr(model, "plan") is bool(steps)
    original = fxmem.unapply(model)
    assert type(original) is Own
    assert not hasattr(original, "plan")
    monkeypatch.setattr(auto_module, "run_by_plan", None)  # what asks for a plan fails
    plain = make()
    plain.load_state_dict(original.state_dict())
    expected = take_steps(plain)
    for run in (copy.deepcopy(original), original):
        check_same(take_steps(run), expected)
        assert not hasattr(run, "plan")


def test_a_step_is_planned_with_the_autocast_that_it_runs_under() -> None:
    x = torch.randn(64, 8)
    model = fxmem.auto(make(), **LIMIT)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().sum()
    loss.backward()
    analysis = fxmem.analyze(make(), (x,), device="cpu", autocast="bf16")
    assert model.plan.baseline_peak_bytes == analysis.peak_bytes
