from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxmem.errors import UsageError
from fxmem.specs import TensorSpec, parse_dtype, parse_input, parse_spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("8x3x224x224", TensorSpec((8, 3, 224, 224))),
        ("1x128:int64", TensorSpec((1, 128), "int64")),
        ("7", TensorSpec((7,))),
        ("0x4:bf16", TensorSpec((0, 4), "bfloat16")),
        ("scalar", TensorSpec(())),
        (" scalar:bool ", TensorSpec((), "bool")),
        ("8X3X224", TensorSpec((8, 3, 224))),
        ("16,100,1,1", TensorSpec((16, 100, 1, 1))),
        ("8, 3 : torch.float16", TensorSpec((8, 3), "float16")),
        ("8 x 3:Float", TensorSpec((8, 3))),
        ("8*3*2", TensorSpec((8, 3, 2))),
        ("8x3x9x9:channels_last", TensorSpec((8, 3, 9, 9), memory_format="channels_last")),
        (
            "8x3x9x9 : bf16 : torch.channels_last",
            TensorSpec((8, 3, 9, 9), "bfloat16", memory_format="torch.channels_last"),
        ),
        (
            "8x3x9x9x9:half:channels_last_3d",
            TensorSpec((8, 3, 9, 9, 9), "float16", memory_format="channels_last_3d"),
        ),
    ],
)
def test_a_spec_is_sizes_and_a_dtype(text: str, spec: TensorSpec) -> None:
    assert parse_spec(text) == spec


@given(
    st.lists(st.integers(0, 1000), max_size=5).map(tuple),
    st.sampled_from(["float32", "bfloat16", "int64", "bool", "float8_e5m2"]),
)
@example((8, 3, 9, 9), "bfloat16:channels_last")
def test_a_spec_survives_its_text(shape: tuple[int, ...], dtype: str) -> None:
    name, _, memory_format = dtype.partition(":")
    spec = TensorSpec(shape, name, memory_format=memory_format)
    assert parse_spec(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "dims", "name"),
    [
        ("8x3:channels_last", 2, "channels_last"),
        ("8x3x9x9x9:bf16:channels_last", 5, "channels_last"),
        ("8x3x9x9:channels_last_3d", 4, "channels_last_3d"),
    ],
)
def test_a_memory_format_is_for_so_many_dimensions(text: str, dims: int, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_spec(text)
    assert str(caught.value) == (
        f"a tensor of {dims} dimensions cannot be {name} "
        "(channels_last is for 4 dimensions, channels_last_3d for 5)"
    )


@pytest.mark.parametrize("text", ["", "8x", "4.5x3", "8x3,4", "-1x3", "Nx3", "x:4x8", "(8, 3)"])
def test_a_bad_shape_is_an_error_that_says_how_to_write_it(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_spec(text)
    hint = "write sizes joined by x, e.g. 8x3x224x224 or 1x128:int64"
    assert str(caught.value) == f"bad shape {text!r} ({hint})"


@pytest.mark.parametrize("text", ["99999999999x99999999999", "9" * 40, "1152921504606846976x2"])
def test_a_shape_that_no_tensor_has_is_an_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_spec(text)
    assert str(caught.value) == (
        f"shape {text}:float32 is too large: no tensor has more than 2^63 bytes "
        "(is a separator missing, or a size given twice?)"
    )
    assert parse_spec("1152921504606846976x2:bf16").shape  # 2^62 bytes


def test_a_spec_checks_what_it_is_made_of() -> None:
    assert TensorSpec((8, 3), "bf16") == TensorSpec((8, 3), "bfloat16")
    with pytest.raises(UsageError, match=r"^a tensor cannot have a size of -1 \(0 or more\)$"):
        TensorSpec((-1, 3))
    with pytest.raises(UsageError, match="unknown dtype"):
        TensorSpec((1, 3), "float42")
    assert TensorSpec([4, 8]).shape == (4, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [4, "4x8", (4.5, 8), None])
def test_a_shape_is_made_of_integers(shape: Any) -> None:
    with pytest.raises(UsageError) as caught:
        TensorSpec(shape)
    assert str(caught.value) == (
        f"a shape is a tuple of integers, not {shape!r} "
        "(TensorSpec((8, 3), 'int64'), or the text '8x3:int64')"
    )


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("f32", "did you mean fp32?"),
        ("int62", "did you mean int64?"),
        ("quaternion", "float32, bf16, fp16, int64, bool, ..."),
    ],
)
def test_an_unknown_dtype_is_an_error_that_offers_others(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_spec(f"8x3:{text}")
    assert str(caught.value) == f"unknown dtype {text!r} ({hint})"


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("long", "int64")])
def test_a_dtype_has_a_short_name(short: str, name: str) -> None:
    assert parse_dtype(short) == parse_dtype(name) == name


@pytest.mark.parametrize(("text", "value"), [("True", True), ("False", False), ("None", None)])
def test_an_input_by_name_may_be_a_constant(text: str, value: bool | None) -> None:
    assert parse_input(f"flag={text}") == ("flag", value)
    with pytest.raises(UsageError, match=f"^bad shape '{text}'"):
        parse_input(text)


def test_an_input_has_a_name_or_none() -> None:
    assert parse_input("1x3") == (None, TensorSpec((1, 3)))
    assert parse_input("ids=1x3:long") == ("ids", TensorSpec((1, 3), "int64"))


@pytest.mark.parametrize(("text", "name"), [("=1x3", ""), ("a b=1x3", "a b"), ("1=1x3", "1")])
def test_an_input_name_that_python_would_refuse_is_an_error(text: str, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_input(text)
    assert str(caught.value) == f"bad input {text!r}: {name!r} is no argument name (name=1x128)"
