"""What depends on data: as many elements as the user says, or a refusal that names the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fxmem
from fxmem.recording.hints import answer_operator

Forward = Callable[[torch.Tensor], torch.Tensor]


class Calls(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.body, self.scale = forward, nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * self.scale)


SEARCHES: dict[str, tuple[Forward, tuple[int, ...]]] = {
    "nonzero": (lambda x: x.nonzero(), (5, 2)),
    "nonzero as a tuple": (lambda x: x.nonzero(as_tuple=True)[1], (5,)),
    "where": (lambda x: torch.where(x > 0)[0], (5,)),
    "mask": (lambda x: x[x > 0], (5,)),
    "mask of rows": (lambda x: x[x[:, 0] > 0], (5, 6)),
    "mask and slice": (lambda x: x[:, x[0] > 0], (4, 5)),
    "masked_select": (lambda x: torch.masked_select(x, x > 0), (5,)),
    "unique": (lambda x: torch.unique(x.detach()), (5,)),
    "unique rows": (lambda x: torch.unique(x.detach(), dim=0), (5, 6)),
    "unique_consecutive": (lambda x: torch.unique_consecutive(x.detach()), (5,)),
    "unique_consecutive columns": (
        lambda x: torch.unique_consecutive(x.detach(), dim=1),
        (4, 5),
    ),
    "bincount": (lambda x: torch.bincount(x.detach().flatten().long()), (5,)),
    "bincount at least": (lambda x: torch.bincount(x.detach()[0].long(), minlength=9), (9,)),
    "repeat_interleave": (lambda x: x.repeat_interleave(x[:, 0].long(), 0), (5, 6)),
    "item": (lambda x: x[: x.argmax(0)[0].item()], (4, 6)),  # type: ignore[misc]
    "item as a shape": (lambda x: x.new_zeros(int(x.argmax())), (5,)),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_finds_as_many_as_was_said(name: str) -> None:
    search, shape = SEARCHES[name]
    analysis = fxmem.analyze(Calls(search), ("4x6",), size_hint=5, mode="infer", device="cpu")
    assert analysis.nodes[-1].shape == shape


@pytest.mark.parametrize("name", SEARCHES)
def test_without_a_hint_the_line_is_named(name: str) -> None:
    with pytest.raises(fxmem.DataDependentError, match=r"test_hints\.py:\d+ depends on the values"):
        fxmem.analyze(Calls(SEARCHES[name][0]), ("4x6",), mode="infer", device="cpu")


def test_what_was_found_trains_too() -> None:
    analysis = fxmem.analyze(Calls(lambda x: x[x > 0].exp()), ("4x6",), size_hint=7, device="cpu")
    assert analysis.nodes[-2].output_bytes == 7 * 4
    assert analysis.gradient_bytes == 4


@pytest.mark.parametrize("dim", [None, 0])
def test_runs_keep_the_memory_of_as_many_as_there_may_be(dim: int | None) -> None:
    x = torch.arange(24.0).view(12, 2) // 8
    for hint in (3, 6, 99):
        answers = answer_operator(
            torch.ops.aten.unique_consecutive.default, (x, True, True, dim), {}, hint
        )
        assert answers is not None
        values, inverse, counts = answers[0]
        if hint == values.shape[0] == torch.unique_consecutive(x, dim=dim).shape[0]:
            real = torch.unique_consecutive(x, True, True, dim)
            sizes = [y.untyped_storage().nbytes() for y in real]
            assert [y.untyped_storage().nbytes() for y in (values, inverse, counts)] == sizes
        assert values.shape[0] == counts.shape[0] == hint


@pytest.mark.parametrize("hint", [None, 5])
def test_a_float_is_no_size(hint: int | None) -> None:
    with pytest.raises(fxmem.DataDependentError, match=r"test_hints\.py"):
        fxmem.analyze(Calls(lambda x: x * x.max().item()), ("4x6",), size_hint=hint, device="cpu")


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "operator", [torch.ops.aten._unique2.default, torch.ops.aten.unique_consecutive.default]
)
def test_what_is_unique_comes_with_what_else_was_asked_for(
    operator: Any, flags: tuple[bool, bool]
) -> None:
    arguments = (True, *flags) if operator is torch.ops.aten._unique2.default else flags
    tensor = torch.tensor([3, 1, 1, 2, 2, 5])
    found = operator(tensor, *arguments)
    answer = answer_operator(operator, (tensor, *arguments), {}, size_hint=len(found[0]))
    assert answer is not None
    assert [each.shape for each in answer[0]] == [each.shape for each in found]
    assert [each.dtype for each in answer[0]] == [each.dtype for each in found]


def test_checks_of_torch_that_only_raise_pass() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return functional.gaussian_nll_loss(x, x.detach(), x.exp())

    assert fxmem.analyze(Calls(loss), ("4x6",), device="cpu").peak_bytes > 0


def test_a_hint_changes_nothing_where_nothing_depends_on_data() -> None:
    model = Calls(lambda x: x.exp())
    plain, hinted = (
        fxmem.analyze(model, ("4x6",), size_hint=hint, device="cpu") for hint in (None, 5)
    )
    assert plain.graph == hinted.graph
