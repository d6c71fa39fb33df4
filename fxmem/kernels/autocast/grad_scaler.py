"""The gradient scaler that a step in float16 has.

Source: ``torch/amp/grad_scaler.py``, and ``aten/src/ATen/native/cuda/AmpKernels.cu``, whose
kernels allocate nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.cuda.gpu import CUDA


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler("cuda")`` on fake tensors, in a step whose gradients are finite.

    Its code is PyTorch's own, save for the question to the GPU that decides whether the optimizer
    steps.
    """

    def __init__(self) -> None:
        super().__init__("cpu")  # "cuda" would look for a GPU, and is used for nothing else

    @property
    def state_tensors(self) -> tuple[Tensor, ...]:
        """The scalars that it keeps on the GPU from the first step on: scale and growth tracker."""
        return tuple(t for t in (self._scale, self._growth_tracker) if t is not None)

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> float | None:
        """Steps only where ``item()`` of no ``found_inf`` is 1."""
        return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]


CUDA.make_scaler = GradScaler
