"""Passes over a ``torch.fx.GraphModule`` of the user's own."""

from __future__ import annotations

from fxmem.passes.memory_prop import MemoryProp, NodeMemory

__all__ = ["MemoryProp", "NodeMemory"]
