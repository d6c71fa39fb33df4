"""Passes over a ``torch.fx.GraphModule`` of the user's own."""

from __future__ import annotations

from fxmem.passes.memory_prop import MemoryProp
from fxmem.passes.plan_passes import CheckpointPass, InplacePass
from fxmem.training.annotation import NodeMemory

__all__ = ["CheckpointPass", "InplacePass", "MemoryProp", "NodeMemory"]
