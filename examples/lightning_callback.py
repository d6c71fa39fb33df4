"""Lightning: a callback that plans the steps of a LightningModule for its first batch.

pip install lightning
python examples/lightning_callback.py
"""

from __future__ import annotations

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fxmem.integrations.lightning import FxmemCallback


class Classifier(lightning.LightningModule):
    """Tells which of two sums is larger."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
        self.net = nn.Sequential(nn.Linear(16, 64), *layers, nn.Dropout(0.1), nn.Linear(64, 2))
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        loss = nn.functional.cross_entropy(self.net(x), target)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def train(*callbacks: lightning.Callback) -> Classifier:
    """A few epochs, whose last batches are smaller."""
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(200, 16)
    target = (x[:, :8].sum(1) > x[:, 8:].sum(1)).long()
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=6,
        accelerator="cpu",
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, target), batch_size=64, shuffle=True))
    return model


if __name__ == "__main__":
    plain = train()
    planned = train(FxmemCallback(max_overhead=0.5, apply=True, time_limit_s=2))
    assert planned.losses == plain.losses
    for ours, theirs in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    print(
        f"{len(plain.losses)} steps, loss {plain.losses[0]:.4f} -> {plain.losses[-1]:.4f}: the same"
    )
