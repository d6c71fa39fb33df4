"""A plain loop that resumes, evaluates with all logits on the device, and saves the best."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import record_function
from torch.utils.data import DataLoader, TensorDataset

device, checkpoint = sys.argv[1:]
torch.manual_seed(0)
inputs, targets = torch.randn(640, 3, 32, 32), torch.randint(0, 100, (640,))
train_data = DataLoader(TensorDataset(inputs[:384], targets[:384]), 64)
test_data = DataLoader(TensorDataset(inputs[384:], targets[384:]), 128)
with record_function("loading"):
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(8)),
        *(nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 100)),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        del saved
for epoch in range(2):
    model.train()
    for x, y in train_data:
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with record_function("evaluation"), torch.no_grad():
        logits = torch.cat([model(x.to(device)) for x, _ in test_data])
        right = (logits.argmax(1).cpu() == targets[384:]).float().mean().item()
        del logits
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    print(f"epoch {epoch}: loss {loss.item():.3f}, {right:.1%} right")
