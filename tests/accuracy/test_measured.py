"""Steps on an H200 that the project measured, against predictions: every kind of model once.

The measurements are of torch 2.11; these steps ask for as much under later releases, but for
cuBLASLt's workspace, which from 2.12 on is cuBLAS's (pull request 168175). All others are in
docs/results/h200_eager.md and h200_compiled.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.cases import import_torchvision
from benchmarks.cuda_accuracy import DATA, MIB, Row, compare, list_measurements
from fxmem.versions.release import is_release

LIBRARIES = ("timm", "torchvision", "transformers")
if not all(map(find_spec, LIBRARIES)):
    pytest.skip(f"needs {', '.join(LIBRARIES)}", allow_module_level=True)

MEASURED = {each.name: each for each in list_measurements(DATA)}
REQUESTED = ("first requested", "second requested")
EXACT = (
    *("gpt2-b8-fp32-sgd", "bert-b16-fp32-infer", "vit_b_16-b32-fp32-infer"),
    *("llama-b2-fp32-infer", "mixer_b16_224-b32-fp32-adam", "convnext_tiny-b32-fp32-infer"),
    *("lstm-b64-fp32-infer", "gru_bidirectional-b64-fp32-infer", "densenet121-b16-fp32-infer"),
)
CUDNN = {  # bytes that cuDNN's workspaces have besides: headers, and parts of weights' gradients
    "resnet18-b64-fp32-infer": 16,
    "vgg16_bn-b16-fp32-infer": 147,
    "unet-b8-fp32-infer": 16,
    "resnet50-b32-fp32-adam-fused": 16,
    "resnet50-b8-bf16-adam": 16,
}


def list_missing(name: str) -> list[int]:
    """Measures by how much predictions are too low, apart from cuBLASLt's workspace."""
    row = compare_case(name)
    missing = [row.measured[key] - row.predicted[key] for key in REQUESTED]
    own = MIB if is_release(since=(2, 12)) else 0
    return [nbytes - own if nbytes >= own else nbytes for nbytes in missing]


def compare_case(name: str) -> Row:
    import_torchvision()
    row = compare(MEASURED[name])
    assert row.predicted, row.notes
    return row


@pytest.mark.parametrize("name", EXACT)
def test_as_much_is_requested(name: str) -> None:
    assert list_missing(name) == [0, 0]


@pytest.mark.parametrize("name", CUDNN)
def test_convolutions_are_off_by_what_cudnn_adds(name: str) -> None:
    assert list_missing(name) == [CUDNN[name]] * 2


@pytest.mark.parametrize("name", ["lstm-b64-fp32-sgd", "gru_bidirectional-b64-bf16-adam"])
def test_recurrent_steps_are_within_two_thousandths(name: str) -> None:
    row = compare_case(name)
    assert all(abs(row.error(key) or 0) < 0.002 for key in REQUESTED)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_step_asks_for_as_much() -> None:
    assert list_missing("llama-b2-bf16-infer-compiled_model") == [0, 0]


TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

tokens = torch.randint(0, 50257, (64, 512))
Trainer(
    model=GPT2LMHeadModel(GPT2Config(n_layer=6)),
    args=TrainingArguments(
        output_dir="out", bf16=True, max_steps=4, per_device_train_batch_size=8, report_to=[],
        save_strategy="no", logging_steps=1, torch_compile=COMPILE,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
).train()
"""


PREDICT = """
import json
from benchmarks.cases import import_torchvision
import_torchvision()
import fxmem
steps = fxmem.run("train.py", gpu="h200", steps=2).steps
print("\\n" + json.dumps([step.requested_bytes for step in steps]))
"""


@pytest.mark.parametrize("compiles", [False, True])
def test_a_trainer_asks_for_as_much(tmp_path: Path, compiles: bool) -> None:
    """Measured in a process of its own, with torch 2.11 and transformers 5.17.

    Later releases of inductor free a product of lm_head before the peak.
    """
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(TRAINER.replace("COMPILE", str(compiles)))
    command = [sys.executable, "-c", PREDICT]  # flags of torch that the Trainer sets stay
    paths = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    first, second = json.loads(run.stdout.splitlines()[-1])
    later = is_release(since=(2, 12))
    measured = 3_214_501_136 - later * 4096 * 768 * 2 if compiles else 5_330_361_264
    assert abs(second + later * MIB - measured) < 128  # numbers of the loss
    assert first < second  # nothing is left of the compilation
