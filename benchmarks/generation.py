"""Compares generation with what models really take, token by token.

    python -m benchmarks.generation [NAME ...] [-o docs/results/generation.md]

Each model generates on the CPU from prompts, under PyTorch's profiler, which sees every allocation
and free. The peak of a token is the most that is allocated from one call of the model to the next.
fxmem then records the same code on fake tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.cases import import_torchvision
from benchmarks.measure import THREADS
from benchmarks.stamp import put_page, write_stamp

_METHOD = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip().replace("``", "`")
PROMPT, NEW, BATCH = 64, 48, 2
_SIZES = {"num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": 0}


class Plain(nn.Module):
    """A model without a cache, whose generation calls it on all tokens, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.embed = nn.Embedding(500, 128)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(128, 500)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embed(tokens)))
        return logits

    @torch.no_grad()
    def generate(self, tokens: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            probabilities = F.softmax(self(tokens)[:, -1], dim=-1)
            following = torch.multinomial(probabilities, num_samples=1)
            tokens = torch.cat((tokens, following), dim=1)
        return tokens


def _make(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**settings)
        name = "T5ForConditionalGeneration" if kind == "T5" else f"{kind}ForCausalLM"
        name = "GPT2LMHeadModel" if kind == "GPT2" else name
        model: nn.Module = getattr(transformers, name)(config)
        return model

    return make


_LLAMA = _make("Llama", **_SIZES, **_HEADS)
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "GPT-2": (_make("GPT2", n_layer=3, n_embd=256, n_head=4, vocab_size=1000, eos_token_id=1), {}),
    "Llama, grouped heads": (_LLAMA, {}),
    "Llama, static cache": (_LLAMA, {"cache_implementation": "static"}),
    "Llama, three beams": (_LLAMA, {"num_beams": 3}),
    "Llama, sampling": (_LLAMA, {"do_sample": True, "top_k": 20, "top_p": 0.9}),
    "Llama, float8 cache": (
        _LLAMA,
        {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    ),
    "Mistral, sliding window": (_make("Mistral", **_SIZES, **_HEADS, sliding_window=32), {}),
    "DeepSeek-V3, latent attention": (
        _make(
            "DeepseekV3",
            **_SIZES,
            num_attention_heads=8,
            num_key_value_heads=8,
            q_lora_rank=64,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=32,
            v_head_dim=32,
            first_k_dense_replace=3,
            pad_token_id=0,
        ),
        {},
    ),
    "T5": (
        _make(
            "T5",
            num_layers=2,
            d_model=128,
            d_ff=256,
            d_kv=32,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        {},
    ),
    "without a cache": (Plain, {}),
}


def _generate(name: str, mark: Callable[[str], Any]) -> None:
    make, settings = CASES[name]
    torch.manual_seed(0)
    model = make().eval()
    forward, calls = model.forward, iter(range(10_000))

    def call(*args: Any, **kwargs: Any) -> Any:
        stack.close()
        stack.enter_context(mark(f"call {next(calls)}"))
        return forward(*args, **kwargs)

    prompt = torch.randint(3, 500, (BATCH, PROMPT))
    model.forward = call
    with contextlib.ExitStack() as stack:
        generate: Any = model.generate
        settings = settings if isinstance(model, Plain) else {**settings, "eos_token_id": None}
        generate(prompt, max_new_tokens=NEW, **settings)


def measure_tokens(name: str) -> list[int]:
    """Measures the peak of each call of a model that generates, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _generate(name, record_function)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    spans = [
        (int(event.name().split()[1]), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name().startswith("call ")
    ]
    memory = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
        key=lambda event: event[0],
    )
    peaks, live = dict.fromkeys(sorted(number for number, *_ in spans), 0), 0
    for at, nbytes in memory:
        for number, start, stop in spans:
            if start <= at <= stop:
                peaks[number] = max(peaks[number], live, live + nbytes)
        live += nbytes
    return [*peaks.values()]


def predict_tokens(name: str) -> list[int]:
    """Records a generation and returns the peak of each call in bytes."""
    import fxmem

    with fxmem.record(device="cpu") as recording:
        _generate(name, recording.phase)
    return [phase.peak_bytes for phase in recording.phases]


def compare_case(name: str) -> tuple[list[int], list[int]]:
    """Measures and predicts a generation, in a process each."""
    found = []
    for what in ("real", "fxmem"):
        command = [sys.executable, "-m", "benchmarks.generation", "--only", what, name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found[0], found[1]


def write_page(rows: list[tuple[Any, ...]]) -> str:
    """Writes the results."""
    headers = ["generation", "calls", "to the byte", "first, bytes", "last, bytes", "largest error"]
    table = tabulate(rows, headers, tablefmt="github", intfmt=",", disable_numparse=[5])
    stamp = write_stamp("python -m benchmarks.generation")
    return "\n\n".join(("# Generation", _METHOD, table, stamp)) + "\n"


def main() -> None:
    """Prints or writes a table with a row for each generation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--only", choices=["real", "fxmem"])
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.only is not None:
        torch.set_num_threads(THREADS)
        import_torchvision()
        find = measure_tokens if arguments.only == "real" else predict_tokens
        print("\n" + json.dumps(find(arguments.names[0])))
        return
    rows = []
    for name in arguments.names or CASES:
        real, found = compare_case(name)
        equal = sum(a == b for a, b in zip(real, found, strict=True))
        error = max(abs(b / a - 1) for a, b in zip(real, found, strict=True))
        rows.append((name, len(real), equal, real[0], real[-1], f"{error:.3%}"))
        print(tabulate(rows[-1:], intfmt=","), file=sys.stderr)
    put_page(write_page(rows), arguments.output)


if __name__ == "__main__":
    main()
