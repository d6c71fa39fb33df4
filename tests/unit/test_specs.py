from __future__ import annotations

import pytest
from hypothesis import given
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
    ],
)
def test_a_spec_is_sizes_and_a_dtype(text: str, spec: TensorSpec) -> None:
    assert parse_spec(text) == spec


@given(
    st.lists(st.integers(0, 10**6), max_size=5).map(tuple),
    st.sampled_from(["float32", "bfloat16", "int64", "bool", "float8_e5m2"]),
)
def test_a_spec_survives_its_text(shape: tuple[int, ...], dtype: str) -> None:
    spec = TensorSpec(shape, dtype)
    assert parse_spec(str(spec)) == spec


@pytest.mark.parametrize("text", ["", "x", "8x", "x8", "8*3", "-1x3", "8x3:", "8,3", "8x3 float32"])
def test_a_bad_shape_is_an_error_that_says_how_to_write_one(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_spec(text)
    assert str(caught.value) == (
        f"bad shape {text!r} (write sizes joined by x, e.g. 8x3x224x224 or 1x128:int64)"
    )


def test_an_unknown_dtype_is_an_error_that_names_some() -> None:
    with pytest.raises(UsageError) as caught:
        parse_spec("8x3:f32")
    assert str(caught.value) == "unknown dtype 'f32' (float32, bf16, fp16, int64, bool, ...)"


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("long", "int64")])
def test_a_dtype_has_a_short_name(short: str, name: str) -> None:
    assert parse_dtype(short) == parse_dtype(name) == name


def test_an_input_has_a_name_or_none() -> None:
    assert parse_input("1x3") == (None, TensorSpec((1, 3)))
    assert parse_input("ids=1x3:long") == ("ids", TensorSpec((1, 3), "int64"))


@pytest.mark.parametrize(("text", "name"), [("=1x3", ""), ("a b=1x3", "a b"), ("1=1x3", "1")])
def test_an_input_name_that_python_would_refuse_is_an_error(text: str, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_input(text)
    assert str(caught.value) == f"bad input {text!r}: {name!r} is no argument name (name=1x128)"
