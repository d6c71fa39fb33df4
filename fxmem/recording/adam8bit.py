"""Adam with 8-bit states, as the library bitsandbytes keeps them: by formula.

Its kernels run on a GPU alone. What they keep is known: ``bitsandbytes/optim/optimizer.py``,
``Optimizer2State.init_state`` and ``get_state_buffer``. They update in place, without temporaries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn, optim

_BLOCK_ELEMENTS = 256
"""Elements that share a scale."""
_MIN_ELEMENTS = 4096
"""``min_8bit_size``: smaller parameters have states of 32 bits."""
_CODES = 256


class Adam8bit(optim.Optimizer):
    """Allocates what bitsandbytes' ``Adam8bit`` does; computes nothing.

    Args:
        params: The parameters.
        lr: Learning rate; changes no allocation.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self._maps: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Makes the states that are missing."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter].update(self._make_state(parameter))

    def _make_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        count = parameter.numel()
        if count < _MIN_ELEMENTS:
            return {
                "state1": torch.zeros_like(parameter, dtype=torch.float32),
                "state2": torch.zeros_like(parameter, dtype=torch.float32),
            }
        if self._maps is None:  # one pair of them for all parameters
            first, second = (torch.zeros(_CODES, device=parameter.device) for _ in range(2))
            self._maps = first, second
        blocks = -(-count // _BLOCK_ELEMENTS)
        return {
            "state1": torch.zeros_like(parameter, dtype=torch.uint8),
            "qmap1": self._maps[0],
            "absmax1": torch.zeros(blocks, device=parameter.device),
            "state2": torch.zeros_like(parameter, dtype=torch.uint8),
            "qmap2": self._maps[1],
            "absmax2": torch.zeros(blocks, device=parameter.device),
        }
