"""The fx frontend's graph runs on real tensors, at other batch sizes than it was traced at."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from benchmarks.cases import timm_model, vision
from fxmem.kernels.cpu import CPU
from fxmem.recording.losses import resolve_loss
from fxmem.recording.step import Recording, Step, record_step
from fxmem.tracing.fakes import make_fake_mode
from fxmem.tracing.swapping import swap_in_fakes


class Sizes(nn.Module):
    """Asks for sizes in every way, and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> dict[str, object]:
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        y += self.shift[:, None, None]
        y[:, 0] = 1
        y[:, 1:].mul_(2).clamp_(max=3.0)
        return 1 - y.T.mT if y.shape[0] < 0 else 1 - y


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "sizes": (Sizes, (2, 4, 6)),
    "in place": (InPlace, (2, 3, 8, 8)),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        (2, 5, 8),
    ),
    "resnet18": (vision("resnet18"), (2, 3, 64, 64)),
    "swin_t": (vision("swin_t"), (2, 3, 64, 64)),
    "shufflenet": (vision("shufflenet_v2_x0_5"), (2, 3, 64, 64)),
    "coat": (timm_model("coat_lite_tiny", img_size=64), (2, 3, 64, 64)),
}


def record(model: nn.Module, shape: tuple[int, ...], **settings: bool) -> Recording:
    mode = make_fake_mode()
    with mode, swap_in_fakes(model, mode, (torch.empty(shape),), train=False) as (args, kwargs):
        step = Step(model, args, kwargs, False, resolve_loss(None), None)
        return record_step(step, CPU, **settings)


def flatten(value: object) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


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
            expected, got = flatten(model(x.clone())), flatten(replayed(x.clone()))
        assert len(expected) == len(got)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["sizes", "swin_t"])
def test_both_frontends_give_the_same_nodes(name: str) -> None:
    build, shape = MODELS[name]
    model = build()
    fx_graph, record_graph = (
        record(model, shape, symbolic_sizes=symbolic).graph for symbolic in (True, False)
    )
    assert fx_graph == record_graph
