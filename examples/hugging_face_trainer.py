"""Hugging Face: a callback that plans the model of a Trainer for its first batch.

pip install transformers accelerate
python examples/hugging_face_trainer.py
"""

from __future__ import annotations

import tempfile

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from fxmem.integrations.transformers import FxmemCallback


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
    planned, found = train(FxmemCallback(max_overhead=0.5, apply=True, time_limit_s=2))
    assert found == expected
    assert planned.plan.segments
    for ours, theirs in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    print(f"{len(expected)} steps, loss {expected[0]} -> {expected[-1]}: the same")
