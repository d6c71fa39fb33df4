"""Each finding on a step that has it and on the mended one, where both are analysed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Runs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fxmem
from benchmarks.cases import import_torchvision
from fxmem.advice.activations import find_attention, find_logits, find_upcasts
from fxmem.advice.holding import find_cache, find_gradients, find_held_outputs, find_offloads
from fxmem.analysis import Analysis
from fxmem.errors import UsageError
from fxmem.finding import FINDERS, TEXTS, Finding, explain_code
from fxmem.report.html import write_html
from fxmem.report.json_report import list_finding
from fxmem.units import format_bytes
from fxmem.versions.release import is_release

MIB = 2**20
Find = Callable[[Analysis], Iterator[Finding]]


def check(find: Find, step: Analysis, mended: Analysis, within: float = 0.02) -> Finding:
    """The saving of the finding is that of the mended step, which has it no more."""
    (finding,) = find(step)
    saving_bytes = step.peak_bytes - mended.peak_bytes
    assert saving_bytes > MIB
    assert finding.saving_bytes == pytest.approx(saving_bytes, rel=within)
    assert finding.peak_bytes == step.peak_bytes - finding.saving_bytes
    assert [f for f in find(mended) if f.saving_bytes > MIB] == []
    return finding


# -- FX101 -----------------------------------------------------------------------------------------


class Language(nn.Module):
    """A language model that returns its loss, with the head as a whole or in parts."""

    def __init__(self, words: int, width: int = 128, parts: int = 1) -> None:
        super().__init__()
        self.parts = parts
        self.tokens = nn.Embedding(words, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.narrow(F.gelu(self.wide(self.tokens(ids))))
        if self.parts == 1:
            logits = self.head(hidden)
            return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.flatten())
        parts = zip(
            hidden.flatten(0, 1).chunk(self.parts),
            targets.flatten().chunk(self.parts),
            strict=True,
        )
        losses = [checkpoint(self.compute_loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / targets.numel()

    def compute_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).float(), targets, reduction="sum")


@pytest.mark.parametrize("options", [{}, {"autocast": "bf16"}, {"dtype": "bf16"}], ids=str)
@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_logits(options: dict[str, Any], optimizer: str | None) -> None:
    args = ("4x512:int64", "4x512:int64")
    step = fxmem.analyze(Language(16384), args, optimizer=optimizer, **options)
    mended = fxmem.analyze(Language(16384, parts=8), args, optimizer=optimizer, **options)
    finding = check(find_logits, step, mended)
    assert finding.source is not None and finding.source.function == "forward"
    assert re.search(r": \d tensors as large as the logits hold [\d.]+ MiB", finding.change)


@pytest.mark.parametrize(("autocast", "nbytes"), [(None, 16), ("bf16", 12)])
def test_the_logits_of_a_gpt(autocast: str | None, nbytes: int) -> None:
    """By hand, for each of 12 x 1024 tokens and 50304 words.

    The output holds the logits, autograd the log-softmax, and backward makes the gradients of loss
    and log-softmax. Under autocast the log-softmax is in bf16 like the logits, autograd keeps a
    float32 copy of it for the loss, and the peak is at the gradient of that: 2 + 2 + 4 + 4 bytes.
    """
    target = "examples/gpt.py:GPT(layers=1, width=768, heads=12, vocabulary=50304, context=1024)"
    options = {"loss": "cross_entropy", "autocast": autocast, "optimizer": "adamw"}
    step = fxmem.analyze(str(Path(__file__).parents[3] / target), "12x1024:int64", **options)
    (finding,) = step.findings
    count, size = re.search(r"(\d) tensors .* hold ([\d.]+) GiB", finding.change).groups()
    assert (finding.code, count) == ("FX101", "4")
    assert float(size) == pytest.approx(nbytes * 12 * 1024 * 50304 / 2**30, rel=0.001)


@pytest.mark.parametrize("words", [16, 256])
def test_no_logits_of_a_small_vocabulary(words: int) -> None:
    step = fxmem.analyze(Language(words), ("4x512:int64", "4x512:int64"))
    assert "FX101" not in [finding.code for finding in step.findings]


def test_a_workspace_is_no_logits() -> None:
    """A classifier's first step, in which the products of the head take cuBLAS's workspaces."""
    with fxmem.record(gpu="h100", steps=1) as recording:
        model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model.append(nn.Linear(64, 10)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        output = model(torch.ones(8, 3, 32, 32, device="cuda"))
        F.cross_entropy(output, torch.zeros(8, dtype=torch.int64, device="cuda")).backward()
        optimizer.step()
    assert "FX101" not in [finding.code for finding in recording.steps[0].findings]


def test_no_logits_where_features_are_averaged() -> None:
    net = Runs(lambda net, x: net.linear(x).mean(1), linear=nn.Linear(64, 512))
    step = fxmem.analyze(net, "64x256x64", loss="cross_entropy")
    assert [*find_logits(step)] == []


def test_no_logits_where_features_are_compared() -> None:
    def compare(net: Runs, x: Tensor) -> Tensor:
        features = net.linear(x)
        labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return F.cross_entropy(features @ features.T, labels)

    assert [*find_logits(fxmem.analyze(Runs(compare, linear=nn.Linear(32, 32)), "2048x32"))] == []


# -- FX102 -----------------------------------------------------------------------------------------


def normalize_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * y.to(x.dtype)


def normalize(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def swish_in_float(x: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.sigmoid(1.702 * y)).to(x.dtype)


UPCASTS = {
    "torch.nn.RMSNorm": (normalize_by_hand, normalize),
    "the function of x itself": (
        lambda x, _: F.gelu(x.float()).to(x.dtype),
        lambda x, _: F.gelu(x),
    ),
    "the function of x": (
        lambda x, _: F.softmax(x.float(), -1).to(x.dtype),
        lambda x, _: F.softmax(x, -1),
    ),
    "checkpoint(function, x": (
        lambda x, _: swish_in_float(x),
        lambda x, _: checkpoint(swish_in_float, x, use_reentrant=False),
    ),
}


@pytest.mark.skipif(is_release(before=(2, 9)), reason="rms_norm is no kernel before torch 2.9")
@pytest.mark.parametrize("option", UPCASTS)
def test_upcasts(option: str) -> None:
    def analyze(function: Any) -> Analysis:
        def run(net: Runs, x: Tensor) -> Any:
            for layer in net.layers:
                x = x + layer(function(x, net.weight))
            return net.last(x)

        layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
        weight, last = nn.Parameter(torch.ones(512)), nn.Linear(512, 8192)
        return fxmem.analyze(
            Runs(run, layers=layers, weight=weight, last=last), "4096x512", dtype="bf16"
        )

    before, after = UPCASTS[option]
    finding = check(find_upcasts, analyze(before), analyze(after))
    assert option in finding.option
    assert finding.source is not None and finding.source.file == __file__


# -- FX103 -----------------------------------------------------------------------------------------


def attend_by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value


def attend_padded(*heads: Tensor) -> Tensor:
    dim = heads[0].shape[-1]
    padded = [F.pad(x, (0, -dim % 8)) for x in heads]
    return F.scaled_dot_product_attention(*padded, scale=dim**-0.5)[..., :dim]


def attend_by_math(*heads: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*heads)


class Attention(nn.Module):
    def __init__(self, attend: Any, dim: int) -> None:
        super().__init__()
        self.attend, self.dim = attend, dim
        self.inner = nn.ModuleList(nn.Linear(4 * dim, 12 * dim) for _ in range(2))
        self.outer = nn.ModuleList(nn.Linear(4 * dim, 4 * dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for inner, outer in zip(self.inner, self.outer, strict=True):
            heads = inner(x).view(*x.shape[:2], 3, 4, self.dim).permute(2, 0, 3, 1, 4)
            x = x + outer(self.attend(*heads).transpose(1, 2).reshape(x.shape))
        return x


ATTENTIONS = [
    ("it is written as products and a softmax", attend_by_hand, 64),
    ("a multiple of 4, not 30", F.scaled_dot_product_attention, 30),
    ("flash attention and memory-efficient attention need to be enabled", attend_by_math, 64),
]


@pytest.mark.parametrize(
    ("reason", "attend", "dim", "autocast"),
    # Flash attention, in bf16, pads heads of any dimension.
    [(*row, autocast) for row in ATTENTIONS for autocast in (None, "bf16")[: 1 + (row[2] == 64)]],
)
def test_attention(reason: str, attend: Any, dim: int, autocast: str | None) -> None:
    def analyze(attend: Any) -> Analysis:
        return fxmem.analyze(Attention(attend, dim), f"4x1024x{4 * dim}", autocast=autocast)

    mended = analyze(attend_padded if dim % 8 else F.scaled_dot_product_attention)
    finding = check(find_attention, analyze(attend), mended)
    assert reason in finding.change
    assert finding.source is not None and finding.source.file == __file__


def test_attention_of_a_module_that_returns_its_weights() -> None:
    def analyze(need_weights: bool) -> Analysis:
        net = Runs(
            lambda net, x: net.attention(x, x, x, need_weights=need_weights)[0],
            attention=nn.MultiheadAttention(256, 4, batch_first=True),
        )
        return fxmem.analyze(net, "4x1024x256")

    finding = check(find_attention, analyze(True), analyze(False))
    assert finding.option == "attention(x, x, x, need_weights=False)"


def test_capped_scores_have_no_fused_kernel() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.tanh(query @ key.transpose(-2, -1) / 50) * 50
        return scores.softmax(-1) @ value

    assert [*find_attention(fxmem.analyze(Attention(attend, 64), "4x256x256"))] == []


def test_grouped_heads_in_float32() -> None:
    def attend(net: Runs, x: Tensor) -> Any:
        query = net.query(x).view(4, 2048, 8, 32).transpose(1, 2)
        pairs = net.pairs(x).view(4, 2048, 2, 4, 32).permute(2, 0, 3, 1, 4)
        if net.repeats:
            mixed = F.scaled_dot_product_attention(
                query, *(part.repeat_interleave(2, 1) for part in pairs)
            )
        else:
            mixed = F.scaled_dot_product_attention(query, *pairs, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(4, 2048, 256)

    def analyze(repeats: bool) -> Analysis:
        layers = {"query": nn.Linear(256, 256), "pairs": nn.Linear(256, 256)}
        return fxmem.analyze(Runs(attend, repeats=repeats, **layers), "4x2048x256")

    finding = check(find_attention, analyze(False), analyze(True))
    assert "needs as many heads of key and value as of query" in finding.change
    assert "repeat_interleave" in finding.option


# -- FX104, FX105 ----------------------------------------------------------------------------------


def test_a_cache() -> None:
    transformers = pytest.importorskip("transformers")
    import_torchvision()  # transformers looks for it
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**sizes, **heads)
    inputs = {"input_ids": "4x2048:int64"}

    def analyze(**more: Any) -> Analysis:
        model = transformers.LlamaForCausalLM(config)
        return fxmem.analyze(model, (), inputs | more, mode="infer", dtype="bf16")

    finding = check(find_cache, analyze(), analyze(use_cache=False))
    assert "use_cache=False" in finding.option
    assert finding.source is not None and finding.source.file.endswith("cache_utils.py")


def test_outputs_of_the_step_before() -> None:
    net = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 4096, bias=False))
    step = fxmem.analyze(net, "4096x256", hold_outputs=True, mode="infer")
    finding = check(find_held_outputs, step, fxmem.analyze(net, "4096x256", mode="infer"))
    assert finding.option == "del output, loss"


# -- FX201, FX303 ----------------------------------------------------------------------------------


def make_layers(width: int = 512) -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(width, width), nn.ReLU())))


class InBackward(nn.Module):
    """Steps an optimizer for each parameter in backward."""

    def __init__(self, inner: nn.Module, make: Any) -> None:
        super().__init__()
        self.inner = inner
        self.optimizers = {parameter: make([parameter]) for parameter in inner.parameters()}
        for parameter in inner.parameters():
            parameter.register_post_accumulate_grad_hook(self.step)

    def step(self, parameter: Any) -> None:
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


@pytest.mark.parametrize("autocast", [None, "bf16"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("adamw", {}), ("adamw(foreach=False)", {"foreach": False}), ("sgd", None)],
)
def test_gradients(name: str, settings: dict[str, Any] | None, autocast: str | None) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        if settings is None:
            return torch.optim.SGD(parameters, lr=0.1)
        return torch.optim.AdamW(parameters, **settings)

    step = fxmem.analyze(make_layers(), "64x512", optimizer=name, autocast=autocast)
    mended = fxmem.analyze(InBackward(make_layers(), make), "64x512", autocast=autocast)
    check(find_gradients, step, mended)


def test_gradients_of_the_step_before() -> None:
    step = fxmem.analyze(make_layers(), "64x512", optimizer="sgd", loop="lightning")
    mended = InBackward(make_layers(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    check(find_gradients, step, fxmem.analyze(mended, "64x512", loop="lightning"))


@pytest.mark.parametrize(
    "options",
    [
        {"loop": "plain(clip_grad=True)"},
        {"accumulate": 2},
        {"autocast": "fp16"},
        {"set_to_none": False},
        {"optimizer": None},
    ],
    ids=str,
)
def test_gradients_that_are_needed_together(options: dict[str, Any]) -> None:
    step = fxmem.analyze(make_layers(), "64x512", **{"optimizer": "adamw", **options})
    assert [*find_gradients(step)] == []


class Offloading(nn.Module):
    """Keeps large activations as nothing but shapes: what a copy in another memory is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        def pack(tensor: Tensor) -> Any:
            is_large = tensor.untyped_storage().nbytes() >= MIB and tensor is not x
            is_kept = isinstance(tensor, nn.Parameter) or tensor._base is not None
            return (tensor.shape, tensor.dtype) if is_large and not is_kept else tensor

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            return torch.empty(packed[0], dtype=packed[1], device="cuda")

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.inner(x)


def test_activations_in_the_hosts_memory() -> None:
    step = fxmem.analyze(make_layers(), "4096x512")
    finding = check(find_offloads, step, fxmem.analyze(Offloading(make_layers()), "4096x512"))
    assert finding.change.startswith("Keep 4 activations of 1.00 MiB and more in the host's memory")
    assert finding.cost.startswith("64.00 MiB to the host in forward, and back in backward")
    assert [*find_offloads(fxmem.analyze(make_layers(), "4096x512", device="cpu"))] == []


# -- all of them -----------------------------------------------------------------------------------


def test_a_step_in_order_has_no_findings() -> None:
    assert fxmem.analyze(nn.Linear(64, 64), "8x64").findings == ()


def test_micro_batches_are_mended_alike() -> None:
    args = ("4x512:int64", "4x512:int64")
    step = fxmem.analyze(Language(16384), args, accumulate=2)
    check(find_logits, step, fxmem.analyze(Language(16384, parts=8), args, accumulate=2))


def test_every_report_lists_them_and_a_saved_one_has_none_to_draw() -> None:
    step = fxmem.analyze(Language(16384), ("4x512:int64", "4x512:int64"))
    (finding,) = step.findings
    saving = format_bytes(finding.saving_bytes)
    row = f"FX101      {saving}  {finding.title}  {finding.source}\nfxmem explain FX101 says what"
    assert row in str(step)
    assert step.to_dict()["findings"] == [list_finding(finding)]
    assert f'FX101</td><td class="number">{saving}</td><td>Compute the head' in write_html(step)
    assert dataclasses.replace(step, graph=dataclasses.replace(step.graph, saves=())).findings == ()


def test_each_code_is_explained() -> None:
    assert [*TEXTS] == sorted(TEXTS) and TEXTS.keys() >= FINDERS.keys()
    assert explain_code("fx104").startswith("FX104: A cache of keys and values is returned\n\n")
    assert Finding("FX104", "", "", 0, 0, "").title == "A cache of keys and values is returned"
    with pytest.raises(UsageError, match=r"unknown finding FX114 \(did you mean FX104\?\)"):
        explain_code("FX114")
