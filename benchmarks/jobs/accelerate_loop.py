"""A loop of accelerate that accumulates, resumes, and gathers what an evaluation predicts."""

import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.profiler import record_function
from torch.utils.data import DataLoader, TensorDataset

device, folder = sys.argv[1:]
torch.manual_seed(0)
accelerator = Accelerator(cpu=device == "cpu", gradient_accumulation_steps=2)
tokens = torch.randint(0, 4000, (256, 48))
with record_function("loading"):
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(4000, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 4000)
    )
    model, optimizer, train_data, test_data = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), 1e-3),
        DataLoader(TensorDataset(tokens[:128]), 16),
        DataLoader(TensorDataset(tokens[128:]), 32),
    )
    if os.path.exists(folder):
        accelerator.load_state(folder)
for _ in range(2):
    model.train()
    for (x,) in train_data:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with record_function("evaluation"):
        found = []
        for (x,) in test_data:
            with torch.no_grad():
                found.append(accelerator.gather_for_metrics(model(x)))
        right = (torch.cat(found).argmax(-1).cpu() == tokens[128:]).float().mean().item()
        del found
    accelerator.save_state(folder)
    print(f"{right:.1%} right")
