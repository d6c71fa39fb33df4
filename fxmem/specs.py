"""Input specs: the text ``8x3x224x224:bf16`` and the tensor it stands for.

No torch here: a dtype is its name in torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fxmem.errors import UsageError

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
    "long": "int64",
    "int": "int32",
}
"""Short names; every name of a dtype in torch is one too."""

_TORCH_DTYPES = frozenset(
    "bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool "
    "complex64 complex128 float8_e4m3fn float8_e5m2".split()
)
_SPEC = re.compile(r"(?P<shape>scalar|[0-9]+(?:x[0-9]+)*)(?::(?P<dtype>\w+))?")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of an input that need not exist.

    Attributes:
        shape: Sizes, the empty tuple for a scalar.
        dtype: Name of a torch dtype.
        requires_grad: Whether a gradient for it is asked for.

    >>> str(TensorSpec((8, 3, 224, 224), "bfloat16"))
    '8x3x224x224:bfloat16'
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    requires_grad: bool = False

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'}:{self.dtype}"


def parse_dtype(text: str) -> str:
    """The name of a torch dtype, from it or a short form.

    Raises:
        UsageError: No dtype is called that.

    >>> parse_dtype("bf16"), parse_dtype("int64")
    ('bfloat16', 'int64')
    """
    name = DTYPES.get(text, text)
    if name not in _TORCH_DTYPES:
        raise UsageError(f"unknown dtype {text!r}", hint="float32, bf16, fp16, int64, bool, ...")
    return name


def parse_spec(text: str) -> TensorSpec:
    """A tensor spec from text: sizes joined by ``x``, then optionally ``:`` and a dtype.

    Raises:
        UsageError: The text is no spec, or its dtype is unknown.

    >>> parse_spec("1x128:int64")
    TensorSpec(shape=(1, 128), dtype='int64', requires_grad=False)
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"bad shape {text!r}", hint="write sizes joined by x, e.g. 8x3x224x224 or 1x128:int64"
        )
    sizes = () if match["shape"] == "scalar" else tuple(map(int, match["shape"].split("x")))
    return TensorSpec(sizes, parse_dtype(match["dtype"] or "float32"))


def parse_input(text: str) -> tuple[str | None, TensorSpec]:
    """A ``--input`` argument: a spec, or ``name=spec`` for a keyword argument.

    >>> parse_input("ids=1x128:int64")[0]
    'ids'
    """
    name, separator, spec = text.rpartition("=")
    if separator and not name.isidentifier():
        raise UsageError(f"bad input {text!r}: {name!r} is no argument name", hint="name=1x128")
    return (name if separator else None), parse_spec(spec)
