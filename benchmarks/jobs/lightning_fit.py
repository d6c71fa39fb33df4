"""lightning.Trainer, which tries validation before it trains, validates and saves."""

import sys
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import record_function
from torch.utils.data import DataLoader, TensorDataset

device, folder = sys.argv[1:]
torch.manual_seed(0)


class Autoencoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 784))
        self.codes: list[Tensor] = []

    def training_step(self, batch: Any, _index: int) -> Tensor:
        (x,) = batch
        return F.mse_loss(self.decoder(self.encoder(x)), x)

    def on_validation_start(self) -> None:
        self.mark = record_function("evaluation")
        self.mark.__enter__()

    def validation_step(self, batch: Any, _index: int) -> None:
        (x,) = batch
        codes = self.encoder(x)
        self.log("loss", F.mse_loss(self.decoder(codes), x))
        self.codes.append(codes)

    def on_validation_end(self) -> None:
        self.codes.clear()
        self.mark.__exit__(None, None, None)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)


images = torch.rand(3072, 784)
with record_function("loading"):
    model = Autoencoder()
lightning.Trainer(
    max_epochs=1,
    accelerator="cpu" if device == "cpu" else "gpu",
    devices=1,
    default_root_dir=folder,
    logger=False,
    enable_progress_bar=False,
).fit(
    model,
    DataLoader(TensorDataset(images[:512]), 64),
    DataLoader(TensorDataset(images[512:]), 512),
)
