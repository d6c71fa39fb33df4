"""Loops of trainers, run by the trainers themselves, against the CPU allocator's own events."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from profiled import measure_peaks
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.data import DataLoader

import fxmem
from benchmarks.cases import import_torchvision
from fxmem.graph import Phase

STEPS = ("the first step", "the second step")
VOCABULARY, TOKENS = 512, (8, 32)
SCALAR = 4  # bytes; 512 on a GPU
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def libraries() -> None:
    names = ("torchvision", "transformers", "accelerate", "lightning")
    if any(importlib.util.find_spec(name) is None for name in names):
        pytest.skip("the trainers are not installed")
    import_torchvision()
    import lightning.pytorch
    import transformers

    # What they allocate when they are imported is no part of a loop.
    assert lightning.pytorch.Trainer and transformers.Trainer


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def make_batch(_features: Any = None) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, TOKENS)
    return {"input_ids": ids, "labels": ids.clone()}


def compute_own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    squares = outputs.logits * outputs.logits  # in float32 where autocast does not cover it
    return squares.mean(-1).where(labels >= 0, 0.0).mean()


def train_with_transformers(folder: Path, own_loss: bool, **arguments: Any) -> None:
    """Three steps, so that in the second the loader has a batch for the next; two are marked."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Mark(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.mark = record_function((*STEPS, "the third step")[state.global_step])
            self.mark.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.mark.__exit__(None, None, None)

    trainer = Trainer(
        make_llama(),
        TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=1,
            max_steps=len(STEPS) + 1,
            optim="adamw_torch",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            **arguments,
        ),
        train_dataset=[0] * 3 * arguments.get("gradient_accumulation_steps", 1),
        data_collator=make_batch,
        compute_loss_func=compute_own_loss if own_loss else None,
        callbacks=[Mark()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({}, {}),
        ({"gradient_accumulation_steps": 3}, {"accumulate": 3}),
        ({"bf16": True}, {"autocast": "bf16"}),
        ({"bf16": True, "own_loss": True}, {"autocast": "bf16", "loss": "own"}),
        ({"max_grad_norm": 0.0, "own_loss": True}, {"loss": "own"}),
    ],
)
def test_transformers_trainer(
    tmp_path: Path, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    arguments = {"own_loss": False, **arguments}
    measured = measure_peaks(lambda: train_with_transformers(tmp_path, **arguments), STEPS)
    batch = make_batch()
    inputs = dict(batch)
    if arguments["own_loss"]:
        labels = inputs.pop("labels")
        options = {**options, "loss": lambda output: compute_own_loss(output, labels)}
    analysis = fxmem.analyze(
        make_llama(),
        (),
        inputs,
        device="cpu",
        optimizer="adamw",
        loop="huggingface",
        **options,
    )
    assert analysis.first_step is not None
    # The loader has the next batch already, which is in the host's memory where there is a GPU.
    waiting = sum(tensor.nbytes for tensor in batch.values())
    # Models whose loss takes it, and a loss of one's own, are given the number of items.
    peaks = (analysis.first_step.peak_bytes, analysis.peak_bytes)
    assert measured == [peak + waiting + SCALAR for peak in peaks]


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.Linear(512, 256))


def compute_loss(output: Tensor) -> Tensor:
    return output.float().square().mean()


OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def train_with_lightning(optimizer: str, **arguments: Any) -> None:
    """Two steps, each marked."""
    import lightning.pytorch as lightning

    batches = arguments.get("accumulate_grad_batches", 1)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            output = self.net(batch)
            return compute_loss(output)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return OPTIMIZERS[optimizer](self.parameters(), lr=1e-3)

    class Mark(lightning.Callback):
        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Tensor, batch_idx: int
        ) -> None:
            if batch_idx % batches == 0:
                self.mark = record_function(STEPS[batch_idx // batches])
                self.mark.__enter__()

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Tensor, batch_idx: int
        ) -> None:
            if batch_idx % batches == batches - 1:
                self.mark.__exit__(None, None, None)

    inputs = torch.zeros(256, 64)
    loader = DataLoader([0] * len(STEPS) * batches, batch_size=1, collate_fn=lambda _: inputs)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Mark()],
        **arguments,
    )
    trainer.fit(Module(), loader)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)  # where the peak is, and in the loss
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({}, {}),
        ({"accumulate_grad_batches": 3}, {"accumulate": 3}),
        ({"precision": "bf16-mixed"}, {"autocast": "bf16"}),
        ({"gradient_clip_val": 1.0}, {"loop": "lightning(clip_grad=True)"}),
    ],
)
def test_lightning_trainer(
    optimizer: str, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    measured = measure_peaks(lambda: train_with_lightning(optimizer, **arguments), STEPS)
    analysis = fxmem.analyze(
        make_net(),
        ("256x64",),
        device="cpu",
        optimizer=optimizer,
        loss=compute_loss,
        **{"loop": "lightning", **options},
    )
    first = analysis.first_step
    assert first is not None
    # Once there is a loss, ClosureResult has a copy of it.
    scalars = [0 if at is Phase.LOSS else SCALAR for at in (first.phase, analysis.peak.phase)]
    peaks = [first.peak_bytes, analysis.peak_bytes]
    assert measured == [sum(pair) for pair in zip(peaks, scalars, strict=True)]
