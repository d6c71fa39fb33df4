"""Plans applied: to the model, to another of its class, from a file, to the wrong one."""

from __future__ import annotations

import pytest
import torch
from leanest import plan_leanest, read_code
from running import Runs
from steps import check_same_step
from torch import Tensor, nn

import fxmem
from fxmem.planning.plan import Plan, fingerprint_graph

INPUT = "64x32"


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(torch.exp(-layer(x)))
        return x.mean(1)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_leanest(Net(), (INPUT,))


def test_a_plan_from_a_file_is_the_plan(plan: Plan) -> None:
    model = Net()
    read = Plan.from_json(plan.to_json())
    planned = fxmem.apply(model, read, (INPUT,))
    assert read_code(planned) == read_code(fxmem.apply(Net(), plan))
    assert [*planned.state_dict()] == [*Net().state_dict()]
    check_same_step(model, planned, torch.randn(64, 32))


def test_a_plan_from_a_file_needs_inputs_and_a_model_without_one(plan: Plan) -> None:
    read = Plan.from_json(plan.to_json())
    with pytest.raises(fxmem.UsageError) as caught:
        fxmem.apply(fxmem.apply(Net(), plan), read, (INPUT,))
    assert str(caught.value) == "a plan was applied to this model (fxmem.unapply it first)"
    with pytest.raises(fxmem.UsageError) as caught:
        fxmem.apply(Net(), read)
    assert str(caught.value) == (
        "a plan without the graph that it was made on, as from a file, needs inputs to trace the"
        " model with (fxmem.apply(model, plan, args))"
    )


def test_a_plan_from_a_file_fits_whatever_the_loss_and_autocast(plan: Plan) -> None:
    analysis = fxmem.analyze(Net(), (INPUT,), autocast="bf16", loss="mse", device="cuda")
    made = fxmem.plan(analysis, max_overhead_flops=0.3, strategy="schedules")
    assert made.segments
    read = Plan.from_json(made.to_json())
    assert read_code(fxmem.apply(Net(), read, (INPUT,))) == read_code(fxmem.apply(Net(), made))


def test_a_model_whose_graph_cannot_be_run_takes_no_plan() -> None:
    class Bag:
        """An argument that no graph holds."""

        def __init__(self, value: Tensor) -> None:
            self.value = value

    model = Runs(lambda m, x: {"loss": m.net(x).sum(), "bag": Bag(x)}, net=Net())
    analysis = fxmem.analyze(model, (INPUT,), device="cpu")
    assert analysis.frontend == "record"
    plan = Plan(fingerprint_graph(analysis.graph), 1, 1)
    with pytest.raises(fxmem.UsageError) as caught:
        fxmem.apply(model, plan, (INPUT,))
    assert str(caught.value) == (
        "no plan can be applied to this model: no graph holds the Bag in the output"
        " (make the plan with style='modules')"
    )


@pytest.mark.parametrize(
    ("model", "spec", "other"),
    [
        (Net(16), "64x16", "other sizes, of the inputs or of the model's layers"),
        (nn.Linear(32, 32), INPUT, "another model or other inputs"),
        (Net(), "65x32", "other sizes, of the inputs or of the model's layers"),
    ],
)
def test_a_plan_for_another_model_or_input_is_refused(
    plan: Plan, model: nn.Module, spec: str, other: str
) -> None:
    with pytest.raises(fxmem.UsageError) as caught:
        fxmem.apply(model, Plan.from_json(plan.to_json()), (spec,))
    assert str(caught.value) == (f"the plan was made for {other} (make a new one with fxmem.plan)")


def test_a_plan_is_for_a_model_that_was_compiled_meanwhile(plan: Plan) -> None:
    model = Net()
    torch.compile(model, backend="eager")
    assert fxmem.unapply(fxmem.apply(model, plan)) is model


def test_there_is_nothing_to_take_off_a_model_without_a_plan() -> None:
    with pytest.raises(fxmem.UsageError, match=r"^no plan was applied to this Linear \(it is as"):
        fxmem.unapply(nn.Linear(1, 1))
