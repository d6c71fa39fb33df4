"""Inputs on fake tensors: what they share, what they keep; how they are described."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxmem.errors import UsageError
from fxmem.fakes.fake_mode import describe_inputs, make_fake_inputs, make_fake_mode, read_leaf
from fxmem.specs import TensorSpec


def find_storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.fixture
def fake_mode() -> FakeTensorMode:
    return make_fake_mode()


def test_inputs_keep_their_structure(fake_mode: FakeTensorMode) -> None:
    twice = torch.ones(2, 3, requires_grad=True)
    args, kwargs = make_fake_inputs(
        [twice, [twice, None, 3], {"a": "1x4:int64", "how": "mean"}, True],
        {"spec": TensorSpec((2,), requires_grad=True), "meta": torch.empty(2, device="meta")},
        fake_mode,
        dtype="bfloat16",
    )
    assert args[0] is args[1][0]
    assert (args[1][1:], args[2]["how"], args[3]) == ([None, 3], "mean", True)
    assert args[0].requires_grad
    assert args[0].dtype == kwargs["spec"].dtype == torch.bfloat16
    assert args[2]["a"].dtype == torch.int64
    assert kwargs["spec"].requires_grad
    tensors: list[Any] = [args[0], args[2]["a"], kwargs["spec"], kwargs["meta"]]
    assert all(t.fake_mode is fake_mode and t.device.type == "cpu" for t in tensors)
    assert not isinstance(twice, FakeTensor)


def test_inputs_keep_strides_and_sharing_but_not_the_data_set(fake_mode: FakeTensorMode) -> None:
    data = torch.ones(1000, 8)
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    (first, second, fake_image, wide), _ = make_fake_inputs(
        [data[10:20], data[15:30], image, torch.ones(1).expand(7)], {}, fake_mode
    )
    assert find_storage(first) == find_storage(second)
    assert first.untyped_storage().nbytes() == 20 * 8 * 4
    assert (first.storage_offset(), second.storage_offset()) == (0, 40)
    assert fake_image.is_contiguous(memory_format=torch.channels_last)
    assert wide.stride() == (0,)
    assert wide.untyped_storage().nbytes() == 4


def test_a_spec_has_a_memory_format(fake_mode: FakeTensorMode) -> None:
    given = ["2x3x4x4:channels_last", "2x3x4x4x4:channels_last_3d", "2x3x4x4"]
    inputs, _ = make_fake_inputs(given, {}, fake_mode, dtype="bfloat16")
    assert inputs[0].is_contiguous(memory_format=torch.channels_last)
    assert inputs[1].is_contiguous(memory_format=torch.channels_last_3d)
    assert inputs[2].is_contiguous()


def test_inputs_are_described_as_they_are_written() -> None:
    image = torch.ones(2, 3, 4, 4)
    cases: list[tuple[Any, tuple[str, ...]]] = [
        (None, ("None",)),
        ("2x3", ("2x3:float32",)),
        ([torch.ones(3), True], ("[2][0]=3:float32", "[2][1]=True")),
        ({"how": "mean"}, ("[3]['how']='mean'",)),
        (object(), ("object",)),
        ("2x3x4x4:channels_last", ("2x3x4x4:float32:channels_last",)),
        (image.to(memory_format=torch.channels_last), ("2x3x4x4:float32:channels_last",)),
        (
            torch.ones(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d),
            ("2x3x4x4x4:float32:channels_last_3d",),
        ),
        (image.transpose(2, 3), ("2x3x4x4:float32",)),
    ]
    named = {"ids": torch.zeros(1, dtype=torch.int64), "s": torch.tensor(1.0)}
    texts = describe_inputs([given for given, _ in cases], named)
    expected = [text for _, parts in cases for text in parts]
    assert texts == (*expected, "ids=1:int64", "s=scalar:float32")


def test_a_text_that_starts_with_a_size_is_no_other_argument() -> None:
    with pytest.raises(UsageError, match="bad shape '-1x3'"):
        read_leaf("-1x3")
    assert read_leaf("-x") == "-x"
