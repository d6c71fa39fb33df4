"""Views that a model keeps, through which gradients reach a parameter: taken again of its fake.

``self.decoder = self.encoder.weight.t()`` in a constructor makes one. Of how it was taken, autograd
keeps what backward needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_Take = Callable[[Tensor, Any, Sequence[int]], Tensor]
_WRAPPED = 1 << 64  # a negative number, as an unsigned one


def _signed(number: Any) -> Any:
    """A number as it was given; None stays None."""
    return number - _WRAPPED if number is not None and number >= _WRAPPED // 2 else number


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


def take_again(view: Tensor, copies: Mapping[int, Tensor]) -> Tensor | None:
    """The same view of the copy of the leaf that it is a view of.

    Args:
        view: A tensor with a history.
        copies: Copies of leaves, by the id of the original.

    Returns:
        The view, with a history of its own; None for what is no view of one of these leaves, or
        was taken in a way that is not known.

    >>> parameter, copy = (torch.zeros(4, 3, requires_grad=True) for _ in range(2))
    >>> take_again(parameter[1:].t(), {id(parameter): copy}).shape
    torch.Size([3, 3])
    """
    nodes: list[Any] = []
    node: Any = view.grad_fn
    while node is not None and node.name() in _TAKES:
        nodes.append(node)
        node = node.next_functions[0][0]
    taken = copies.get(id(getattr(node, "variable", None)))
    if taken is None:
        return None
    shapes = [view.shape, *map(_find_shape, nodes)]  # of what each returned
    for node, shape in reversed([*zip(nodes, shapes[:-1], strict=True)]):
        if shape is None and node.name() in ("ViewBackward0", "ExpandBackward0"):
            return None
        taken = _TAKES[node.name()](taken, node, shape or ())
    return taken if taken.shape == view.shape else None


def _find_shape(node: Any) -> Sequence[int] | None:
    """The shape of what a node was given, if it saved it."""
    shape: Sequence[int] | None = getattr(node, "_saved_self_sym_sizes", None)
    return shape
