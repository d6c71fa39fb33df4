"""The graph of a model runs on real tensors, at other sizes than it was traced at."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from running import Runs
from torch import Tensor, fx, nn

import fxmem
from benchmarks.cases import vision
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.fakes.swapping import swap_in_fakes
from fxmem.kernels.cpu import CPU
from fxmem.training.loops import infer
from fxmem.training.losses import resolve_loss
from fxmem.training.step import Recording, record_step
from fxmem.training.training import Step


class Sizes(nn.Module):
    """Asks for sizes in every way, and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> dict[str, object]:
        batch, steps, width = x.shape
        y = self.linear(x.reshape(batch * steps, width)).view(x.size(0), -1, width)
        y = y + torch.arange(steps, device=x.device)[None, :, None].expand(batch, -1, 1)
        halves = y.view(batch, steps, 2, width // 2).transpose(1, 2)
        mask = torch.zeros(batch, 1, 1) + torch.ones(x.numel() // (steps * width), 1, 1)
        first = y[: batch - 1] * self.scale
        pairs = y.new_zeros((math.prod(x.shape[:2]) + batch % 2, 2))
        return {"halves": halves * 2, "rest": (first, mask, pairs), "last": y.chunk(2, dim=1)[-1]}


class InPlace(nn.Module):
    """Writes into what it made, through views and items."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True))
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += self.shift[:, None, None]
        y[:, 0] = 1
        y[:, 1:].mul_(2).clamp_(max=3.0)
        return 1 - y.T.mT if y.shape[0] < 0 else 1 - y


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "sizes": (Sizes, (2, 4, 6)),
    "in place": (InPlace, (2, 3, 8, 8)),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1),
        (2, 5, 8),
    ),
    "shufflenet": (vision("shufflenet_v2_x0_5"), (2, 3, 64, 64)),
}


def record(model: nn.Module, shape: tuple[int, ...], **settings: bool) -> Recording:
    mode = make_fake_mode()
    with mode, swap_in_fakes(model, mode, (torch.empty(shape),), train=False) as (args, kwargs, _):
        step = Step(model, args, kwargs, False, resolve_loss(None), None, infer)
        return record_step(step, CPU, **settings)


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if dataclasses.is_dataclass(a) and not is_same(vars(a), vars(b)):
        return False
    if isinstance(a, dict):
        return type(a) is type(b) and is_same([*a.items()], [*b.items()])
    if isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and (dataclasses.is_dataclass(a) or bool(a == b))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_the_graph_gives_the_model_s_results(name: str) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    recording = record(model, shape)
    assert recording.reason == ""
    replayed = fx.GraphModule(model, recording.fx_graph)
    for batch in (shape[0], 3):
        x = torch.randn(batch, *shape[1:])
        with torch.no_grad():
            assert is_same(replayed(x.clone()), model(x.clone()))


def test_both_frontends_give_the_same_nodes() -> None:
    model = Sizes()
    one, other = (record(model, (2, 4, 6), symbolic_sizes=symbolic) for symbolic in (True, False))
    assert one.graph == other.graph


# -- outputs -------------------------------------------------------------------------------------


def build(run: Callable[[Any, Tensor], Any]) -> Any:
    """Makes a model of a layer and a function of its result."""
    forward = lambda net, x: run(net, net.layer(x).relu())  # noqa: E731
    return Runs(forward, layer=nn.Linear(4, 4), mean=nn.Buffer(torch.zeros(4)))


Pair = namedtuple("Pair", "first second")


class Names(list[Any]):
    pass


class Filled(OrderedDict[str, Any]):
    """As models of Hugging Face return them."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value


@dataclasses.dataclass
class Found(Filled):
    value: Tensor | None = None
    hidden: Any = None


@dataclasses.dataclass
class Doubled(Filled):
    value: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.value is not None
        self.value = self.value * 2
        super().__post_init__()


@dataclasses.dataclass
class Scored:
    value: Tensor
    score: float | None = 0.5
    unset: Tensor = dataclasses.field(init=False)


def set_later(net: Any, y: Tensor) -> Scored:
    scored = Scored(y)
    scored.unset = y * 2
    return scored


class Measure(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size) -> Tensor:
        return x / shape.numel()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


OUTPUTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "ordered dict": lambda net, y: OrderedDict(b=y, a=y * 2),
    "size": lambda net, y: {"shape": y.shape, "value": [y]},
    "dataclass": lambda net, y: Scored(y, None),
    "output of Hugging Face": lambda net, y: Found(None, (y, Found(y, [y]))),
    "named tuple": lambda net, y: Pair(y, {"best": y.max(-1), "again": Pair(y * 2, None)}),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_keep_their_types(name: str) -> None:
    model = build(OUTPUTS[name])
    replayed = fx.GraphModule(model, fxmem.analyze(model, ("3x4",), device="cpu").fx_graph)
    for batch in (3, 5):
        x = torch.randn(batch, 4)
        assert is_same(replayed(x), model(x))


def test_functions_of_the_user_s_get_sizes_as_they_are() -> None:
    model, x = build(lambda net, y: Measure.apply(y, y.shape)), torch.randn(3, 4)
    analysis = fxmem.analyze(model, (x,), device="cpu")
    planned = fxmem.apply(model, fxmem.pareto(analysis, style="graph", time_limit_s=0.1)[0])
    assert torch.equal(planned(x), model(x))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net, y: defaultdict(list, value=y),
        lambda net, y: Names([y]),
        lambda net, y: Doubled(y),
        set_later,
    ],
)
def test_what_its_class_would_make_otherwise_is_in_no_graph(wrap: Any) -> None:
    analysis = fxmem.analyze(build(wrap), ("3x4",), device="cpu")
    kind = type(wrap(None, torch.ones(1))).__name__
    assert analysis.setup.frontend_reason == f"no graph holds the {kind} in the output"


# -- contexts and devices ------------------------------------------------------------------------


def gate_without_gradients(net: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(y * 2)
        net.mean.lerp_(y.float().mean(0), 0.1)
    return y * gate + net.mean


def cosine_without_autocast(net: Any, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        scores = y.float() @ y.float().t()
    return scores @ y


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("run", [gate_without_gradients, cosine_without_autocast])
def test_what_leaves_a_context_does_in_the_graph(run: Any, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, x, found = build(run), torch.randn(3, 4), []
    autocast = "bf16" if dtype else None
    analysis = fxmem.analyze(model, (x,), device="cpu", autocast=autocast)
    assert analysis.frontend == "fx", analysis.setup.frontend_reason
    for planned in (model, fx.GraphModule(model, analysis.fx_graph)):
        model.zero_grad()
        model.mean.zero_()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            y = planned(x)
        y.float().pow(2).sum().backward()
        found.append([y, model.mean.clone(), *(p.grad for p in model.parameters())])
    assert is_same(*found)


def test_a_graph_traced_for_a_gpu_runs_on_the_cpu() -> None:
    def run(net: Any, y: Tensor) -> Tensor:
        steps = torch.arange(y.shape[0], device=y.device)
        return y * steps[:, None] + torch.zeros((), device="cpu")

    model, x = build(run), torch.randn(3, 4)
    analysis = fxmem.analyze(model, (x,), device="cuda")
    module = fx.GraphModule(model, analysis.fx_graph)
    assert torch.equal(module(x), model(x))
    assert "cuda" not in module.code
    # Beside the input that it is of, so that no run of nodes is cut in two by it.
    assert [node.name for node in module.graph.nodes][:2] == ["args_0", "getattr_1"]
    assert "device = 'cpu'" in module.code, "what the code says itself stays"


def test_a_graph_module_keeps_its_forward_and_counts_its_parameters_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    analysis = fxmem.analyze(fx.symbolic_trace(model), ("4x8",), device="cpu")
    assert analysis.parameter_bytes == 4 * (8 * 8 + 8 + 8 * 2 + 2)
    assert analysis.peak_bytes == fxmem.analyze(model, ("4x8",), device="cpu").peak_bytes
    assert [node.name for node in analysis.nodes[:4]] == ["input", "0", "1", "2"]
