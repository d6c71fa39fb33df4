"""Passes over a ``torch.fx.GraphModule`` of the user's own."""

from __future__ import annotations

from fxmem.passes.checkpoint_pass import CheckpointPass
from fxmem.passes.inplace_pass import InplacePass
from fxmem.passes.memory_prop import MemoryProp, NodeMemory

__all__ = ["CheckpointPass", "InplacePass", "MemoryProp", "NodeMemory"]
