"""The CPU as a target."""

from __future__ import annotations

from fxmem.kernels.target import ANY, Target

CPU = Target("cpu", ANY)
"""PyTorch's CPU build; filled by the modules beside this one, which the package imports."""
