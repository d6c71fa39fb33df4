from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxmem.errors import UsageError
from fxmem.specs import TensorSpec, parse_input, parse_spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("7", TensorSpec((7,))),
        ("0x4:bf16", TensorSpec((0, 4), "bfloat16")),
        (" scalar:bool ", TensorSpec((), "bool")),
        ("8X3X224", TensorSpec((8, 3, 224))),
        ("16,100,1,1", TensorSpec((16, 100, 1, 1))),
        ("8, 3 : torch.float16", TensorSpec((8, 3), "float16")),
        ("8 x 3:Float", TensorSpec((8, 3))),
        ("8*3*2", TensorSpec((8, 3, 2))),
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
    ("text", "message"),
    [
        *(
            (
                text,
                f"a tensor of {dims} dimensions cannot be {name} "
                "(channels_last is for 4 dimensions, channels_last_3d for 5)",
            )
            for text, dims, name in (
                ("8x3:channels_last", 2, "channels_last"),
                ("8x3x9x9:channels_last_3d", 4, "channels_last_3d"),
            )
        ),
        *(
            (text, f"bad shape {text!r} (write sizes joined by x, e.g. 8x3x224x224 or 1x128:int64)")
            for text in ("", "8x", "4.5x3", "8x3,4", "-1x3", "Nx3", "x:4x8", "(8, 3)", "None")
        ),
        *(
            (
                text,
                f"shape {text}:float32 is too large: no tensor has more than 2^63 bytes "
                "(is a separator missing, or a size given twice?)",
            )
            for text in ("99999999999x99999999999", "9" * 40, "1152921504606846976x2")
        ),
        ("8x3:f32", "unknown dtype 'f32' (did you mean fp32?)"),
        ("8x3:quaternion", "unknown dtype 'quaternion' (float32, bf16, fp16, int64, bool, ...)"),
        *(
            (
                f"{name}=1x3",
                f"bad input '{name}=1x3': {name!r} is not an argument name (name=1x128)",
            )
            for name in ("", "a b", "1")
        ),
    ],
)
def test_other_texts_are_errors_that_say_how_to_write_them(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_input(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("shape", [4, "4x8", (4.5, 8), None])
def test_a_shape_is_made_of_integers(shape: Any) -> None:
    with pytest.raises(UsageError) as caught:
        TensorSpec(shape)
    assert str(caught.value) == (
        f"a shape is a tuple of integers, not {shape!r} "
        "(TensorSpec((8, 3), 'int64'), or the text '8x3:int64')"
    )


def test_a_spec_checks_what_it_is_made_of() -> None:
    assert TensorSpec((8, 3), "bf16") == TensorSpec((8, 3), "bfloat16")
    with pytest.raises(UsageError, match=r"^a tensor cannot have a size of -1 \(0 or more\)$"):
        TensorSpec((-1, 3))
    assert TensorSpec([4, 8]).shape == (4, 8)  # type: ignore[arg-type]
    assert parse_spec("1152921504606846976x2:bf16").shape  # 2^62 bytes


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("1x3", (None, TensorSpec((1, 3)))),
        ("ids=1x3:long", ("ids", TensorSpec((1, 3), "int64"))),
        ("flag=True", ("flag", True)),
        ("flag=None", ("flag", None)),
    ],
)
def test_an_input_may_have_a_name_and_be_a_constant(text: str, parsed: Any) -> None:
    assert parse_input(text) == parsed
