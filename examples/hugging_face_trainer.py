"""Hugging Face: a callback that has the model of a Trainer plan itself.

pip install transformers accelerate
python examples/hugging_face_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import fxmem


class PlanMemory(TrainerCallback):
    """Plans the model at the first training step, for its batch.

    Args:
        options: As for ``fxmem.auto``, such as ``budget="8GiB"`` or ``max_overhead=0.2``.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: PreTrainedModel, **kwargs: Any
    ) -> None:
        model.config.use_cache = False  # as gradient checkpointing has it
        fxmem.auto(model, **self.options)


def make_examples() -> list[dict[str, list[int]]]:
    """Counting upwards, from anywhere."""
    starts = torch.randint(0, 40, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    counted = [[*range(start, start + 24)] for start in starts]
    return [{"input_ids": ids, "labels": ids} for ids in counted]


def train(*callbacks: TrainerCallback) -> tuple[PreTrainedModel, list[float]]:
    """An epoch; the model, and the losses of its steps."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=16,
            num_train_epochs=2,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=make_examples(), callbacks=[*callbacks])
        trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    plain, expected = train()
    planned, found = train(PlanMemory(max_overhead=0.5, device="cpu", time_limit_s=2))
    assert found == expected
    assert planned.plan.segments
    for ours, theirs in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    print(f"{len(expected)} steps, loss {expected[0]} -> {expected[-1]}: the same")
