"""Flexible attention, whose kernels are written when it is compiled."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from fxmem.errors import TraceError
from fxmem.kernels.cuda.target import CUDA

_MODULE = "torch.nn.attention.flex_attention"
_FIRST_CALL = "_validate_no_nested_tensors"


@CUDA.surrounding
@contextlib.contextmanager
def refuse_flex_attention() -> Iterator[None]:
    """Has ``torch.nn.attention.flex_attention.flex_attention`` say that it is not analysed.

    It hands itself to the compiler, which cannot run a step on fake tensors; the errors of that
    name neither.
    """
    module: Any = sys.modules.get(_MODULE)
    first = getattr(module, _FIRST_CALL, None)
    if first is None:
        yield
        return
    setattr(module, _FIRST_CALL, _refuse)
    try:
        yield
    finally:
        setattr(module, _FIRST_CALL, first)


def _refuse(*_inputs: Any) -> None:
    raise TraceError(
        "flex_attention is compiled to kernels whose memory is not known before",
        hint="analyse with torch.nn.functional.scaled_dot_product_attention in its place",
    )
