"""The CPU as a target: all that its modules registered."""

from __future__ import annotations

from fxmem.lowering import (
    cpu_activation,
    cpu_columns,
    cpu_embedding,
    cpu_grouped,
    cpu_inplace,
    cpu_linalg,
    cpu_losses,
    cpu_masked,
    cpu_pooling,
    cpu_rnn,
    cpu_values,
)
from fxmem.lowering.functions import CPU

__all__ = ["CPU"]

# Imported for what they register.
_MODULES = (
    cpu_activation,
    cpu_columns,
    cpu_embedding,
    cpu_grouped,
    cpu_inplace,
    cpu_linalg,
    cpu_losses,
    cpu_masked,
    cpu_pooling,
    cpu_rnn,
    cpu_values,
)
