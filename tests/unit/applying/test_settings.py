"""Attributes, modules and modes that change after a plan was applied change what is run."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.applying import settings as settings_file
from fxmem.applying.settings import Settings, watch_reads
from fxmem.tracing.changes import take_snapshot

pytestmark = pytest.mark.usefixtures("every_warning")


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = 1.0
        self.name = "block"

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks, a weight of the loss that training changes, and a count that nobody reads."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.beta = 0.0
        self.epoch = 0

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = block(y)
        return y + self.beta * x


X = torch.randn(64, 16)


@pytest.fixture
def pair() -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net()
    plan = fxmem.pareto(fxmem.analyze(model, (X,), device="cpu"), time_limit_s=1)[-1]
    assert plan.segments
    return model, fxmem.apply(model, plan)


def test_what_the_code_reads_is_not_baked_in(pair: tuple[Net, Any], traces: list[bool]) -> None:
    model, planned = pair
    for beta in (0.0, 0.5, 0.75):
        model.beta = beta
        if not beta:
            assert torch.equal(planned(X), model(X))
            continue
        with pytest.warns(fxmem.FxmemWarning) as caught:
            assert torch.equal(planned(X), model(X))
        assert [str(warning.message) for warning in caught] == [
            "beta is not what it was for the plan, and the model's code may do other things with"
            " it: this step runs without the plan (one of style 'modules' runs that code)"
        ]
    assert traces == [False], "once is enough to know that it matters"
    model.beta = 0.0
    assert torch.equal(planned(X), model(X))


def test_the_attribute_of_a_block_counts(pair: tuple[Net, Any]) -> None:
    model, planned = pair
    model.blocks[1].scale = 0.25  # type: ignore[assignment]
    with pytest.warns(fxmem.FxmemWarning, match=r"^blocks\.1\.scale is not what it was"):
        assert torch.equal(planned(X), model(X))


def test_what_the_code_does_not_read_may_change_with_every_step(
    pair: tuple[Net, Any], traces: list[bool]
) -> None:
    model, planned = pair
    for epoch in range(4):
        model.epoch = epoch
        assert torch.equal(planned(X), model(X))
    assert traces == [True]


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_does_not_take_what_it_finds_for_what_was_planned(
    pair: tuple[Net, Any], make: Any
) -> None:
    model, planned = pair
    model.beta = 0.5
    copied = make(planned)
    with pytest.warns(fxmem.FxmemWarning, match="this step runs without"):
        assert torch.equal(copied(X), model(X))
    model.beta = 0.0
    assert torch.equal(make(planned)(X), model(X))
    copied.original.beta = 0.0
    assert torch.equal(copied(X), model(X))
    copied.original.beta = model.beta = 0.5
    with pytest.warns(fxmem.FxmemWarning, match="this step runs without"):
        assert torch.equal(copied(X), model(X)), "one value that fits is not that of the copy"


@dataclasses.dataclass(slots=True)
class Config:
    scale: float = 1.0


def test_a_configuration_with_slots_counts() -> None:
    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.config = nn.Linear(16, 16), Config()

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) * self.config.scale

    model = Configured()
    plan = fxmem.pareto(fxmem.analyze(model, (X,), device="cpu"), time_limit_s=0.1)[-1]
    planned = fxmem.apply(model, plan)
    model.config.scale = 0.5
    with pytest.warns(fxmem.FxmemWarning, match=r"^config is not what it was"):
        assert torch.equal(planned(X), model(X))


def test_a_replaced_module_is_run(pair: tuple[Net, Any]) -> None:
    model, planned = pair
    model.blocks[2] = nn.Sequential(model.blocks[2].linear)  # type: ignore[arg-type]
    with pytest.warns(fxmem.FxmemWarning) as caught:
        assert torch.equal(planned(X), model(X))
    assert str(caught[0].message) == (
        "modules of the model were replaced since the plan was applied: this step runs without it"
    )


def test_another_object_of_the_same_class_is_traced(
    pair: tuple[Net, Any], traces: list[bool]
) -> None:
    model, planned = pair
    first = model.blocks[1]
    planned.blocks[1] = other = copy.deepcopy(first)
    for _ in range(2):
        assert torch.equal(planned(X), model(X))
    assert traces == [True], "once, and the plan runs again"
    other.scale = 0.5
    with pytest.warns(fxmem.FxmemWarning, match=r"^blocks\.1\.scale is not what it was"):
        assert torch.equal(planned(X), model(X))
    planned.blocks[1] = copy.deepcopy(other)
    copies = planned, copy.deepcopy(planned)
    for run in (*copies, copy.deepcopy(planned), *copies):
        with pytest.warns(fxmem.FxmemWarning, match="this step runs without") as caught:
            assert torch.equal(run(X), model(X))
        if run is planned:
            assert str(caught[0].message).startswith("modules of the model were replaced since")
    planned.blocks[1] = first
    assert torch.equal(planned(X), model(X))
    assert traces[-1]


def test_leaves_of_the_same_class_are_called_as_they_are(
    pair: tuple[Net, Any], traces: list[bool]
) -> None:
    model, planned = pair
    model.blocks[1].linear = nn.Linear(16, 16)
    assert torch.equal(planned(X), model(X))
    assert not traces


@pytest.mark.parametrize("make", [lambda m: m, copy.deepcopy], ids=["itself", "a copy"])
def test_hooks_that_normalise_a_weight_run_without_the_plan(
    pair: tuple[Net, Any], make: Any
) -> None:
    model, planned = pair
    nn.utils.spectral_norm(model.blocks[1].linear)
    twin = copy.deepcopy(model)
    planned = make(planned)
    for _ in range(2):
        with pytest.warns(fxmem.FxmemWarning, match="^modules of the model were replaced since"):
            assert torch.equal(planned(X), twin(X))


def test_a_block_is_replaced_before_the_model_is_compiled(pair: tuple[Net, Any]) -> None:
    model, planned = pair
    model.blocks[1] = Block()
    model.blocks[1].scale = 0.5  # type: ignore[assignment]
    compiled = torch.compile(planned, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(X), model(X))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "other, name",
    [(Net(3), "blocks.3"), (nn.Linear(16, 16), "the model")],
    ids=["another depth", "another model"],
)
def test_a_plan_is_not_applied_to_another_model(
    pair: tuple[Net, Any], other: nn.Module, name: str
) -> None:
    plan = fxmem.pareto(fxmem.analyze(pair[0], (X,), device="cpu"), time_limit_s=1)[-1]
    with pytest.raises(fxmem.UsageError) as caught:
        fxmem.apply(other, plan)
    assert str(caught.value) == (
        f"the plan was made for another model: {name} differs (make it anew, or have the model"
        " traced again: fxmem.apply(model, plan, args))"
    )
    with pytest.raises(fxmem.UsageError, match="another model or other inputs"):
        fxmem.apply(other, plan, (X,))


@pytest.mark.parametrize("style", ["graph", "modules"])
def test_a_plan_is_applied_once(pair: tuple[Net, Any], style: str) -> None:
    analysis = fxmem.analyze(pair[0], (X,), device="cpu")
    plan = fxmem.pareto(analysis, style=style, time_limit_s=1)[-1]
    for planned in (pair[1], fxmem.apply(pair[0], plan)):
        with pytest.raises(fxmem.UsageError) as caught:
            fxmem.apply(planned, plan)
        assert str(caught.value) == "a plan was applied to this model (fxmem.unapply it first)"


def test_other_attributes_are_traced_again_where_inputs_are_given(pair: tuple[Net, Any]) -> None:
    model = pair[0]
    plan = fxmem.pareto(fxmem.analyze(model, (X,), device="cpu"), time_limit_s=1)[-1]
    other = copy.deepcopy(model)
    other.beta = 0.5
    with pytest.raises(fxmem.UsageError, match="another model: beta differs"):
        fxmem.apply(other, plan)
    assert torch.equal(fxmem.apply(other, plan, (X,))(X), other(X))


def test_the_size_hint_of_the_plan_holds_for_other_sizes() -> None:
    class Positive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.linear(x))
            return h[x[:, 0] > 0] ** 2

    model = Positive()
    analysis = fxmem.analyze(model, (X,), device="cpu", size_hint=32)
    planned = fxmem.apply(model, fxmem.pareto(analysis, time_limit_s=1)[-1])
    x = torch.randn(48, 16)
    assert torch.equal(planned(x), model(x))


def test_backward_computes_again_in_the_mode_of_forward() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 16))
    plan = fxmem.pareto(fxmem.analyze(model, (X,), device="cpu"), time_limit_s=1)[-1]
    assert plan.segments
    gradients = []
    for run in (model, fxmem.apply(model, plan)):
        run.train()
        torch.manual_seed(0)
        loss = run(X).square().sum()
        run.eval()
        model.zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert not any(module.training for module in model.modules())
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("hooked", ["before", "after"])
def test_backward_hooks_of_the_model_are_called(pair: tuple[Net, Any], hooked: str) -> None:
    model, planned = pair
    seen: list[int] = []
    target = model if hooked == "before" else planned
    target.register_full_backward_hook(lambda *_: seen.append(1))
    x = X.clone().requires_grad_()
    planned(x).sum().backward()
    assert seen == [1]


def test_reads_are_watched_for_all_who_ask() -> None:
    linear = nn.Linear(2, 1)
    before = vars(nn.Module).get("__getattribute__")
    with watch_reads() as outer:
        with ThreadPoolExecutor(1) as other_thread, watch_reads() as inner:
            other_thread.submit(lambda: linear.in_features).result()
        assert linear.out_features == 1
    assert inner == {(nn.Linear, "in_features")}
    assert outer >= {(nn.Linear, "in_features"), (nn.Linear, "out_features")}
    assert vars(nn.Module).get("__getattribute__") is before


def test_what_was_in_the_place_of_the_watch_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(module: nn.Module, name: str) -> Any:
        asked.append(name)
        return object.__getattribute__(module, name)

    monkeypatch.setattr(nn.Module, "__getattribute__", ask, raising=False)
    with watch_reads() as seen:
        assert nn.Linear(2, 1).in_features == 2
    assert vars(nn.Module)["__getattribute__"] is ask
    assert "in_features" in asked and (nn.Linear, "in_features") in seen


def test_code_that_takes_all_attributes_reads_each() -> None:
    model = Net(1)
    settings = Settings([("", model)])
    model.epoch = 1
    with watch_reads() as seen:
        assert model.beta == 0.0
    assert not settings.is_read(("", "epoch"), seen)
    with watch_reads() as seen:
        assert vars(model)["beta"] == 0.0
    assert settings.is_read(("", "epoch"), seen)


def test_what_does_not_change_is_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(4)
    shared: list[Any] = [[1], [2]]
    for block in model.blocks:
        block.shared, block.own = shared, [3]
    monkeypatch.setattr(settings_file, "_TOGETHER", 12)
    settings = Settings(model.named_modules())
    counted: list[int] = []

    def count(values: Any) -> Any:
        counted.append(1)
        return take_snapshot(values)

    monkeypatch.setattr(settings_file, "take_snapshot", count)
    assert settings.find_changed() == []
    assert 1 < len(counted) < 8
    model.blocks[2].own = [4]
    assert settings.find_changed() == [("blocks.2", "own")]
    shared[0].append(5)
    assert {*settings.find_changed()} == {
        ("blocks.2", "own"),
        *((f"blocks.{at}", "shared") for at in range(4)),
    }


def test_one_that_comes_where_another_goes_is_seen() -> None:
    model = Net(1)
    settings = Settings([("", model)])
    del model.beta
    model.gain = 1.0
    assert {*settings.find_changed()} == {("", "beta"), ("", "gain")}
