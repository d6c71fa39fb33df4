"""Trains a language model of characters twice, without a plan and with one: the same curve.

The text is the Python standard library's own: the tutorial topics of ``pydoc``. Every loss, every
parameter and the validation loss at the end are the same bit for bit, and the activations, which
are all that the step takes above parameters, gradients, optimizer and batch, take less than half.

    python examples/train_characters.py
"""

from __future__ import annotations

import copy
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxmem
from fxmem.units import format_bytes
from fxmem.verifying.measuring import measure_peak

BATCH, LENGTH, STEPS = 12, 48, 60


class Block(nn.Module):
    """Attention and an MLP, each with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.split = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.split(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y = self.join(y.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(y, 0.1, self.training)
        return x + self.feed(self.norms[1](x))


class Characters(nn.Module):
    """Tells the next character."""

    def __init__(self, characters: int, width: int = 64, heads: int = 4, blocks: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(characters, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.letters(ids) + self.places[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def read_text() -> tuple[Tensor, int]:
    """The text as numbers, and how many characters there are."""
    text = "\n".join(topics[name] for name in sorted(topics))
    letters = sorted(set(text))
    numbers = {letter: number for number, letter in enumerate(letters)}
    return torch.tensor([numbers[letter] for letter in text]), len(letters)


def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def draw_batch(data: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Pieces of the text, and what follows each of their characters."""
    starts = torch.randint(len(data) - LENGTH - 1, (size,)).tolist()
    pieces = torch.stack([data[start : start + LENGTH + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


def train(model: nn.Module, data: Tensor) -> list[float]:
    """Trains, and answers the loss of each step."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(1, STEPS + 1):
        # The last batch of each epoch, here of ten, is smaller.
        ids, targets = draw_batch(data, BATCH if step % 10 else BATCH // 3)
        optimizer.zero_grad()
        loss = compute_loss(model(ids), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def measure_activations(model: nn.Module, data: Tensor) -> int:
    """The most that forward and backward hold beyond parameters, gradients and the batch.

    It is measured: the profiler sees each allocation of a real step.
    """
    ids, targets = draw_batch(data, BATCH)
    return measure_peak(
        prepare=lambda: None,  # the gradients are there, of the last step
        list_held=list,  # nor do parameters count
        step=lambda: compute_loss(model(ids), targets).backward(),
        release=lambda: None,
        device=torch.device("cpu"),
    )


def main() -> None:
    data, characters = read_text()
    torch.manual_seed(0)
    model = Characters(characters)
    twin = copy.deepcopy(model)
    ids, _ = draw_batch(data, BATCH)
    planned = fxmem.auto(twin, ids, max_overhead=0.4, device="cpu", time_limit_s=2)

    expected, found = train(model, data), train(planned, data)
    print("step  loss      loss with the plan")
    for step in range(0, STEPS, 10):
        print(f"{step + 1:4}  {expected[step]:.6f}  {found[step]:.6f}")
    print(f"{STEPS:4}  {expected[-1]:.6f}  {found[-1]:.6f}")
    assert expected == found
    names = dict(model.named_parameters())
    assert all(torch.equal(names[name], value) for name, value in twin.named_parameters())
    print(f"the same in all {STEPS} steps, and the same {len(names)} parameters, bit for bit")

    before, after = measure_activations(model, data), measure_activations(planned, data)
    ratio = before / after
    print(f"activations {format_bytes(before)} -> {format_bytes(after)}: {ratio:.1f}x less")
    assert ratio >= 2


if __name__ == "__main__":
    main()
