"""A projection and its cross entropy, beside a kernel that has both in one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import find_allocated_after, list_peaks

CUDA = "cuda"


class Measurement(nn.Module):
    """The script between two readings of the peak: inputs and weights are made there."""

    def __init__(self, tokens: int, size: int, classes: int) -> None:
        super().__init__()
        self.tokens, self.size, self.classes = tokens, size, classes

    def forward(self) -> None:
        """One step from nothing."""
        with torch.enable_grad():
            x = torch.randn(self.tokens, self.size, requires_grad=True, device=CUDA)
            labels = torch.randint(0, self.classes, (self.tokens,), device=CUDA)
            projection = nn.Linear(self.size, self.classes, bias=False).cuda()
            _compute(projection, x, labels).mean().backward()


def _compute(projection: nn.Linear, x: Tensor, labels: Tensor) -> Tensor:
    logits = projection(x)
    return functional.cross_entropy(logits, labels)


def predict(case: Case) -> dict[str, int]:
    """The peak minus what there was: nothing at the first call, else cuBLAS's workspaces."""
    config = case.config
    sizes = config["n_tokens"], config["dim"], config["n_classes"]
    analysis = fxmem.analyze(Measurement(*sizes), mode="infer", gpu=case.gpu, alloc_conf="")
    is_first = config.get("is_first", False)
    before = 0 if is_first else find_allocated_after(analysis, ())
    return {"allocated by a step": list_peaks(analysis, first=is_first)["allocated"] - before}
