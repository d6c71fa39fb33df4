"""Gradients that eager autograd writes in place, and not while Python watches.

While a ``TorchDispatchMode`` is active or a tensor is a subclass, C++ autograd takes the
out-of-place branch in a few spots (``at::isTensorSubclassLike``), which plain eager runs in
place. A recording would show a buffer that the real step never allocates. These are the spots:

- The sum of gradients that meet at one node: ``torch/csrc/autograd/input_buffer.cpp``,
  ``accumulate`` and ``can_accumulate_inplace``: in place if the engine holds the last reference
  to the older gradient and its storage.
- Backward formulas that fill a fresh buffer: ``torch/csrc/autograd/FunctionsManual.cpp``,
  e.g. ``index_backward``, ``value_selecting_reduction_backward``, ``gather_backward`` and
  ``take_backward``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_aten = torch.ops.aten
_add = _aten.add.Tensor
_FILLS = frozenset(
    {
        _aten._index_put_impl.default,
        _aten.index_put.default,
        _aten.put.default,
        _aten.scatter.src,
        _aten.scatter.value,
        _aten.scatter_add.default,
        _aten.index_add.default,
        _aten.index_fill.int_Tensor,
    }
)
_OUT_OF_PLACE = frozenset(
    {"ScatterReduceBackward0", "IndexReduceBackward0", "LinalgCholeskyExBackward0"}
)
"""Formulas that add their own results out of place."""

_SOLE_TENSOR_REFERENCES = 4
"""``Tensor._use_count()`` inside ``__torch_dispatch__`` of a tensor that the engine's buffer
alone holds: the buffer, the dispatcher's stack, the argument of the call, and the Python object."""

_SOLE_STORAGE_REFERENCES = 2
"""Uses of the storage of such a tensor: the tensor, and the Python storage object."""


class EngineWatch:
    """Finds, in backward, the operators that would run in place without anyone watching."""

    def __init__(self) -> None:
        self._returned = False

    def see_device_query(self) -> None:
        """Notes that ``prim::device`` was dispatched: an addition straight after is the engine's.

        The engine validates a node's result, and asks for its device, before it adds the result
        to the gradient of the next node (``torch/csrc/autograd/engine.cpp``, ``validate_outputs``).
        """
        self._returned = True

    def find_reused(
        self,
        func: Any,
        args: tuple[Any, ...],
        caller: FrameType,
        is_fresh: Callable[[torch.Tensor], bool],
    ) -> torch.Tensor | None:
        """Finds the argument that eager would have written the result into, or None.

        Args:
            func: The operator about to run.
            args: Its arguments.
            caller: The Python frame that led here: the engine's, or that of user code inside
                backward, which eager never rewrites.
            is_fresh: Whether the running autograd node made a tensor's storage.
        """
        returned, self._returned = self._returned, False
        is_engine = caller.f_code.co_name == "_engine_run_backward"
        if func is _add and returned and is_engine:
            self._returned = True  # the next gradient of the same node may be added right away
            reused = _is_accumulated_in_place(*args[:2])
        else:
            reused = func in _FILLS and is_fresh(args[0]) and is_engine
        tensor: torch.Tensor = args[0]
        if not reused or (_is_out_of_place() and is_fresh(tensor)):
            return None
        return tensor


def _is_accumulated_in_place(older: torch.Tensor, newer: Any) -> bool:
    uses = torch._C._storage_Use_Count(older.untyped_storage()._cdata)
    return (
        older.dtype == newer.dtype
        and older.shape == newer.shape  # else it is part of a formula
        and older._use_count() <= _SOLE_TENSOR_REFERENCES  # type: ignore[attr-defined]
        and uses <= _SOLE_STORAGE_REFERENCES
        and _is_dense(older)
    )


def _is_out_of_place() -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and node.name() in _OUT_OF_PLACE


def _is_dense(tensor: torch.Tensor) -> bool:
    """Computes ``Tensor::is_non_overlapping_and_dense``."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
