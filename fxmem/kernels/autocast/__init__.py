"""CUDA's autocast on fake tensors.

The kernels that follow autocast and autocast itself need each other: whichever is imported first,
:mod:`fxmem.kernels.cuda` imports both in one order.
"""

from __future__ import annotations

import fxmem.kernels.cuda  # noqa: F401
