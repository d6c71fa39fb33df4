"""Plans from the public interface: the peak they promise is that of the applied model's step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned_models import PLANNED
from torch import Tensor, nn

import fxmem
from benchmarks.cases import import_torchvision

SETTINGS: dict[str, dict[str, Any]] = {
    "cuda, bf16": {"device": "cuda", "autocast": "bf16"},
    "cpu": {"device": "cpu"},
    "cuda": {"device": "cuda", "optimizer": "adam"},
}


@pytest.fixture(autouse=True)
def _quick_plans(quick_search: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small model nothing is worth its time."""
    monkeypatch.setattr("fxmem.planning.planner._WORTH", 0.0)


def check_front(
    model: nn.Module, args: Any, kwargs: Any, style: str, options: dict[str, Any]
) -> None:
    """Asserts that the recorded step of each plan of a front takes what the plan promises."""
    analysis = fxmem.analyze(model, args, kwargs, **options)
    front = fxmem.pareto(analysis, style=style, points=3)
    assert len(front) > 1 and front[0].segments == ()
    # Values of a graph go after their last use, and not with the frames of the user's code.
    assert front[0].peak_bytes <= front[0].baseline_peak_bytes == analysis.peak_bytes
    assert style == "graph" or front[0].peak_bytes == analysis.peak_bytes
    for plan in front:
        recorded = fxmem.analyze(fxmem.apply(model, plan), args, kwargs, **options)
        assert plan.peak_bytes == pytest.approx(recorded.peak_bytes, rel=0.01)
        assert plan.reserved_bytes == pytest.approx(recorded.reserved_bytes, rel=0.05)
        flops = recorded.forward_flops + recorded.backward_flops
        step_flops = analysis.forward_flops + analysis.backward_flops
        assert flops == pytest.approx(step_flops * (1 + plan.overhead_flops))


PAIRS = dict(zip(PLANNED, itertools.cycle(SETTINGS)))
del PAIRS["tied"]  # no plan lowers its peak


@pytest.mark.parametrize(("name", "settings"), [*PAIRS.items()])
def test_promised_peaks_are_recorded(name: str, settings: str) -> None:
    make, spec = PLANNED[name]
    torch.manual_seed(0)
    check_front(make(), (spec,), None, "graph", SETTINGS[settings])


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Twice(nn.Module):
    """Blocks that are each called twice, with keywords and something that is no tensor."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(width)
            self.mlp = nn.Sequential(nn.Linear(width, 8 * width), nn.GELU(), nn.Dropout(0.2))
            self.out = nn.Linear(8 * width, width)

        def forward(self, x: Tensor, *, mask: Tensor | None, scale: float = 1.0) -> Any:
            y = self.out(self.mlp(self.norm(x)))
            return {"sum": x + scale * y, "mask": mask}

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Twice.Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask=None)["sum"]
        for block in self.blocks:
            x = block(x, mask=x, scale=0.5)["sum"]
        return x


def make_gpt2(*, use_cache: bool = False) -> tuple[nn.Module, Inputs]:
    import_torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3,
        n_embd=32,
        n_head=2,
        vocab_size=64,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=use_cache,
        loss_type="ForCausalLM",
    )
    ids = torch.randint(0, 64, (4, 48))
    return GPT2LMHeadModel(config), ((), {"input_ids": ids, "labels": ids})


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "gpt2": make_gpt2,
    "gpt2 with a cache": lambda: make_gpt2(use_cache=True),
    "twice": lambda: (Twice(), ((torch.randn(64, 32),), {})),
}


def make_model(name: str) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["gpt2", "twice"])
def test_promised_peaks_of_whole_modules_are_recorded(name: str, settings: str) -> None:
    model, inputs = make_model(name)
    check_front(model, *inputs, "modules", SETTINGS[settings])


def test_a_cache_keeps_blocks_and_attention_from_being_computed_again() -> None:
    model, (args, kwargs) = make_model("gpt2 with a cache")
    analysis = fxmem.analyze(model, args, kwargs, device="cpu")
    assert analysis.frontend == "record"
    plan = fxmem.pareto(analysis)[-1]  # of modules, as there is no graph
    assert plan.style == "modules"
    chosen = {segment.fqn for segment in plan.segments}
    assert chosen
    assert not any(fqn.endswith((".attn", ".0", ".1", ".2")) for fqn in chosen)
    told = {limit.node: limit.reason for limit in plan.limits}
    assert (
        told["transformer.h.0"]
        == "it changes an object that it is given, such as a cache (use_cache=False avoids one)"
    )
