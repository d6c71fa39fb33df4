"""Cross entropy over Gemma 2's vocabulary with soft-capped logits, beside Cut Cross-Entropy."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import find_allocated_after, find_peak_in
from fxmem.graph import Phase

FORWARD = (Phase.FORWARD, Phase.LOSS)


class Baseline(nn.Module):
    """The classifier and its loss; embeddings get gradients as weights do."""

    def __init__(self, tokens: int, size: int, vocabulary: int, softcap: float) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(torch.empty(tokens, size, dtype=torch.bfloat16))
        self.classifier = nn.Parameter(torch.empty(vocabulary, size, dtype=torch.bfloat16))
        self.softcap = softcap

    def forward(self, labels: Tensor) -> Tensor:
        """The loss."""
        logits = self.embeddings @ self.classifier.T
        logits = torch.tanh(logits / self.softcap) * self.softcap
        return functional.cross_entropy(logits.float(), labels)


def predict(case: Case) -> dict[str, int]:
    """Peaks minus what there was before; the process has run all of it once to warm up."""
    config = case.config
    tokens = config["tokens"]
    sizes = f"{tokens}, {config['hidden_size']}, {config['vocabulary']}, {config['softcap']}"
    analysis = fxmem.analyze(
        f"{__name__}:Baseline({sizes})",
        (fxmem.TensorSpec((tokens,), "int64"),),
        gpu=case.gpu,
        alloc_conf="",
    )
    before = find_allocated_after(analysis, ())
    forward = find_peak_in(analysis, FORWARD)
    backward = find_peak_in(analysis, [Phase.BACKWARD])
    return {
        "allocated by forward": forward - before,
        "allocated by backward": backward - find_allocated_after(analysis, FORWARD),
        "allocated by both passes": max(forward, backward) - before,
    }
