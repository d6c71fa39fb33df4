"""Generation: copies of calls that grow, and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.scripts.recording import Recording
from fxmem.scripts.repeats import evaluations


class Cache:
    """Keys of all tokens so far."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.length = 0


class Attending(nn.Module):
    """A model that is given a cache, and puts the keys of its tokens there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.head = nn.Linear(64, 100)
        self.calls = 0

    def forward(self, tokens: Tensor, cache: Cache) -> Tensor:
        keys = self.embed(tokens)
        cache.keys = keys if cache.keys is None else torch.cat([cache.keys, keys], dim=1)
        cache.length += tokens.shape[1]
        attended = (keys @ cache.keys.mT).softmax(-1) @ cache.keys
        logits: Tensor = self.head(attended)
        return logits

    @torch.no_grad()
    def generate(self, tokens: Tensor, max_new_tokens: int) -> Tensor:
        cache = Cache()
        for _ in range(max_new_tokens):
            logits = self(tokens if cache.keys is None else tokens[:, -1:], cache)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
            assert cache.keys is not None and cache.keys.shape[1] == cache.length
        return tokens


def record(
    generate: Callable[[nn.Module, Tensor], Any], model: nn.Module
) -> tuple[Recording, list[int]]:
    """Records a generation, and counts the calls of the model that ran."""
    ran: list[int] = []
    forward = model.forward

    def count(*args: Any, **kwargs: Any) -> Any:
        ran.append(len(ran))
        return forward(*args, **kwargs)

    model.forward = count
    with fxmem.record(gpu="h100") as recording:
        generate(model.cuda().eval(), torch.ones(2, 7, dtype=torch.int64, device="cuda"))
    return recording, ran


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("Attending", {}), ("Llama", {}), ("Llama", {"num_beams": 2}), ("Mistral", {})],
)
def test_copies_of_growing_calls_are_what_is_recorded(
    monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any]
) -> None:
    def make() -> nn.Module:
        from benchmarks.cases import import_torchvision
        from benchmarks.generation import CASES

        if kind == "Attending":
            return Attending()
        import_torchvision()
        names = {"Llama": "Llama, grouped heads", "Mistral": "Mistral, sliding window"}
        return CASES[names[kind]][0]()

    def generate(model: Any, tokens: Tensor) -> None:
        model.generate(tokens, max_new_tokens=40, **settings)

    found, ran = record(generate, make())
    monkeypatch.setattr(evaluations, "_MOST_GROWN", 0)
    expected, all_ran = record(generate, make())
    assert len(all_ran) == 40 and len(ran) <= 20
    generation, full = found.run.generation, expected.run.generation
    assert generation is not None and full is not None
    assert generation.profile.live_bytes == full.profile.live_bytes
    # An argument may have the size of a result at one length alone.
    operations, others = (
        [replace(each, overwritable=()) for each in window.allocated_graph.operations]
        for window in (generation, full)
    )
    assert operations == others
    assert generation.graph.nodes == full.graph.nodes
    assert generation.reserved_bytes == full.reserved_bytes
    assert generation.kv_cache_bytes == full.kv_cache_bytes > 0


def test_calls_of_a_cache_that_grows_otherwise_run() -> None:
    def generate(model: Any, _tokens: Tensor) -> None:
        cache = Cache()
        with torch.no_grad():
            for length in (3, 1, 1, 1, 1, 2, 1, 3):
                model(torch.ones(2, length, dtype=torch.int64, device="cuda"), cache)
                assert cache.keys is not None and cache.keys.shape[1] == cache.length

    _, ran = record(generate, Attending())
    assert len(ran) == 7  # the fifth is like the three before
