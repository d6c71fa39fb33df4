"""Loops of trainers, run by the trainers themselves, against the CPU allocator's own events."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from measuring.profiled import measure_peaks
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.data import DataLoader

import fxmem
from benchmarks.cases import import_torchvision
from fxmem.graph import Phase
from fxmem.integrations.first_step import FirstStep, describe_optimizer

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


def train_with_transformers(
    folder: Path, own_loss: bool = False, callbacks: Sequence[Any] = (), **arguments: Any
) -> list[float]:
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
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            **arguments,
        ),
        train_dataset=[0] * 3 * arguments.get("gradient_accumulation_steps", 1),
        data_collator=make_batch,
        compute_loss_func=compute_own_loss if own_loss else None,
        callbacks=[*callbacks, Mark()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


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


def train_with_lightning(
    optimizer: str, callbacks: Sequence[Any] = (), **arguments: Any
) -> list[Tensor]:
    """Two steps, each marked."""
    import lightning.pytorch as lightning

    batches = arguments.get("accumulate_grad_batches", 1)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()
            self.losses: list[Tensor] = []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            output = self.net(batch)
            loss = compute_loss(output)
            if callbacks:
                self.log("loss", loss)
                self.losses.append(loss.detach())
            return loss

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
        callbacks=[*callbacks, Mark()],
        **arguments,
    )
    module = Module()
    trainer.fit(module, loader)
    return module.losses


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


def make_callback(trainer: str, **options: Any) -> Any:
    """The callback of fxmem for a trainer."""
    if trainer == "lightning":
        from fxmem.integrations.lightning import FxmemCallback as ForLightning

        return ForLightning(**options)
    from fxmem.integrations.transformers import FxmemCallback as ForTransformers

    return ForTransformers(**options)


@pytest.mark.parametrize(
    ("trainer", "arguments", "waiting"),
    [
        # The next batch of the loader, and the number of items in this one.
        ("transformers", {"gradient_accumulation_steps": 3, "bf16": True}, 4096 + SCALAR),
        ("lightning", {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}, 2 * SCALAR),
    ],
)
def test_a_callback_plans_the_step_of_its_trainer(
    tmp_path: Path, trainer: str, arguments: dict[str, Any], waiting: int
) -> None:
    losses: list[Any] = []

    def train(callback: Any) -> None:
        torch.manual_seed(0)
        if trainer == "transformers":
            losses.append(train_with_transformers(tmp_path, callbacks=[callback], **arguments))
        else:
            losses.append(train_with_lightning("sgd", [callback], **arguments))

    check = make_callback(trainer)
    planned = make_callback(trainer, max_overhead=0.5, apply=True, time_limit_s=0.3)
    for callback in (check, planned):
        (peak,) = measure_peaks(lambda callback=callback: train(callback), STEPS[1:])
        step = callback.plan or callback.analysis
        # What the analysis leaves behind are copies of counts.
        assert step.peak_bytes <= peak - waiting <= step.peak_bytes + 256
    assert planned.plan.peak_bytes < check.analysis.peak_bytes == planned.analysis.peak_bytes
    assert losses[0] == losses[1]


@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_a_callback_stops_a_step_over_the_budget(tmp_path: Path, trainer: str) -> None:
    callback = make_callback(trainer, budget="1MiB")
    with pytest.raises(fxmem.InfeasibleError) as caught:
        if trainer == "transformers":
            train_with_transformers(tmp_path, callbacks=[callback])
        else:
            train_with_lightning("sgd", [callback])
    assert re.fullmatch(
        r"the training step takes \S+ MiB in \w+, \w+\.py:\d+, more than 1\.00 MiB"
        r" \(apply=True applies a plan; or a smaller batch\)",
        str(caught.value),
    )


def test_a_step_that_cannot_be_analysed_runs_unless_a_plan_is_asked_for() -> None:
    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return -x if x.mean() > 0 else super().forward(x)

    model, x = Branches(4, 4), torch.zeros(2, 4)
    with pytest.warns(fxmem.FxmemWarning, match=r"^the first step is not checked: `x\.mean"):
        assert FirstStep().check(model, (x,), {}) is model
    with pytest.raises(fxmem.DataDependentError):
        FirstStep(apply=True, budget=1).check(model, (x,), {})


def test_an_optimizer_is_analysed_with_its_groups() -> None:
    net = make_net()
    weights, biases = ([p for p in net.parameters() if p.dim() == n] for n in (2, 1))
    groups = [{"params": weights, "weight_decay": 0.1, "foreach": True}, {"params": biases[::-1]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    made = describe_optimizer(optimizer, net)([*make_net().parameters()])
    shapes = [[[p.shape for p in g["params"]] for g in o.param_groups] for o in (optimizer, made)]
    assert shapes[0] == shapes[1]
    for name in ("lr", "weight_decay", "foreach"):
        ours, theirs = ([g[name] for g in o.param_groups] for o in (optimizer, made))
        assert ours == theirs
    sizes = [
        fxmem.analyze(net, "8x64", optimizer=choice, device="cuda").peak_bytes
        for choice in (describe_optimizer(optimizer, net), "adamw")
    ]
    assert sizes[0] < sizes[1]  # one group after the other


def test_outputs_of_fabric_are_cast() -> None:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-true")

    def run() -> None:
        x = torch.ones(128, 64, dtype=torch.bfloat16)
        with fabric.init_module():
            made = nn.Linear(64, 512)
        model, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters()))
        for step in STEPS:
            with record_function(step):
                output = model(x)
                loss = output.sum()
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                del output, loss

    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "optimizer": "sgd"}
    analysis = fxmem.analyze(nn.Linear(64, 512), ("128x64",), loop="fabric", **options)
    assert measure_peaks(run, STEPS)[1] == analysis.peak_bytes
