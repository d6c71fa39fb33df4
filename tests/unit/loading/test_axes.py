"""Dimensions of inputs that vary together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxmem
from fxmem.loading.inputs import find_axis, resize_inputs

IDS = {"ids": "4x128:int64", "mask": "4x1x128x128", "scale": True}


@pytest.mark.parametrize(
    ("axis", "size", "dims", "label"),
    [
        (None, 4, {0: (0,), 1: (0,)}, "dimension 0 of ids, mask"),
        (1, 128, {0: (1,)}, "dimension 1 of ids"),
        ("ids:1, mask:2,mask:3", 128, {0: (1,), 1: (2, 3)}, "dimensions 1, 2, 3 of ids, mask"),
    ],
)
def test_an_axis_is_the_first_inputs_dimension_and_all_of_its_size(
    axis: Any, size: int, dims: dict[int, tuple[int, ...]], label: str
) -> None:
    found = find_axis((), IDS, axis)
    assert (found.size, found.dims, found.label) == (size, dims, label)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("a:b", "bad axis 'a:b' (1, or 2,3, or ids:1 for one input)"),
        ("x:0", "no input is called 'x' (ids, mask, scale)"),
        ("7", "no input has a dimension 7 (0 is the first)"),
        ("0,1", "the sizes along the axis differ: 4, 128 (name dimensions of one size)"),
    ],
)
def test_an_axis_that_is_none_is_refused(axis: str, message: str) -> None:
    with pytest.raises(fxmem.UsageError) as caught:
        find_axis((), IDS, axis)
    assert str(caught.value) == message
    with pytest.raises(fxmem.UsageError, match=r"^the inputs are empty along the axis \(give "):
        find_axis("0x3", None)
    with pytest.raises(fxmem.UsageError, match=r"^no inputs are given \(one of them at least has "):
        find_axis((), None)


def test_lengths_keep_their_values_and_images_do_not() -> None:
    lengths, images = torch.tensor([5, 3]), torch.zeros(2, 3, 8, 8)
    args, kwargs = resize_inputs((images, lengths), {}, find_axis((images, lengths), None), 5)
    assert args[0] == fxmem.TensorSpec((5, 3, 8, 8))
    assert args[1].tolist() == [5, 3, 5, 3, 5]
    assert kwargs == {}
