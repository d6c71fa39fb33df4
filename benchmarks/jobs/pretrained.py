"""A checkpoint on the device beside its model, then a Transformer, averaged and evaluated."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import record_function

device, checkpoint = sys.argv[1:]
torch.manual_seed(0)


def make_model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(192, 6, 768, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(48, 192), nn.TransformerEncoder(layer, 4), nn.Linear(192, 48))


with record_function("loading"):
    model = make_model().to(device)
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict({name: each.clone() for name, each in saved.items()})
        del saved
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for step in range(8):
    x = torch.randn(4, 64, 48).to(device)
    F.mse_loss(model.train()(x), x).backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    if step % 4 == 3:
        with record_function("evaluation"), torch.inference_mode():
            x = torch.randn(64, 64, 48).to(device)
            losses = [F.mse_loss(each.eval()(x), x).item() for each in (model, average)]
        del x
        print(losses)
torch.save(model.state_dict(), checkpoint)
