"""Input specs: the text ``8x3x224x224:bf16`` and the tensor it stands for.

No torch here: a dtype is its name in torch.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from dataclasses import dataclass
from typing import Any

from fxmem.errors import UsageError, suggest_names

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
_SPEC = re.compile(
    r"(?P<shape>scalar|[0-9]+(?:\s*(?P<by>[xX*×,])\s*[0-9]+(?:\s*(?P=by)\s*[0-9]+)*)?)\s*"
    r"(?::\s*(?:torch\.)?(?P<dtype>(?!channels_last)\w+)\s*)?"
    r"(?::\s*(?:torch\.)?(?P<format>channels_last(?:_3d)?))?"
)
_CHANNELS_LAST = {"channels_last": 4, "channels_last_3d": 5}
"""Memory formats other than the contiguous one, and how many dimensions they are for."""
_MOST_BYTES = 2**63 - 1
"""PyTorch counts the bytes of a storage in a signed integer of 64 bits."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of an input that need not exist.

    Attributes:
        shape: Sizes, the empty tuple for a scalar.
        dtype: Name of a torch dtype.
        requires_grad: Whether a gradient for it is asked for.
        memory_format: ``"channels_last"`` for four dimensions, ``"channels_last_3d"`` for five;
            the empty text for a contiguous tensor.

    Raises:
        UsageError: A size is negative, the dtype or the memory format is unknown or for another
            number of dimensions, or no tensor can be that large.

    >>> str(TensorSpec((8, 3, 224, 224), "bfloat16"))
    '8x3x224x224:bfloat16'
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    requires_grad: bool = False
    memory_format: str = ""

    def __post_init__(self) -> None:
        try:
            shape = tuple(map(operator.index, self.shape))
        except TypeError:
            raise UsageError(
                f"a shape is a tuple of integers, not {self.shape!r}",
                hint="TensorSpec((8, 3), 'int64'), or the text '8x3:int64'",
            ) from None
        for size in shape:
            if size < 0:
                raise UsageError(f"a tensor cannot have a size of {size}", hint="0 or more")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        memory_format, dims = strip_torch(self.memory_format), len(shape)
        if memory_format and _CHANNELS_LAST.get(memory_format) != dims:
            raise UsageError(
                f"a tensor of {dims} dimensions cannot be {memory_format}",
                hint="channels_last is for 4 dimensions, channels_last_3d for 5",
            )
        object.__setattr__(self, "memory_format", memory_format)
        bits = re.search("[0-9]+", self.dtype)
        if math.prod(shape) * max(int(bits[0]) // 8 if bits else 1, 1) > _MOST_BYTES:
            raise UsageError(
                f"shape {self} is too large: no tensor has more than 2^63 bytes",
                hint="is a separator missing, or a size given twice?",
            )

    def __str__(self) -> str:
        memory_format = self.memory_format and f":{self.memory_format}"
        return f"{'x'.join(map(str, self.shape)) or 'scalar'}:{self.dtype}{memory_format}"


def strip_torch(value: object) -> str:
    """Names a dtype, a layout or a memory format: ``float32`` for ``torch.float32``."""
    return str(value).removeprefix("torch.")


def parse_dtype(dtype: object) -> str:
    """Finds the name of a torch dtype, given that, the dtype itself or a short form.

    Raises:
        UsageError: No dtype is called that.

    >>> parse_dtype("bf16"), parse_dtype("int64")
    ('bfloat16', 'int64')
    """
    text = strip_torch(dtype)
    name = text.lower()
    name = DTYPES.get(name, name)
    if name not in _TORCH_DTYPES:
        known, some = [*DTYPES, *sorted(_TORCH_DTYPES)], "float32, bf16, fp16, int64, bool, ..."
        raise UsageError(f"unknown dtype {text!r}", hint=suggest_names(text.lower(), known, some))
    return name


def parse_spec(text: str) -> TensorSpec:
    """Reads a tensor spec: sizes joined by ``x``, then optionally ``:`` and a dtype.

    ``:channels_last`` may follow (``:channels_last_3d`` for five dimensions). ``X``, ``*`` and
    ``,`` join sizes as well, with spaces around them or not.

    Raises:
        UsageError: The text is no spec, its dtype is unknown, its memory format is for another
            number of dimensions, or no tensor can be that large.

    >>> parse_spec("1x128:int64")
    TensorSpec(shape=(1, 128), dtype='int64', requires_grad=False, memory_format='')
    >>> str(parse_spec("8, 3, 224, 224"))
    '8x3x224x224:float32'
    >>> parse_spec("8x3x224x224:bf16:channels_last").memory_format
    'channels_last'
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        hint = "write sizes joined by x, e.g. 8x3x224x224 or 1x128:int64"
        raise UsageError(f"bad shape {text!r}", hint=hint)
    sizes = tuple(map(int, re.findall("[0-9]+", match["shape"])))
    dtype = parse_dtype(match["dtype"] or "float32")
    return TensorSpec(sizes, dtype, memory_format=match["format"] or "")


def parse_input(text: str) -> tuple[str | None, TensorSpec | bool | None]:
    """Reads an ``--input`` argument: a spec, or ``name=spec`` for a keyword argument.

    An argument that is no tensor may be ``name=True``, ``name=False`` or ``name=None``.

    >>> parse_input("ids=1x128:int64")[0]
    'ids'
    >>> parse_input("use_cache=False")
    ('use_cache', False)
    """
    name, separator, spec = text.rpartition("=")
    if separator and not name.isidentifier():
        raise UsageError(f"bad input {text!r}: {name!r} is not an argument name", hint="name=1x128")
    if separator and spec in _CONSTANTS:
        return name, _CONSTANTS[spec]
    return (name if separator else None), parse_spec(spec)


_CONSTANTS = {"True": True, "False": False, "None": None}


def parse_call(text: str, what: str, example: str) -> tuple[str, dict[str, Any]]:
    """Reads a name and the settings in parentheses after it.

    Raises:
        UsageError: The settings are no names with literals; names the thing, with an example.

    >>> parse_call("adam(fused=True)", "optimizer", "adam(lr=1e-3)")
    ('adam', {'fused': True})
    """
    name, parenthesis, rest = text.partition("(")
    if not parenthesis:
        return name, {}
    try:
        call = ast.parse(f"settings({rest}", mode="eval").body
        if isinstance(call, ast.Call) and not call.args:
            settings = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg}
            if len(settings) == len(call.keywords):
                return name.strip(), settings
    except (SyntaxError, ValueError):
        pass
    raise UsageError(
        f"cannot read the {what}'s settings in {text!r}",
        hint=f"names and literals, e.g. {example!r}",
    )
