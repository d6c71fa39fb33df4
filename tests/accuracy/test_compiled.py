"""Memory of compiled code as it was published.

Attention: without heads and its compiled form, in float32 and batches of 8, on an A100 with 80 GB:
github.com/damek/cs336-assignment2-systems, cs336_systems/outputs/attention_benchmark.md, written by
cs336_systems/benchmarking_scripts/attention_benchmarking_script.py. The columns, in MiB: after the
inputs were made, before backward, the difference, and the peaks of forwards and of whole steps.

Cross-entropy: Gemma 2's logits, soft-capped, in bfloat16: github.com/apple/ml-cross-entropy,
README.md, method torch_compile; by a release of PyTorch before 2.6.

Embeddings: github.com/linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv, provider
torch_compile: the last four sizes, each beside an embedding that is not used.
"""

from __future__ import annotations

import importlib
import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from benchmarks.compiled import compare, run_apart
from benchmarks.step import MODES

ROWS = {
    (16, 1024): ("18.2505", "82.3755", "64.125", "82.877", "211.501"),
    (64, 256): ("18.2505", "22.2817", "4.03125", "22.7832", "31.314"),
    (128, 16384): ("272.25", "16658.3", "16386", "16722.3", "49556.3"),
}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqd,bkd->bqk", q, k) / math.sqrt(k.shape[-1])
    weights = torch.exp(scores - torch.max(scores, dim=-1, keepdim=True)[0])
    return torch.einsum("bqk,bkd->bqd", weights / torch.sum(weights, dim=-1, keepdim=True), v)


def measure(width: int, length: int, attend: Callable[..., Tensor]) -> list[int]:
    q, k, v = (torch.randn(8, length, width, device="cuda", requires_grad=True) for _ in range(3))

    def step() -> tuple[Tensor, Tensor]:
        out = attend(q, k, v)
        loss = out.sum()
        loss.backward()
        q.grad = k.grad = v.grad = None
        return out, loss

    for _ in range(2):
        held = step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        attend(q, k, v).sum()
    forward_peak, before = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    out = attend(q, k, v)  # held, with its graph, while the steps below run
    held = out, out.sum()
    after = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    del held
    return [before, after, after - before, forward_peak, torch.cuda.max_memory_allocated()]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:Skipping serialization")
@pytest.mark.parametrize(("width", "length"), ROWS)
def test_compiled_attention_takes_what_was_published(width: int, length: int) -> None:
    with fxmem.record(gpu="a100-80gb", steps=100, compile=True) as recording:
        found = measure(width, length, torch.compile(attend))
    assert [f"{nbytes / 2**20:.6g}" for nbytes in found] == [*ROWS[width, length]]
    assert recording.notes


@torch.compile(fullgraph=True)
def cross_entropy(e: Tensor, c: Tensor, targets: Tensor) -> Tensor:
    logits = 30 * torch.tanh((e @ c.T) / 30)
    return nn.functional.cross_entropy(logits.float(), targets)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_compiled_cross_entropy_takes_what_was_published() -> None:
    # Later releases have backward overwrite the logits, in half precision.
    functorch: Any = importlib.import_module("torch._functorch.config")
    inductor: Any = importlib.import_module("torch._inductor.config")
    before = functorch.patch(donated_buffer=False)
    with before, inductor.patch(optimize_scatter_upon_const_tensor=False):
        found = measure_cross_entropy()
    assert found == ["4000.1", "12000.0", "16000.1"]


def measure_cross_entropy() -> list[str]:
    """Measures forward, backward and both, in MiB beyond what there is before."""
    read = torch.cuda.max_memory_allocated
    with fxmem.record(gpu="a100-80gb", steps=100):
        halves = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        e, c = torch.randn(8192, 2304, **halves), torch.randn(256000, 2304, **halves)
        targets = torch.randint(0, 256000, (8192,), device="cuda")
        for _ in range(2):
            e.grad = c.grad = None
            torch.cuda.reset_peak_memory_stats()
            start = read()
            loss = cross_entropy(e, c, targets)
            forward = read() - start
            torch.cuda.reset_peak_memory_stats()
            middle = read()
            loss.backward()
            backward, both = read() - middle, read() - start
    return [f"{nbytes / 2**20:.1f}" for nbytes in (forward, backward, both)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_compiled_embeddings_take_what_was_published() -> None:
    kept = []  # as Dynamo of that time kept the modules that it had compiled
    with fxmem.record(gpu="a100-80gb", steps=100):
        found = []
        for size in (16384, 32768, 65536, 131072):
            embedding, beside = (nn.Embedding(size, 4096, device="cuda") for _ in range(2))
            kept.append(embedding)
            embed = torch.compile(embedding)
            tokens = torch.randint(0, size, (8, 2048), device="cuda")
            for _ in range(3):
                torch.cuda.reset_peak_memory_stats()
                output = embed(tokens)
                output.backward(torch.randn_like(output))
                del output
            found.append(torch.cuda.max_memory_allocated() / 2**20)
            del beside, tokens
    assert found == [1536.125, 3072.125, 6144.125, 12288.125]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler of C++")
@pytest.mark.parametrize("name", ["tied_weights", "reused_module", "checkpoint_non_reentrant"])
def test_a_step_that_inductor_compiles_for_the_cpu_takes_what_is_measured(name: str) -> None:
    real, ours = (run_apart(what, name, anew=True) for what in ("measure", "predict"))
    rows = [compare(name, mode, real[mode], ours[mode]) for mode in MODES]
    assert [(row[5], row[7]) for row in rows] == [("0", "yes"), ("0", "yes"), ("0", "")]
