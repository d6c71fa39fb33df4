"""What the target device would run, and what its kernels allocate inside themselves."""

from __future__ import annotations

from fxmem.kernels import householder, inplace, linalg, strides, values

# Imported for what they register with the target that every device builds upon.
_MODULES = (householder, inplace, linalg, strides, values)
