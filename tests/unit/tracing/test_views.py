"""Views that are taken again of another tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxmem.tracing.views import take_again

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda x: x.t(),
    "transposed": lambda x: x.transpose(-1, 0),
    "permuted": lambda x: x.permute(-1, 0),
    "a row": lambda x: x[-2],
    "some rows": lambda x: x[1:-1],
    "every other column": lambda x: x[:, ::2],
    "with one more dimension": lambda x: x.unsqueeze(-1),
    "in another shape": lambda x: x.view(2, 2, 6),
    "expanded": lambda x: x.unsqueeze(0).expand(5, -1, -1),
    "several": lambda x: x[1:3].t().unsqueeze(1).select(0, 3),
    "reshaped and cut": lambda x: x.view(-1)[3:9],
}


def list_history(node: Any) -> list[str]:
    return [node.name(), *(n for up, _ in node.next_functions for n in list_history(up))]


@pytest.mark.parametrize("name", VIEWS)
def test_it_lies_where_it_did_and_gradients_go_the_same_way(name: str) -> None:
    base, other = (torch.arange(24.0).view(4, 6).requires_grad_() for _ in range(2))
    view = VIEWS[name](base)
    again = take_again(view, {id(base): other})
    assert again is not None
    assert torch.equal(again, view)
    assert (again.stride(), again.storage_offset()) == (view.stride(), view.storage_offset())
    names = []
    for node in (view.grad_fn, again.grad_fn):
        names.append(list_history(node))
    assert names[0] == names[1]
    view.exp().sum().backward()
    again.exp().sum().backward()
    assert base.grad is not None and other.grad is not None
    assert torch.equal(base.grad, other.grad)


@pytest.mark.parametrize(
    "derive",
    [
        lambda x: x.diagonal(),  # a view that is not known
        lambda x: x.unsqueeze(0).view(-1).view(4, 6).t(),
        lambda x: x.t().expand(2, 6, 4).view(2, 6, 4)[0].flatten(),  # no view
    ],
)
def test_it_is_the_same_or_none(derive: Callable[[Tensor], Tensor]) -> None:
    base, other = (torch.arange(24.0).view(4, 6).requires_grad_() for _ in range(2))
    again = take_again(derive(base), {id(base): other})
    assert again is None or torch.equal(again, derive(base))


def test_what_is_computed_is_no_view() -> None:
    base = torch.ones(3, requires_grad=True)
    assert take_again((base * 2)[1:], {id(base): base}) is None
    assert take_again(base[1:], {}) is None
