"""Views that a model keeps of its parameters: taken again of their fakes.

``self.decoder = self.encoder.weight.t()`` in a constructor makes one. Gradients reach the
parameter through it, by operations that depend on how it was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_Take = Callable[[Tensor, Any, Sequence[int]], Tensor]


def _signed(number: Any) -> Any:
    """A number as it was given, out of the unsigned one that autograd keeps; None stays None."""
    return number - (1 << 64) if number is not None and number >= 1 << 63 else number


_TAKES: dict[str, _Take] = {
    "TBackward0": lambda x, node, shape: x.t(),
    "TransposeBackward0": lambda x, node, shape: x.transpose(
        _signed(node._saved_dim0), _signed(node._saved_dim1)
    ),
    "PermuteBackward0": lambda x, node, shape: x.permute([*map(_signed, node._saved_dims)]),
    "SelectBackward0": lambda x, node, shape: x.select(
        _signed(node._saved_dim), _signed(node._saved_index)
    ),
    "SliceBackward0": lambda x, node, shape: torch.ops.aten.slice.Tensor(
        x, *map(_signed, (node._saved_dim, node._saved_start, node._saved_end, node._saved_step))
    ),
    "UnsqueezeBackward0": lambda x, node, shape: x.unsqueeze(_signed(node._saved_dim)),
    "ViewBackward0": lambda x, node, shape: x.view(shape),
    "ExpandBackward0": lambda x, node, shape: x.expand(shape),
}


def take_again(view: Tensor, fakes: Mapping[int, Tensor]) -> Tensor | None:
    """The same view of the fake of the parameter that it is a view of; to be called with grad.

    A view that was taken by other functions than these becomes one by ``as_strided``.

    Args:
        view: Any tensor.
        fakes: The fakes, by the ids of their originals.

    Returns:
        The view; None for what is no view of a leaf, or of one that is cast.

    >>> parameter, fake = (torch.zeros(4, 3, requires_grad=True) for _ in range(2))
    >>> take_again(parameter[1:].t(), {id(parameter): fake}).shape
    torch.Size([3, 3])
    """
    if view.is_leaf or not view._is_view():
        return None
    base: Any = view._base
    taken = fakes.get(id(base))
    if taken is None or not taken.is_leaf or taken.dtype != base.dtype:
        return None
    nodes: list[Any] = []
    shapes: list[Any] = [view.shape]  # of what each returned
    node: Any = view.grad_fn
    while node.name() in _TAKES:
        nodes.append(node)
        shapes.append(getattr(node, "_saved_self_sym_sizes", None))
        node = node.next_functions[0][0]
    needs_shape = ("ViewBackward0", "ExpandBackward0")
    taken_by = [*zip(nodes, shapes[:-1], strict=True)]
    is_known = all(shape is not None or by.name() not in needs_shape for by, shape in taken_by)
    if getattr(node, "variable", None) is not base or not is_known:
        whole: Any = view
        again: Tensor = whole._view_func_unsafe(taken)
        return again
    for node, shape in reversed(taken_by):
        taken = _TAKES[node.name()](taken, node, shape)
    return taken
