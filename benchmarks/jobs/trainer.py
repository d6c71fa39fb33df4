"""transformers' Trainer, which keeps the logits of a whole evaluation on the device."""

import sys
from typing import Any

import torch
from torch.profiler import record_function

from benchmarks.cases import import_torchvision

import_torchvision()
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

device, folder = sys.argv[1:]
torch.manual_seed(0)


class Marked(Trainer):
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with record_function("evaluation"):
            return super().evaluate(*args, **kwargs)


tokens = [torch.randint(0, 2000, (64,)) for _ in range(72)]
data: Any = [{"input_ids": each, "labels": each} for each in tokens]
config = GPT2Config(vocab_size=2000, n_embd=128, n_layer=3, n_head=4, n_positions=128)
with record_function("loading"):
    model: Any = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        num_train_epochs=1,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=device == "cpu",
    )
    trainer = Marked(model, arguments, train_dataset=data[:40], eval_dataset=data[40:])
trainer.train()
