"""Compare the predicted workspace of every CPU kernel in real models with the profiler's.

Runs training steps and inference of real models under a dispatch mode; each operator that
reaches the kernels is run in its own profiler range, and the running sum of the memory events in
that range gives what the kernel really needed beyond what it returned. The estimate is made from
fake copies of the same arguments, as fxmem makes it.

    python benchmarks/kernel_workspace.py [--models resnet18,gpt2] [--size 64] [--all] [--layouts]

``--layouts`` also lists outputs whose strides or storage differ from the fake ones'.
"""

from __future__ import annotations

import argparse
import bisect
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.cases import import_torchvision
from fxmem.graph import NEXT_RESULT, measure_blocks
from fxmem.kernels.cpu import CPU
from fxmem.kernels.registry import Backend, OperatorCall

Build = Callable[[], tuple[nn.Module, tuple[object, ...], dict[str, object]]]


@dataclass
class Case:
    """One operator call: what was predicted, and where its range is in the profile."""

    func: OpOverload
    described: str
    predicted_bytes: int
    created_bytes: int
    layout_differs: str
    measured_bytes: int = 0


@dataclass
class Row:
    """All calls of one operator."""

    cases: int = 0
    wrong: int = 0
    worst_bytes: int = 0
    worst: str = ""
    layouts: set[str] = field(default_factory=set)


def estimate_workspace_bytes(
    target: Backend,
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Any,
) -> int:
    """Estimates the bytes that a kernel needs at its peak beyond the new tensors it returns."""
    workspace = target.estimate_workspace(func, OperatorCall(args, kwargs, outputs))
    if isinstance(workspace, int):
        return workspace
    results: list[Any] = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    named = [~block for block, _ in workspace if block < 0]
    blocks = tuple((max(block, NEXT_RESULT), nbytes) for block, nbytes in workspace)
    return measure_blocks(blocks, [results[at].untyped_storage().nbytes() for at in named])


def storages(values: object) -> dict[int, int]:
    """Bytes of each storage among the leaves, by its identity."""
    found = {}
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def describe(value: object) -> str:
    """Short text of an argument."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)}{list(value.stride())}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(describe, value)) + "]"
    return str(value)


class Watch(TorchDispatchMode):
    """Runs every operator in a profiler range of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cases: list[Case] = []
        self.known: dict[str, tuple[int, object]] = {}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        before = storages((args, kwargs))
        key = f"{func} {describe(args)} {describe(list(kwargs.items()))}"
        if key not in self.known:
            self.known[key] = self.predict(func, args, kwargs)
        predicted, fakes = self.known[key]
        with record_function(f"fxmem#{len(self.cases)}"):
            outputs = func(*args, **kwargs)
        created = {k: v for k, v in storages(outputs).items() if k not in before}
        layout = ""
        for real, fake in zip(tree_leaves(outputs), tree_leaves(fakes), strict=False):
            if isinstance(real, Tensor) and isinstance(fake, Tensor):
                sizes = real.untyped_storage().nbytes(), fake.untyped_storage().nbytes()
                if real.stride() != fake.stride() or (created and sizes[0] != sizes[1]):
                    layout = (
                        f"{tuple(real.shape)}: {real.stride()} {sizes[0]} B, "
                        f"fake {fake.stride()} {sizes[1]} B"
                    )
        text = ", ".join(map(describe, args)) + (
            f" {kwargs}" if kwargs and len(str(kwargs)) < 99 else ""
        )
        self.cases.append(Case(func, text, predicted, sum(created.values()), layout))
        return outputs

    def predict(self, func, args, kwargs):  # type: ignore[no-untyped-def]
        """The estimate from fake copies of the arguments, and the fake outputs."""
        try:
            with self.mode:
                convert = self.mode.from_tensor
                fake_args, fake_kwargs = tree_map_only(Tensor, convert, (args, kwargs))
                fakes = CPU.kernels.get(func, func)(*fake_args, **fake_kwargs)
                if fakes is NotImplemented:
                    fakes = func(*fake_args, **fake_kwargs)
        except Exception:  # an operator that needs data
            return 0, None
        return estimate_workspace_bytes(CPU, func, fake_args, fake_kwargs, fakes), fakes


def read_memory(profiler: profile, cases: list[Case]) -> None:
    """Attribute the memory events to the ranges and take each one's peak."""
    assert profiler.profiler is not None
    events = list(profiler.profiler.kineto_results.events())
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    starts = [start for start, _ in memory]
    for event in events:
        if not event.name().startswith("fxmem#"):
            continue
        case = cases[int(event.name().split("#")[1])]
        first = bisect.bisect_left(starts, event.start_ns())
        last = bisect.bisect_right(starts, event.start_ns() + event.duration_ns())
        live = peak = 0
        for _, size in memory[first:last]:
            live += size
            peak = max(peak, live)
        case.measured_bytes = max(0, peak - case.created_bytes)


def loss_of(output: object) -> Tensor:
    """Sum of the floating outputs, or the output's own loss."""
    own = getattr(output, "loss", None)
    if own is not None:
        return own
    values = output.values() if isinstance(output, dict) else tree_leaves(output)
    return sum(
        leaf.float().sum()
        for leaf in tree_leaves(list(values))
        if isinstance(leaf, Tensor) and leaf.requires_grad
    )  # type: ignore[return-value]


def run_model(build: Build, train: bool, rows: dict[str, Row], name: str) -> None:
    """One warm-up step and one watched step of a model."""
    torch.manual_seed(0)
    model, args, kwargs = build()
    model.train(train)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        if not train:
            with torch.no_grad():
                model(*args, **kwargs)
            return
        optimizer.zero_grad()
        loss_of(model(*args, **kwargs)).backward()
        optimizer.step()

    step()
    watch = Watch()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, watch:
        step()
    read_memory(profiler, watch.cases)
    for case in watch.cases:
        row = rows[str(case.func)]
        row.cases += 1
        error = case.predicted_bytes - case.measured_bytes
        if case.layout_differs:
            row.layouts.add(case.layout_differs)
        if error:
            row.wrong += 1
            if abs(error) > abs(row.worst_bytes):
                row.worst_bytes = error
                row.worst = (
                    f"{name}: measured {case.measured_bytes}, "
                    f"predicted {case.predicted_bytes}: {case.described[:300]}"
                )


def vision_models(size: int) -> dict[str, Build]:
    """torchvision's classification, segmentation, video and flow models."""
    models = import_torchvision().models

    def image(factory: Callable[..., nn.Module], side: int, **options: object) -> Build:
        return lambda: (factory(**options), (torch.randn(2, 3, side, side),), {})

    names = (
        "resnet18 resnet50 densenet121 vgg11_bn mobilenet_v2 mobilenet_v3_small efficientnet_b0 "
        "convnext_tiny regnet_y_400mf shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t"
    ).split()
    found = {name: image(getattr(models, name), size) for name in names}
    for name in ("googlenet", "inception_v3"):
        found[name] = image(
            getattr(models, name),
            96 if name == "googlenet" else 139,
            init_weights=False,
            aux_logits=False,
        )
    found["vit_b_16"] = image(models.vit_b_16, 64, image_size=64)
    found["maxvit_t"] = image(models.maxvit_t, 224)
    for name in ("deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large"):
        found[name] = image(getattr(models.segmentation, name), 96, weights_backbone=None)
    found["r3d_18"] = lambda: (models.video.r3d_18(), (torch.randn(1, 3, 8, 56, 56),), {})
    pair = (128, 128)
    found["raft_small"] = lambda: (
        models.optical_flow.raft_small(),
        (torch.randn(2, 3, *pair), torch.randn(2, 3, *pair)),
        {"num_flow_updates": 2},
    )
    return found


def timm_models(size: int) -> dict[str, Build]:
    """A few of timm's families."""
    import timm

    sides = {"coat_lite_tiny": 224, "xcit_nano_12_p16_224": 224, "mixer_s32_224": 224,
             "efficientformer_l1": 224, "levit_128s": 224}  # fmt: skip
    names = [
        *sides,
        "resnetv2_50",
        "regnety_002",
        "convnextv2_atto",
        "mobilevit_xxs",
        "poolformer_s12",
    ]

    def build(name: str) -> Build:
        side = sides.get(name, size)
        return lambda: (timm.create_model(name), (torch.randn(2, 3, side, side),), {})

    return {name: build(name) for name in names}


def language_models() -> dict[str, Build]:
    """Hugging Face models from small configurations."""
    import transformers as hf

    ids = torch.randint(0, 500, (2, 32))
    small = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 512,
    }

    def whisper() -> tuple[nn.Module, tuple[object, ...], dict[str, object]]:
        config = hf.WhisperConfig(
            vocab_size=512, d_model=64, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
            decoder_ffn_dim=128, max_source_positions=50, num_mel_bins=80,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )  # fmt: skip
        model = hf.WhisperForConditionalGeneration(config)
        return model, (), {"input_features": torch.randn(2, 80, 100), "labels": ids}

    def vit() -> tuple[nn.Module, tuple[object, ...], dict[str, object]]:
        options = {k: v for k, v in small.items() if k != "vocab_size"}
        model = hf.ViTForImageClassification(hf.ViTConfig(image_size=64, **options))
        return model, (torch.randn(2, 3, 64, 64),), {}

    def t5() -> tuple[nn.Module, tuple[object, ...], dict[str, object]]:
        config = hf.T5Config(
            vocab_size=512,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
        return hf.T5ForConditionalGeneration(config), (), {"input_ids": ids, "labels": ids}

    labelled = {"input_ids": ids, "labels": ids}

    def gpt2() -> tuple[nn.Module, tuple[object, ...], dict[str, object]]:
        config = hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=512)
        return hf.GPT2LMHeadModel(config), (), labelled

    def bert() -> tuple[nn.Module, tuple[object, ...], dict[str, object]]:
        return hf.BertForMaskedLM(hf.BertConfig(**small)), (), labelled

    def llama() -> tuple[nn.Module, tuple[object, ...], dict[str, object]]:
        return hf.LlamaForCausalLM(hf.LlamaConfig(**small)), (), labelled

    return {
        "gpt2": gpt2,
        "bert": bert,
        "llama": llama,
        "t5": t5,
        "whisper": whisper,
        "hf_vit": vit,
    }


def plain_models() -> dict[str, Build]:
    """Recurrent layers and the built-in transformer."""
    sequence = torch.randn(20, 2, 32)
    encoder = nn.TransformerEncoderLayer(32, 4, 64)
    return {
        "lstm": lambda: (nn.LSTM(32, 48, num_layers=2, bidirectional=True), (sequence,), {}),
        "gru": lambda: (nn.GRU(32, 48, num_layers=2), (sequence,), {}),
        "rnn": lambda: (nn.RNN(32, 48, batch_first=True), (sequence,), {}),
        "transformer_encoder": lambda: (nn.TransformerEncoder(encoder, 2), (sequence,), {}),
    }


def main() -> None:
    """Print one row per operator; only those with errors unless ``--all``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", help="comma-separated; default: all")
    parser.add_argument("--size", type=int, default=64, help="side of the images")
    parser.add_argument("--all", action="store_true", help="also rows without errors")
    parser.add_argument(
        "--layouts", action="store_true", help="outputs whose layout differs from the fake one's"
    )
    options = parser.parse_args()
    models = {
        **plain_models(),
        **language_models(),
        **vision_models(options.size),
        **timm_models(options.size),
    }
    chosen = options.models.split(",") if options.models else list(models)
    rows: dict[str, Row] = defaultdict(Row)
    for name in chosen:
        start = time.perf_counter()
        for train in (True, False):
            try:
                run_model(models[name], train, rows, name)
            except Exception as error:  # a model that the environment cannot build
                print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    print(f"{'operator':60} {'cases':>6} {'wrong':>6} {'worst error':>12}  where")
    for operator, row in sorted(rows.items(), key=lambda item: -abs(item[1].worst_bytes)):
        if row.wrong or options.all:
            print(f"{operator:60} {row.cases:6} {row.wrong:6} {row.worst_bytes:12}  {row.worst}")
        if options.layouts:
            for layout in sorted(row.layouts)[:3]:
                print(f"    layout {operator} {layout}")
    wrong, cases = sum(r.wrong for r in rows.values()), sum(r.cases for r in rows.values())
    print(f"{wrong} of {cases} calls differ, {len(rows)} operators")


if __name__ == "__main__":
    main()
