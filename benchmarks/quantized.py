"""Compares steps with packed weights and states on the CPU with the same steps, run.

    python -m benchmarks.quantized [--only NAME ...] [-o docs/results/quantized.md]

Each case runs three steps in a process of its own, under PyTorch's profiler without fxmem; then
fxmem records the same code. What the third step takes is compared. torchao, HQQ and optimum-quanto
are found in the folder that ``FXMEM_PACKAGES`` names, if they are not installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.cases import import_torchvision
from benchmarks.measure import STEP_MARK, THREADS, no_collector, read_events
from benchmarks.stamp import put_page, write_stamp

Build = Callable[[], Callable[[], None]]
"""Builds a model and an optimizer on the CPU; returns a step."""


def train(model: nn.Module, optimizer: Any, make: Callable[[], Tensor]) -> Callable[[], None]:
    def step() -> None:
        model(make()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_layers(make: Callable[[int, int], nn.Module], dtype: torch.dtype) -> Callable[[], None]:
    """Builds frozen layers around a layer that is trained."""
    model = nn.Sequential(make(512, 2048), nn.GELU(), make(2048, 512)).to("cpu")
    head = nn.Linear(512, 16, dtype=dtype)
    optimizer = torch.optim.AdamW(head.parameters())
    x = partial(torch.randn, 64, 512, dtype=dtype, requires_grad=True)
    return train(nn.Sequential(model, head), optimizer, x)


def build_four_bits(quant_type: str, nested: bool) -> Callable[[], None]:
    from bitsandbytes.nn import Linear4bit

    options = {"compress_statistics": nested, "quant_type": quant_type}
    make = partial(Linear4bit, compute_dtype=torch.bfloat16, **options)
    return build_layers(make, torch.float32)


def build_eight_bits(threshold: float) -> Callable[[], None]:
    from bitsandbytes.nn import Linear8bitLt

    make = partial(Linear8bitLt, has_fp16_weights=False, threshold=threshold)
    return build_layers(make, torch.bfloat16)


def build_hqq(bits: int) -> Callable[[], None]:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    def make(*sizes: int) -> nn.Module:
        config = BaseQuantizeConfig(nbits=bits, group_size=64)
        layer: nn.Module = HQQLinear(
            nn.Linear(*sizes), config, compute_dtype=torch.bfloat16, device="cpu"
        )
        return layer

    return build_layers(make, torch.bfloat16)


def build_quanto(weights: str) -> Callable[[], None]:
    """Builds frozen layers of optimum-quanto, which quantizes a model in place."""
    from optimum import quanto

    def make(*sizes: int) -> nn.Module:
        layers = nn.Sequential(nn.Linear(*sizes, bias=False, dtype=torch.bfloat16))
        quanto.quantize(layers, weights=getattr(quanto, weights))
        quanto.freeze(layers)
        return layers.requires_grad_(False)

    return build_layers(make, torch.bfloat16)


def build_gptq() -> Callable[[], None]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    def make(*sizes: int) -> nn.Module:
        options = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False, "bias": False}
        layer: nn.Module = TorchLinear(
            **options, **dict(zip(("in_features", "out_features"), sizes, strict=True))
        )
        layer.post_init()
        return layer

    return build_layers(make, torch.float16)


def build_nf4() -> Callable[[], None]:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, linear_nf4

    class Frozen(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            output: Tensor = linear_nf4(input, self.weight)
            return output

    def make(*sizes: int) -> nn.Module:
        layer = Frozen(*sizes, bias=False, dtype=torch.bfloat16)
        packed = NF4Tensor.from_tensor(layer.weight.detach(), 64, 256)
        layer.weight = nn.Parameter(packed, requires_grad=False)
        return layer

    return build_layers(make, torch.bfloat16)


def build_torchao(config: str, **options: Any) -> Callable[[], None]:
    """Builds frozen layers with weights of torchao's, by the name of their configuration."""
    from torchao import quantization

    def make(*sizes: int) -> nn.Module:
        layer = nn.Linear(*sizes, dtype=torch.bfloat16).requires_grad_(False)
        quantization.quantize_(layer, getattr(quantization, config)(**options))
        return layer

    return build_layers(make, torch.bfloat16)


def build_float8_training() -> Callable[[], None]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)
    model = nn.Sequential(*layers).to(torch.bfloat16)
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    optimizer = torch.optim.AdamW(model.parameters())
    return train(model, optimizer, partial(torch.randn, 64, 512, dtype=torch.bfloat16))


def build_optimizer(name: str, package: str = "bitsandbytes", **options: Any) -> Callable[[], None]:
    optimizers = importlib.import_module(f"{package}.optim")
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    optimizer = getattr(optimizers, name)(model.parameters(), lr=1e-4, **options)
    return train(model, optimizer, partial(torch.randn, 64, 512))


@functools.cache
def save_llama() -> tempfile.TemporaryDirectory[str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2}
    config = LlamaConfig(num_attention_heads=4, vocab_size=1024, **sizes)
    folder = tempfile.TemporaryDirectory()
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder.name)
    return folder


def build_adapter(bits: int, method: str = "Lora", **options: Any) -> Callable[[], None]:
    """Builds a Llama of two layers, as ``from_pretrained`` does, with adapters.

    Its weights are packed where they have fewer bits than 16.
    """
    import bitsandbytes
    import peft
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    packing: dict[int, Any] = {
        4: {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16},
        8: {"load_in_8bit": True},
    }
    quantization = BitsAndBytesConfig(**packing[bits]) if bits in packing else None
    model: Any = LlamaForCausalLM.from_pretrained(
        save_llama().name, quantization_config=quantization, device_map={"": "cpu"}
    )
    if quantization:
        model = peft.prepare_model_for_kbit_training(model)
    options = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | options
    model = peft.get_peft_model(model, getattr(peft, f"{method}Config")(**options))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = bitsandbytes.optim.AdamW8bit(trained, lr=1e-4)

    def step() -> None:
        tokens = torch.randint(0, 1024, (4, 128))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


CASES: dict[str, Build] = {
    "Linear4bit, nf4, double quantization": partial(build_four_bits, "nf4", True),
    "Linear4bit, fp4": partial(build_four_bits, "fp4", False),
    "Linear8bitLt": partial(build_eight_bits, 0.0),
    "Linear8bitLt, threshold 6": partial(build_eight_bits, 6.0),
    "AdamW8bit": partial(build_optimizer, "AdamW8bit"),
    "Lion8bit": partial(build_optimizer, "Lion8bit"),
    "AdEMAMix8bit": partial(build_optimizer, "AdEMAMix8bit"),
    "SGD8bit with momentum": partial(build_optimizer, "SGD8bit", momentum=0.9),
    "AdamW in 32 bits": partial(build_optimizer, "AdamW"),
    "QLoRA, checkpoints, AdamW8bit": partial(build_adapter, 4, r=8),
    "QDoRA, checkpoints, AdamW8bit": partial(build_adapter, 4, r=8, use_dora=True),
    "LoRA on 8 bits, checkpoints, AdamW8bit": partial(build_adapter, 8, r=8),
    "LoRA on bfloat16": partial(build_adapter, 16, r=8),
    "IA3": partial(build_adapter, 16, "IA3", feedforward_modules=[]),
    "VeRA": partial(build_adapter, 16, "Vera", r=64),
    "RandLoRA": partial(build_adapter, 16, "RandLora", r=8),
    "HQQ, 4 bits": partial(build_hqq, 4),
    "HQQ, 3 bits": partial(build_hqq, 3),
    "quanto, int8": partial(build_quanto, "qint8"),
    "quanto, int4": partial(build_quanto, "qint4"),
    "quanto, int2": partial(build_quanto, "qint2"),
    "GPTQ, 4 bits": build_gptq,
    "torchao, NF4": build_nf4,
    "torchao, int8 weights": partial(build_torchao, "Int8WeightOnlyConfig"),
    "torchao, float8 weights": partial(build_torchao, "Float8WeightOnlyConfig"),
    "torchao, int8": partial(build_torchao, "Int8DynamicActivationInt8WeightConfig"),
    "torchao, float8 training, emulated": build_float8_training,
    "torchao, AdamW8bit": partial(build_optimizer, "AdamW8bit", "torchao"),
    "torchao, AdamW4bit": partial(build_optimizer, "AdamW4bit", "torchao"),
    "torchao, AdamWFp8": partial(build_optimizer, "AdamWFp8", "torchao"),
}


def measure(name: str) -> int:
    """Measures the third step."""
    with no_collector(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step = CASES[name]()
        step()
        step()
        with record_function(STEP_MARK):
            step()
    return int(read_events(prof)["peak_bytes"])


def predict(name: str) -> int:
    """Predicts the third step."""
    import fxmem

    with fxmem.record(device="cpu", steps=3) as recording:
        step = CASES[name]()
        for _ in range(4):
            step()
    return recording.steps[-1].peak_bytes


def run_apart(what: str, name: str) -> int:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.quantized", f"--{what}", name]
    paths = filter(None, (os.environ.get("PYTHONPATH"), os.environ.get("FXMEM_PACKAGES")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if run.returncode:
        raise RuntimeError(run.stderr.strip().splitlines()[-1])
    return int(json.loads(run.stdout.splitlines()[-1]))


def main() -> None:
    """Compares the cases and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[*CASES])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--predict", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if name := options.measure or options.predict:
        torch.set_num_threads(THREADS)
        import_torchvision()
        packages = ["bitsandbytes", "peft"]  # which make tensors
        if name.startswith("torchao"):
            packages += ["torchao.float8", "torchao.optim"]
        for package in packages:
            importlib.import_module(package)
        if getattr(CASES[name], "func", None) is build_adapter:
            save_llama()
        print("\n" + json.dumps(measure(name) if options.measure else predict(name)))
        return
    rows = []
    for name in options.only:
        real, found = run_apart("measure", name), run_apart("predict", name)
        rows.append([name, f"{real:,}", f"{found:,}", f"{found - real:+,}" if found != real else 0])
        print(*rows[-1], file=sys.stderr, flush=True)
    equal = sum(row[-1] == 0 for row in rows)
    page = f"""# Packed weights and states on the CPU

{write_stamp("python -m benchmarks.quantized -o docs/results/quantized.md")}

The third step of small models with
[bitsandbytes](https://github.com/bitsandbytes-foundation/bitsandbytes),
[peft](https://github.com/huggingface/peft), [torchao](https://github.com/pytorch/ao) (whose
optimizers compile their step), [HQQ](https://github.com/mobiusml/hqq),
[optimum-quanto](https://github.com/huggingface/optimum-quanto) and
[GPTQModel](https://github.com/ModelCloud/GPTQModel), against the profiler's events of the same
step, in bytes: {equal} of {len(rows)} are equal to the byte.

Missing are, of weights that are not packed, the head of the file that they were read from (2,240
bytes); with adapters on 4 bits, 252 bytes of tables that the code makes of Python's numbers and
that stay real tensors with `--device cpu` (NF4's 16 levels, frequencies of rotary embeddings); and
8 bytes of each number that backward keeps as a tensor, such as LoRA's scale.

{tabulate(rows, ["case", "measured", "predicted", "differs by"], tablefmt="github")}
"""
    put_page(page, options.output)


if __name__ == "__main__":
    main()
