"""The ways of older releases, on the installed one: they lead to what the newer ways do."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fxmem.versions import fallbacks, release

OLD = (2, 6)
NEWER = (
    (torch._C._autograd, "_make_saved_tensor"),
    (torch._C._autograd, "_top_saved_tensors_default_hooks"),
    (torch.library, "get_kernel"),
)
_forward = torch.ops.aten._scaled_dot_product_flash_attention
_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


def make_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "INSTALLED", OLD)
    for owner, name in NEWER:
        monkeypatch.delattr(owner, name, raising=False)


@pytest.fixture(params=[OLD, release.INSTALLED], ids=["2.6", "installed"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == OLD:
        make_old(monkeypatch)


def make_tensor() -> Tensor:
    return torch.ones(3, requires_grad=True) * 2


@pytest.mark.usefixtures("installed")
def test_a_saved_tensor_is_the_one_given() -> None:
    tensor = make_tensor()
    saved = fallbacks.save_tensor(tensor)
    assert torch.equal(saved(), tensor)
    assert saved().grad_fn is tensor.grad_fn


@pytest.mark.usefixtures("installed")
def test_a_saved_tensor_that_was_changed_is_told() -> None:
    tensor = make_tensor()
    saved = fallbacks.save_tensor(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved()


@pytest.mark.usefixtures("installed")
def test_flops_of_grouped_query_attention() -> None:
    query, key = torch.empty(2, 8, 16, 4), torch.empty(2, 2, 16, 4)
    wide = torch.empty(2, 8, 16, 4)
    for operator, given in ((_forward, (query,)), (_backward, (query, query))):
        count = fallbacks.find_flop_formula(operator.default)
        assert count is not None
        expected = flop_registry[operator](*given, wide, wide, out_val=None)
        assert count(*given, key, key, out_val=None) == expected
    assert fallbacks.find_flop_formula(torch.ops.aten.relu.default) is None


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_flops_of_products_with_a_dtype_are_those_without(name: str) -> None:
    packet = getattr(torch.ops.aten, name)
    left = torch.empty(2, 3, 4) if "bmm" in name else torch.empty(3, 4)
    args = (left, left, left.mT)[-2 if name in ("mm", "bmm") else -3 :]
    expected = flop_registry[packet](*args, out_val=None)
    for overload in packet.overloads():
        count = fallbacks.find_flop_formula(getattr(packet, overload))
        dtype = (torch.float32,) if overload.startswith("dtype") else ()
        assert count is not None
        assert count(*args, *dtype, out_val=None) == expected


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="came with 2.8"
)
def test_older_releases_do_not_tell_their_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.autograd.graph.save_on_cpu():
        assert fallbacks.find_saving_hooks()
        make_old(monkeypatch)
        assert fallbacks.find_saving_hooks() == ()


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_grouped_mm"), reason="since torch 2.8")
@pytest.mark.parametrize("shapes", [((12, 8), (3, 8, 4)), ((12, 8), (8, 12)), ((3, 4, 8), (8, 12))])
def test_flops_of_products_of_experts_are_those_of_one_after_the_other(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    left, right = map(torch.empty, shapes)
    count = fallbacks.find_flop_formula(torch.ops.aten._grouped_mm.default)
    assert count is not None
    ends = [4, 5, 12] if right.dim() == 3 or left.dim() == 3 else [2, 3, 8]
    with FlopCounterMode(display=False) as counter:
        for group, (start, stop) in enumerate(itertools.pairwise([0, *ends])):
            if right.dim() == 3:
                left[start:stop] @ right[group]
            elif left.dim() == 3:
                left[group] @ right[:, start:stop]
            else:
                left[:, start:stop] @ right[start:stop]
    assert count(left, right, torch.tensor(ends), out_val=None) == counter.get_total_flops()
