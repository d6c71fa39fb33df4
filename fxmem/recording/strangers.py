"""The user's own real tensors that a step meets, and the fakes that stand for them.

The copy of a model reaches what its objects hold. What the code of a class takes from a global,
or makes without an operator (``torch.from_numpy``), is real.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from fxmem.recording.constants import remember_constant
from fxmem.tracing.tensor_copier import TensorCopier

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Strangers:
    """Finds the fake of a real tensor, the same one each time."""

    def __init__(self) -> None:
        self._fakes: MutableMapping[Any, torch.Tensor] = WeakIdKeyDictionary()

    def find_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a real tensor; any other tensor itself.

        Must be called with the step's fake mode active.
        """
        if isinstance(tensor, FakeTensor) or type(tensor) not in _PLAIN:
            return tensor
        fake = self._fakes.get(tensor)
        if fake is None:
            mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
            # A copier each: once the real one is freed, another may have its address.
            fake = self._fakes[tensor] = TensorCopier(mode).copy(tensor)
            remember_constant(fake, tensor)
        return fake

    def replace(self, arguments: Any) -> Any:
        """An operator's arguments with fakes in place of real tensors."""
        return tree_map_only(torch.Tensor, self.find_fake, arguments)

    def restore_gradients(self) -> None:
        """Takes off the user's tensors what backward has put there."""
        for tensor in self._fakes:
            if tensor.is_leaf and isinstance(tensor.grad, FakeTensor):
                tensor.grad = None
