"""Two models side by side: what is the same, and what is not."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from running import Runs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.errors import TraceError, UsageError
from fxmem.verifying.proof import verify_target
from fxmem.verifying.verification import Difference, Kind


class Net(nn.Module):
    """Normalises and draws random numbers; a part of it can be computed again in backward."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.outer = nn.Linear(width, width)
        self.generator = torch.Generator().manual_seed(3)
        self.draws = "torch"

    def draw(self, x: Tensor) -> Tensor:
        if self.draws == "torch":
            return F.dropout(x, 0.5, self.training)
        if self.draws == "generator":
            return x * torch.rand(x.shape, generator=self.generator)
        return x * (random.random() + np.random.rand())

    def middle(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.norm(self.draw(self.inner(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.middle(x))


class Changed(nn.Module):
    """A net that computes something else, with the same parameters, as a wrong plan would."""

    def __init__(self, net: Net, forward: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        for name in ("_parameters", "_buffers", "_modules"):
            self.__dict__[name] = net.__dict__[name]
        self.__dict__["net"], self.change = net, forward

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.__dict__["net"].train(self.training), x)


def recompute(net: Net, x: Tensor, **options: Any) -> Tensor:
    y = checkpoint(net.middle, x, use_reentrant=False, **options)
    return net.outer(y)


def count_twice(net: Net, x: Tensor) -> Tensor:
    net.norm.num_batches_tracked += 1
    return net(x)


def draw_more(net: Net, x: Tensor) -> Tensor:
    y = net(x)
    torch.rand(1)
    return y


def shift_mean(net: Net, x: Tensor) -> Tensor:
    y = net(x)
    net.norm.running_mean.data[2] += 1  # which backward has saved
    return y


def change_input(net: Net, x: Tensor) -> Tensor:
    y = net(x.clone())
    x[1, 2] += 1
    return y


def find_differences(
    change: Callable[[Net, Tensor], Tensor], draws: str = "torch", **options: Any
) -> list[Difference]:
    torch.manual_seed(1)
    net = Net()
    net.draws = draws
    report = fxmem.verify(net, Changed(net, change), "5x6", **options)
    assert report.equal is (not report.differences)
    assert report.notes == ()
    return [*report.differences]


def list_kinds(differences: list[Difference]) -> list[tuple[int, str, str]]:
    return [(d.step, d.kind.value, d.name) for d in differences]


@pytest.mark.parametrize("draws", ["torch", "generator", "python"])
def test_drawing_is_no_difference(draws: str) -> None:
    assert find_differences(Net.forward, draws) == []


def test_a_checkpoint_updates_statistics_twice() -> None:
    differences = find_differences(recompute)
    assert list_kinds(differences) == [
        (1, "buffer", "norm.running_mean"),
        (1, "buffer", "norm.running_var"),
        (1, "buffer", "norm.num_batches_tracked"),
    ]
    count = differences[-1]
    assert (count.index, count.baseline, count.planned) == ((), "1", "2")
    assert count.max_difference == 1


def test_a_checkpoint_that_draws_another_mask_gives_other_gradients() -> None:
    differences = find_differences(lambda net, x: recompute(net, x, preserve_rng_state=False))
    names = list_kinds(differences)
    assert names[0] == (1, "gradient", "inner.weight")
    assert (1, "random state", "torch") in names
    assert not any(kind in ("output", "loss") for _, kind, _ in names)
    assert differences[0].elements > 1
    assert differences[0].max_difference is not None and differences[0].max_difference > 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (count_twice, (1, "buffer", "norm.num_batches_tracked")),
        (draw_more, (1, "random state", "torch")),
        (shift_mean, (1, "buffer", "norm.running_mean")),
        (change_input, (1, "input", "args[0]")),
    ],
)
def test_one_thing_alone_differs(
    change: Callable[[Net, Tensor], Tensor], expected: tuple[int, str, str]
) -> None:
    assert list_kinds(find_differences(change)) == [expected]


def test_a_difference_in_the_optimizer_alone() -> None:
    betas = itertools.cycle([0.9, 0.5])

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0, betas=(next(betas), 0.999))

    layer = nn.Linear(3, 2)
    report = fxmem.verify(layer, layer, "4x3", optimizer=make)
    names = [(d.kind, d.name) for d in report.differences]
    assert names == [
        (Kind.OPTIMIZER_STATE, "weight.exp_avg"),
        (Kind.OPTIMIZER_STATE, "bias.exp_avg"),
        (Kind.OPTIMIZER_STATE, "group 0.betas[0]"),
    ]


def test_a_model_that_fails_is_a_difference() -> None:
    def fail(net: Net, x: Tensor) -> Tensor:
        raise ValueError("no such block")

    torch.manual_seed(1)
    net = Net()
    report = fxmem.verify(net, Changed(net, fail), "5x6")
    (difference,) = report.differences
    assert difference.kind is Kind.ERROR
    assert difference.cause.startswith("ValueError: no such block at ")
    assert (report.planned.peak_bytes, report.planned.step_s) == (None, None)
    assert report.baseline.peak_bytes is not None


def test_everything_is_as_before() -> None:
    torch.manual_seed(2)
    net = Net().eval()
    net.draws = "generator"
    net(torch.ones(2, 6)).sum().backward()
    x = torch.randn(5, 6, requires_grad=True)
    state, generator = copy.deepcopy(net.state_dict()), net.generator.get_state()
    gradients = [p.grad for p in net.parameters()]
    values = [g.clone() for g in gradients if g is not None]
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    planned = Changed(net, draw_more).eval()
    assert not fxmem.verify(net, planned, (x,), optimizer="adam").equal
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert torch.equal(net.generator.get_state(), generator)
    assert [p.grad for p in net.parameters()] == gradients
    assert all(torch.equal(*pair) for pair in zip(values, gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == numbers[1:]
    assert not any(m.training for m in (*net.modules(), planned))
    assert x.grad is None


def plan_net(spec: str = "512x6", **options: Any) -> tuple[Net, nn.Module, fxmem.Plan]:
    net = Net()
    plan = fxmem.plan(fxmem.analyze(net, spec, **options), max_overhead_flops=0.5, time_limit_s=0.2)
    return net, fxmem.apply(net, plan), plan


def test_a_promise_that_is_broken_is_told() -> None:
    net, planned, plan = plan_net(device="cpu")
    for share in (0.9, 1.1):
        changed: Any = type(planned)  # what is set on the object is set on the model
        changed.plan = replace(plan, peak_bytes=int(share * plan.peak_bytes))
        report = fxmem.verify(net, planned, "512x6", steps=1)
        assert report.equal and not report.keeps_promise
        assert report.promise is not None
        assert report.promise.deviation == pytest.approx(1 / share - 1, rel=0.05)


@pytest.mark.parametrize("plan_options", [{"device": "cuda"}, {"device": "cpu"}])
def test_a_plan_for_another_step_is_held_against_the_planner(plan_options: dict[str, Any]) -> None:
    net, planned, plan = plan_net(**plan_options)
    report = fxmem.verify(net, planned, "512x6", steps=1, optimizer="adam")
    assert report.promise is not None
    assert report.promise.is_kept and not report.promise.is_plans_own
    assert report.promise.peak_bytes != plan.peak_bytes
    (note,) = report.notes
    assert note.startswith("The plan's own promise, ")
    assert note.endswith(". Compared is what the planner says of this one.")
    report = fxmem.verify(net, planned, "500x6", steps=1)
    assert report.promise is None and report.keeps_promise
    assert report.notes == (
        "No peak is promised: the plan was made for other inputs or another model.",
    )


def test_inference_is_compared_too() -> None:
    net = Net()
    report = fxmem.verify(net, Changed(net, Net.forward), "5x6", mode="infer", optimizer="adam")
    assert (report.equal, report.mode) == (True, "infer")
    assert not report.compared.keys() & {"loss", "gradient", "optimizer state"}
    other = fxmem.verify(net, Changed(net, draw_more), "5x6", mode="infer")
    assert list_kinds([*other.differences]) == [(1, "random state", "torch")]


def test_what_is_compared_is_counted() -> None:
    net = Net()
    report = fxmem.verify(net, net, "5x6", optimizer="adam", loss="mse", steps=2)
    parameters = len([*net.parameters()])
    settings = len(torch.optim.Adam(net.parameters()).param_groups[0])  # two betas, no parameters
    assert report.compared == {
        "output": 1,
        "loss": 1,
        "gradient": parameters,
        "buffer": 3,
        "parameter": parameters,
        "optimizer state": 3 * parameters + settings,  # step, exp_avg and exp_avg_sq of each
        "input": 1,
        "random state": 3,
    }
    assert report.steps == 2


@pytest.mark.parametrize(
    ("layer", "x", "options"),
    [
        (nn.Linear(3, 2), fxmem.TensorSpec((4, 3), requires_grad=True), {"autocast": "bf16"}),
        (nn.Embedding(2, 3), "4x5:int64", {}),  # integers are valid indices
        (nn.Embedding(9, 3, sparse=True), torch.tensor([1, 1, 5]), {}),
    ],
)
def test_inputs_and_gradients_of_many_kinds(
    layer: nn.Module, x: Any, options: dict[str, Any]
) -> None:
    report = fxmem.verify(layer, layer, (x,), **options)
    count = len([*layer.parameters()]) + isinstance(x, fxmem.TensorSpec)
    assert report.equal and report.compared["gradient"] == count
    assert report.autocast == ("bfloat16" if options else None)


LAYER = nn.Linear(3, 2)
REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (LAYER, nn.Linear(3, 2, bias=False), {}, "the models differ in their parameters: only one has"),
    (LAYER, nn.Linear(3, 4), {}, "the models differ in their parameters: 'weight' has another"),
    (LAYER, LAYER, {"mode": "eval"}, "unknown mode 'eval' (did you mean infer?)"),
    (LAYER, LAYER, {"steps": 0}, "steps must be an integer of 1 or more, got 0"),
    (LAYER, LAYER, {"seed": -1}, "seed must be an integer of 0 or more, got -1"),
    (LAYER, LAYER, {"autocast": "fp16"}, "verify does not support autocast to float16 (bf16"),
    (LAYER, LAYER, {"optimizer": "adam8bit"}, "adam8bit only models memory and updates nothing"),
    (nn.Linear(3, 2, device="meta"), LAYER, {}, "'weight' has no values to compute with (pass"),
    (nn.LazyLinear(2), LAYER, {}, "'weight' has no values to compute with (pass"),
    (
        nn.Linear,
        LAYER,
        {},
        "the model is the class Linear, not an instance of it (pass Linear(...))",
    ),
]


@pytest.mark.parametrize(("model", "other", "options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(model: Any, other: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        fxmem.verify(model, other, "4x3", **options)
    assert str(caught.value).startswith(message)


def test_a_step_that_fails_by_itself_is_an_error() -> None:
    def look_up(model: Runs, ids: Tensor) -> Tensor:
        return model.words(ids)  # type: ignore[no-any-return]

    model = Runs(look_up, words=nn.Embedding(1, 3))
    with pytest.raises(TraceError) as caught:
        fxmem.verify(model, model, "64:int64")
    assert str(caught.value).startswith("the model's step fails: IndexError: index out of range")
    assert f" at test_verify.py:{look_up.__code__.co_firstlineno + 1}" in str(caught.value)
    assert caught.value.hint == (
        "inputs without values are random, integers 0 or 1; fxmem.verify takes tensors too"
    )


TARGET = "torch.nn:Linear(4, 2)"


def test_a_target_is_run_in_the_mode_of_its_plan() -> None:
    plan = fxmem.plan(fxmem.analyze(TARGET, "8x4", mode="infer", device="cpu"))
    args = (fxmem.TensorSpec((8, 4)),)
    before = torch.get_rng_state()
    report = verify_target(TARGET, plan, args, {}, device="cpu", dtype="bfloat16", steps=1)
    assert (report.equal, report.mode, report.model) == (True, "infer", TARGET)
    assert (report.device, report.inputs) == ("cpu", ("8x4:bfloat16",))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "there is no GPU to verify on (--device cpu)"),
        ({"dtype": "int64"}, "a model cannot be cast to int64 (bf16, fp16, float32 or float64)"),
        ({"optimizer": "adamm"}, "unknown optimizer 'adamm' (did you mean adam"),
    ],
)
def test_a_target_that_cannot_be_run_so(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan = fxmem.Plan("", 1, 1)
    with pytest.raises(UsageError) as caught:
        verify_target(TARGET, plan, (fxmem.TensorSpec((8, 4)),), {}, **options)
    assert str(caught.value).startswith(message)


class Calling(nn.Linear):
    """Calls a function with its output and the number of the call, or another number."""

    def __init__(self, change: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__(3, 3)
        self.calls, self.change = 0, change

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.change(super().forward(x), self.calls)


def test_a_difference_in_a_later_step() -> None:
    late = Calling(lambda y, calls: y + (calls > 2))
    report = fxmem.verify(nn.Linear(3, 3), late, "4x3", steps=5)  # two models without a tensor
    assert (report.steps, {d.step for d in report.differences}) == (3, {3})
    assert json.loads(report.to_json()) == report.to_dict()
    assert fxmem.verify(nn.Linear(3, 3), late, "4x3", steps=2).equal


def test_a_model_that_is_not_deterministic_is_told() -> None:
    noisy = Calling(lambda y, _: y * random.SystemRandom().random())
    report = fxmem.verify(noisy, noisy, "4x3")
    assert not report.equal
    assert report.notes == (
        "The model is not deterministic: run again from the same state, it differs from itself "
        "(output output).",
    )


class Scaled(nn.Linear):
    def forward(self, x: Tensor, scale: int = 1) -> Tensor:
        return super().forward(x).tanh() * scale


def test_a_plan_for_other_arguments_proves_nothing() -> None:
    model = Scaled(3, 3)
    planned = fxmem.apply(model, fxmem.plan(fxmem.analyze(model, "4x3", mode="infer")))
    with pytest.raises(UsageError, match="this step runs without the plan"):
        fxmem.verify(model, planned, "4x3", {"scale": 2}, mode="infer")


def test_peaks_are_those_of_the_same_random_numbers() -> None:
    model = Calling(lambda y, _: y.sin().cos() if torch.rand(()) < 0.5 else y)
    found = fxmem.verify(model, copy.deepcopy(model), "4096x3")
    assert found.baseline.peak_bytes == found.planned.peak_bytes
