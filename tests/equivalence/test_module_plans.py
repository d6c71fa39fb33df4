"""Plans of modules: the applied model takes what was promised, and computes the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import fxmem
from benchmarks.cases import import_torchvision
from benchmarks.planner_measure import Trainer

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


class Recurrent(nn.Module):
    """An LSTM between linear blocks, whose path depends on what its module holds."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.steps = {"repeats": 2}
        self.embedding = nn.Embedding(50, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width)
        )
        self.tail = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())

    def forward(self, ids: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, state = self.lstm(self.embedding(ids))
        for _ in range(self.steps["repeats"]):
            x = x + self.feed(x)
        return self.tail(x), state


def make_resnet() -> tuple[nn.Module, Inputs]:
    model: nn.Module = import_torchvision().models.resnet18()
    return model, ((torch.randn(8, 3, 96, 96),), {})


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


def make_bert() -> tuple[nn.Module, Inputs]:
    import_torchvision()
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=128,
        num_attention_heads=2,
        vocab_size=64,
    )
    ids = torch.randint(0, 64, (4, 48))
    return BertModel(config), ((), {"input_ids": ids})


class Spectral(nn.Module):
    """Blocks whose weights are divided by what each call estimates anew; one is called twice."""

    def __init__(self, width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                spectral_norm(nn.Conv2d(width, width, 3, padding=1)),
                nn.BatchNorm2d(width),
                nn.SiLU(),
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return x


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "resnet18": make_resnet,
    "gpt2": make_gpt2,
    "gpt2 with a cache": lambda: make_gpt2(use_cache=True),
    "bert": make_bert,
    "twice": lambda: (Twice(), ((torch.randn(64, 32),), {})),
    "spectral": lambda: (Spectral(), ((torch.randn(4, 8, 16, 16),), {})),
    "recurrent": lambda: (Recurrent(), ((torch.randint(0, 50, (8, 24)),), {})),
}


def make_model(name: str) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("resnet18", "bert") else n for n in MODELS],
)
def test_the_promised_peak_is_measured_and_the_numbers_are_the_same(name: str) -> None:
    model, (args, kwargs) = make_model(name)
    before = copy.deepcopy(model)
    analysis = fxmem.analyze(model, args, kwargs, device="cpu")
    front = fxmem.pareto(analysis, style="modules", points=4, time_limit_s=2)
    assert front[0].segments == ()
    assert front[0].peak_bytes == analysis.peak_bytes
    assert front[-1].peak_bytes < analysis.peak_bytes
    trainer = Trainer(model, args, kwargs)
    plain = trainer.compute_numbers(model)
    state = torch.get_rng_state()
    for plan in front:
        planned = fxmem.apply(before, plan)
        trainer = Trainer(planned, args, kwargs)
        numbers = trainer.compute_numbers(planned)
        assert numbers.compare(plain) == "yes"
        assert torch.equal(torch.get_rng_state(), state)
        assert trainer.measure_peak(planned) == pytest.approx(plan.peak_bytes, rel=0.01)
        recorded = fxmem.analyze(planned, args, kwargs, device="cpu")
        assert recorded.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.001)
        flops = recorded.forward_flops + recorded.backward_flops
        step_flops = analysis.forward_flops + analysis.backward_flops
        assert flops == pytest.approx(step_flops * (1 + plan.overhead_flops))


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"autocast": "bf16"}])
@pytest.mark.parametrize("name", ["gpt2", "twice"])
def test_promised_peaks_are_recorded_on_a_gpu(name: str, settings: dict[str, str]) -> None:
    model, (args, kwargs) = make_model(name)
    analysis = fxmem.analyze(model, args, kwargs, device="cuda", **settings)  # type: ignore[arg-type]
    for plan in fxmem.pareto(analysis, style="modules", points=3, time_limit_s=2):
        planned = fxmem.apply(model, plan)
        recorded = fxmem.analyze(planned, args, kwargs, device="cuda", **settings)  # type: ignore[arg-type]
        assert plan.peak_bytes == pytest.approx(recorded.peak_bytes, rel=0.01)
        assert plan.reserved_bytes == pytest.approx(recorded.reserved_bytes, rel=0.05)


def test_a_cache_keeps_blocks_and_attention_from_being_computed_again() -> None:
    model, (args, kwargs) = make_model("gpt2 with a cache")
    analysis = fxmem.analyze(model, args, kwargs, device="cpu")
    assert analysis.frontend == "record"
    plan = fxmem.pareto(analysis, time_limit_s=1)[-1]  # of modules, as there is no graph
    assert plan.style == "modules"
    chosen = {segment.fqn for segment in plan.segments}
    assert chosen
    assert not any(fqn.endswith((".attn", ".0", ".1", ".2")) for fqn in chosen)
    told = {limit.node: limit.reason for limit in plan.limits}
    assert (
        told["transformer.h.0"]
        == "it changes an object that it is given, such as a cache (use_cache=False avoids one)"
    )
