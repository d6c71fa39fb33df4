"""Generation: copies of calls that grow, and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from benchmarks.cases import import_torchvision
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
    ("kind", "count", "settings"),
    [
        ("Attending", 20, {}),
        ("Llama", 20, {}),
        ("Llama", 20, {"num_beams": 2}),
        ("Mistral", 40, {}),  # beyond its window
    ],
)
def test_copies_of_growing_calls_are_what_is_recorded(
    monkeypatch: pytest.MonkeyPatch, kind: str, count: int, settings: dict[str, Any]
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
        model.generate(tokens, max_new_tokens=count, **settings)

    found, ran = record(generate, make())
    monkeypatch.setattr(evaluations, "_MOST_GROWN", 0)
    expected, all_ran = record(generate, make())
    assert found.steps[-1] is found.run.generation
    assert len(all_ran) == count and len(ran) <= count // 2
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


def test_a_model_that_is_analysed_is_left_unchanged() -> None:
    model = Attending()
    weight = model.embed.weight
    analysis = fxmem.analyze(
        model, "2x50:int64", mode="generate", new_tokens=9, gpu="h100", dtype="bf16"
    )
    assert analysis.setup.mode == "generate" and analysis.setup.inputs == ("2x50:int64",)
    assert model.training and model.embed.weight is weight and weight.dtype is torch.float32
    assert analysis.parameter_bytes == 2 * 2 * 100 * 64 + 2 * 100
    assert any(
        note.startswith("Of 9 calls of the model the first") for note in analysis.setup.notes
    )
    # While the last keys are made, those before are there, each in blocks of 512 bytes.
    assert analysis.kv_cache_bytes == 2 * 29 * 512
    live = {s.name for s in analysis.peak.live if s.category is fxmem.Category.KV_CACHE}
    assert live == {"cache.keys"}


class Greedy(nn.Module):
    """A model of logits, without a method to generate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layers(tokens)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_without_a_method_generates_greedily(device: str) -> None:
    analysis = fxmem.analyze(Greedy(), "4x20:int64", mode="generate", new_tokens=5, device=device)
    shapes = [node.shape for node in analysis.graph.nodes if node.target == "Linear"]
    assert shapes == [(4, length, 50) for length in range(20, 25)]


class NoName(Greedy):
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        return tokens


@pytest.mark.parametrize(
    ("model", "inputs", "options", "message"),
    [
        (nn.Linear(4, 4), "2x4", {}, "Linear has no method generate, and does not return logits"),
        (Greedy(), (), {}, "no prompt is given"),
        (Greedy(), "2x4:int64", {"compile": True}, "generation takes no optimizer and no loss"),
        (Greedy(), "2x4:int64", {"optimizer": "sgd"}, "generation takes no optimizer and no loss"),
        (NoName(), "2x4:int64", {}, "NoName.generate takes no max_new_tokens"),
        (Greedy(), "2x4:int64", {"new_tokens": 0}, "--new must be 1 or more, got 0"),
        (Greedy(), "2x4:int64", {"gpu": "h100", "reserve": "99GiB"}, "reserve='99GiB' with gpu="),
        (Greedy(), "2x4:int64", {"reserve": "1GiB"}, "reserve='1GiB' with gpu=None"),
    ],
)
def test_errors(model: nn.Module, inputs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(fxmem.UsageError, match=message):
        fxmem.analyze(model, inputs, mode="generate", **options)


def split_vocabulary(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(model, mesh, {"layers.1": ColwiseParallel(output_layouts=Replicate())})


@pytest.mark.parametrize("rank", [0, "worst"])
def test_a_generation_on_a_mesh_is_a_rank_s(rank: Any) -> None:
    model, options = Greedy(), {"mode": "generate", "new_tokens": 4, "device": "cuda"}
    alone = fxmem.analyze(model, "8x64:int64", **options)
    layout = {"mesh": {"tp": 2}, "parallelize": split_vocabulary, "rank": rank}
    found = fxmem.analyze(model, "8x64:int64", **options, **layout)
    assert found.setup.mesh == {"tp": 2}
    head_bytes = sum(each.nbytes for each in model.layers[1].parameters())
    kept_bytes = sum(each.nbytes for each in model.parameters()) - head_bytes // 2
    assert found.parameter_bytes == pytest.approx(kept_bytes, abs=2048)
    assert found.parameter_bytes < alone.parameter_bytes
    assert type(model.layers[1].weight) is nn.Parameter  # left as it was


def test_no_plan_is_made_of_a_generation() -> None:
    analysis = fxmem.analyze(Greedy(), "2x4:int64", mode="generate", new_tokens=2)
    with pytest.raises(fxmem.UsageError, match="a plan is for a step, and this is a generation"):
        fxmem.plan(analysis, budget="1GiB")


def test_a_reserve_is_no_room() -> None:
    options = {"mode": "generate", "new_tokens": 2, "gpu": "h100"}
    assert fxmem.analyze(Greedy(), "2x4:int64", **options).fits
    analysis = fxmem.analyze(Greedy(), "2x4:int64", **options, reserve="79GiB")
    assert not analysis.fits
    assert "79.00 GiB of the GPU are kept for others (reserve)." in str(analysis)
    one = fxmem.max_batch(Greedy(), "8x64:int64", gpu="h100", mode="infer", reserve="40GiB")
    assert one.memory_bytes < 40 << 30


def test_masks_of_long_prompts_are_known() -> None:
    from benchmarks.cases import import_torchvision
    from benchmarks.generation import CASES

    import_torchvision()
    model = CASES["Llama, grouped heads"][0]()
    analysis = fxmem.analyze(model, "40x2000:int64", mode="generate", new_tokens=2)
    largest = max(s.nbytes for s in analysis.graph.storages if s.dtype == "bool")
    assert largest <= 2000 * 2000  # a causal mask


SCRIPT = """
import sys
import torch
from torch import nn

device = sys.argv[1]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)

    def forward(self, tokens):
        return self.head(self.embed(tokens))

    @torch.no_grad()
    def generate(self, tokens, count):
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens

model = Net().to(device)
judge = Net().to(device).eval()
optimizer = torch.optim.SGD(model.parameters())
def make(batch):
    return torch.randint(0, 50, (batch, 10)).to(device)

for step in range(3):
    texts = model.generate(make(64), 20)  # a rollout, in train()
    judge.generate(texts, 2)
    model(make(8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    for _ in range(2):
        model(make(16))
        model.generate(make(16), 3)
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_generations_of_a_script(tmp_path: Path, device: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = fxmem.run(str(script), [device], device=device, until="evaluation")
    names = [window.setup.window for window in run.windows]
    assert [name for name in names if "generation" in name] == [
        "generation before step 1", "generation after step 1", "generation after step 2",
    ]  # fmt: skip
    assert names[-1] == "evaluation after step 3"  # which generates, too
    generation = run.generation
    assert generation is not None and generation.peak.phase is fxmem.Phase.GENERATION
    assert generation.peak_bytes > run.steps[-1].peak_bytes
    assert any("Of 22 calls of the model" in note for note in generation.setup.notes)
    assert run.to_dict()["script"]["generation"]["peak_bytes"] == generation.peak_bytes


@pytest.mark.parametrize(
    ("given", "new_tokens", "length"),
    [
        ({"max_new_tokens": 40}, 7, 12),
        ({"max_length": 60}, 7, 12),
        ({"max_new_tokens": 3}, 7, 8),
        ({"max_new_tokens": 9}, None, 14),
    ],
)
def test_texts_of_transformers_end_after_so_many_tokens(
    given: dict[str, int], new_tokens: int | None, length: int
) -> None:
    import_torchvision()
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 100}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
    generate = transformers.GenerationMixin.generate
    with fxmem.record(new_tokens=new_tokens) as recording:
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        tokens = torch.ones(2, 5, dtype=torch.int64, device="cuda")
        assert model.cuda().generate(tokens, **given).shape == (2, length)
    assert recording.run.generation is not None
    assert transformers.GenerationMixin.generate is generate


def test_a_text_of_no_tokens_is_refused() -> None:
    with (
        pytest.raises(fxmem.UsageError, match="--new must be 1 or more, got 0"),
        fxmem.record(new_tokens=0),
    ):
        pass
