"""Ask oneDNN, inside the running PyTorch, which memory layouts its primitives use.

PyTorch's CPU convolutions and recurrent layers run on oneDNN. What they allocate (blocked
copies of the operands, scratchpads) follows from the implementation that oneDNN picks for the
problem, the instruction set and the number of threads. oneDNN answers that itself: a
*primitive descriptor* is created from shapes alone, without data, in microseconds, and tells
the memory descriptor of each operand and of the scratchpad. That is what the kernels do too
(``ideep``'s ``get_primitive_desc``), so the sizes are the kernels' own and not a model of them.

The C functions are linked into ``libtorch_cpu`` but not exported, so they are found through the
library's symbol table (ELF ``.symtab``), once per process. Where that is impossible (another
object format, a stripped library) ``library()`` gives ``None`` and callers fall back.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

# Enumerators of oneDNN's C API (oneapi/dnnl/dnnl_types.h, dnnl_common_types.h), stable in v3.
ENGINE_CPU = 1
FORWARD_TRAINING = 64
FORWARD_INFERENCE = 96
BACKWARD = 128
CONVOLUTION_DIRECT = 1
DECONVOLUTION_DIRECT = 0xA
SCRATCHPAD_USER = 1
FORMAT_ANY = 1
QUERY_SRC, QUERY_DIFF_SRC, QUERY_WEIGHTS, QUERY_DIFF_WEIGHTS = 129, 130, 131, 132
QUERY_DST, QUERY_DIFF_DST, QUERY_WORKSPACE, QUERY_SCRATCHPAD = 133, 134, 135, 136
QUERY_ARGUMENT = 255
DATA_TYPES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}

# Only the C API of this major version is known to have the signatures used here.
SUPPORTED_MAJOR = 3

_ENTRY_BYTES = 24  # of an Elf64_Sym
_NEAR_BYTES = 1 << 20

_ANCHOR = "_ZN2at15get_num_threadsEv"
_NAMES = (
    "dnnl_version",
    "dnnl_engine_create",
    "dnnl_memory_desc_create_with_tag",
    "dnnl_memory_desc_create_with_strides",
    "dnnl_memory_desc_destroy",
    "dnnl_memory_desc_equal",
    "dnnl_memory_desc_get_size",
    "dnnl_primitive_attr_create",
    "dnnl_primitive_attr_set_scratchpad_mode",
    "dnnl_primitive_desc_destroy",
    "dnnl_primitive_desc_query_md",
    "dnnl_convolution_forward_primitive_desc_create",
    "dnnl_convolution_backward_data_primitive_desc_create",
    "dnnl_convolution_backward_weights_primitive_desc_create",
    "dnnl_deconvolution_forward_primitive_desc_create",
    "dnnl_deconvolution_backward_data_primitive_desc_create",
    "dnnl_deconvolution_backward_weights_primitive_desc_create",
    "dnnl_lstm_forward_primitive_desc_create",
    "dnnl_lstm_backward_primitive_desc_create",
    "dnnl_matmul_primitive_desc_create",
)


class _Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_int), ("minor", ctypes.c_int), ("patch", ctypes.c_int))


class Library:
    """oneDNN's C functions, an engine, and an attribute with a user-managed scratchpad."""

    def __init__(self, addresses: dict[str, int]) -> None:
        self._functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int)(address) for name, address in addresses.items()
        }
        self._query_md = ctypes.CFUNCTYPE(
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int
        )(addresses["dnnl_primitive_desc_query_md"])
        self._get_size = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)(
            addresses["dnnl_memory_desc_get_size"]
        )
        self.engine = self.create("dnnl_engine_create", ctypes.c_int(ENGINE_CPU), ctypes.c_size_t())
        self.attributes = self.create("dnnl_primitive_attr_create")
        self.call(
            "dnnl_primitive_attr_set_scratchpad_mode",
            self.attributes,
            ctypes.c_int(SCRATCHPAD_USER),
        )

    def call(self, name: str, *arguments: object) -> None:
        """Call a function that answers with a status."""
        status = self._functions[name](*arguments)
        if status:
            raise UnsupportedError(f"{name} answered with status {status}")

    def create(self, name: str, *arguments: object) -> ctypes.c_void_p:
        """Call a function that creates an object through its first argument."""
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    def size_bytes(self, descriptor: int | ctypes.c_void_p | None) -> int:
        """Bytes that a memory descriptor describes, with its padding."""
        return int(self._get_size(descriptor)) if descriptor else 0

    def query(self, primitive: ctypes.c_void_p, what: int, index: int = 0) -> int | None:
        """The memory descriptor of one operand of a primitive, owned by the primitive."""
        found: int | None = self._query_md(primitive, what, index)
        return found

    def equal(self, left: ctypes.c_void_p, right: int | None) -> bool:
        """Whether two memory descriptors are the same."""
        return bool(self._functions["dnnl_memory_desc_equal"](left, ctypes.c_void_p(right)))


class UnsupportedError(Exception):
    """oneDNN has no implementation for a problem."""


class Scope:
    """Memory and primitive descriptors that live until the ``with`` block ends."""

    def __init__(self, library_: Library) -> None:
        self.library = library_
        self._owned: list[tuple[str, ctypes.c_void_p]] = []

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, *exception: object) -> None:
        for destroy, handle in reversed(self._owned):
            self.library.call(destroy, handle)

    def memory(
        self, sizes: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
    ) -> ctypes.c_void_p:
        """A memory descriptor with these strides, or with a layout that oneDNN chooses."""
        count, kind = ctypes.c_int(len(sizes)), ctypes.c_int(DATA_TYPES[dtype])
        if strides is None:
            handle = self.library.create(
                "dnnl_memory_desc_create_with_tag",
                count, longs(sizes), kind, ctypes.c_int(FORMAT_ANY),
            )  # fmt: skip
        else:
            handle = self.library.create(
                "dnnl_memory_desc_create_with_strides", count, longs(sizes), kind, longs(strides)
            )
        self._owned.append(("dnnl_memory_desc_destroy", handle))
        return handle

    def primitive(self, name: str, *arguments: object) -> ctypes.c_void_p:
        """A primitive descriptor from ``dnnl_<name>_primitive_desc_create``."""
        handle = self.library.create(
            f"dnnl_{name}_primitive_desc_create", self.library.engine, *arguments
        )
        self._owned.append(("dnnl_primitive_desc_destroy", handle))
        return handle


Answer = TypeVar("Answer")


def ask(question: Callable[[Scope], Answer], otherwise: Callable[[], Answer]) -> Answer:
    """Put a question to oneDNN; the other answer where it cannot be asked or refuses."""
    found = library()
    if found is None:
        return otherwise()
    try:
        with Scope(found) as scope:
            return question(scope)
    except UnsupportedError:
        return otherwise()


def longs(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """An array of oneDNN's ``dnnl_dim_t``."""
    return (ctypes.c_int64 * len(values))(*values)


@functools.cache
def library() -> Library | None:
    """oneDNN inside this process's ``libtorch_cpu``, or None where it cannot be reached."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        offsets = _symbol_offsets(path, (_ANCHOR, *_NAMES))
        loaded = ctypes.CDLL(str(path))
        anchor = ctypes.cast(getattr(loaded, _ANCHOR), ctypes.c_void_p).value or 0
    except (OSError, ValueError, AttributeError, KeyError):
        return None
    bias = anchor - offsets[_ANCHOR]
    version = ctypes.CFUNCTYPE(ctypes.POINTER(_Version))(bias + offsets["dnnl_version"])()
    if version.contents.major != SUPPORTED_MAJOR:
        return None
    return Library({name: bias + offsets[name] for name in _NAMES})


def _symbol_offsets(path: Path, names: Iterable[str]) -> dict[str, int]:
    """Offsets of functions in a 64-bit little-endian ELF library, from its ``.symtab``."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        if image[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        (table,) = struct.unpack_from("<Q", image, 0x28)
        size, count = struct.unpack_from("<HH", image, 0x3A)
        sections = [
            struct.unpack_from("<IIQQQQIIQQ", image, table + i * size) for i in range(count)
        ]
        symbols = next((section for section in sections if section[1] == 2), None)
        if symbols is None:
            raise ValueError("the library is stripped")
        strings = sections[symbols[6]]
        return _symbol_values(image, symbols[4], symbols[5], strings[4], strings[5], names)


def _symbol_values(
    image: mmap.mmap, table: int, table_bytes: int, text: int, text_bytes: int, names: Iterable[str]
) -> dict[str, int]:
    """Values of defined symbols: where each name stands, then the entries that refer to it.

    The tables have some 90 MB and a search for each name would take longer than an analysis, so
    names are looked for near the one before, and entries all at once.
    """
    places: dict[int, str] = {}
    near = text
    for name in names:
        needle = b"\0" + name.encode() + b"\0"
        at = image.find(needle, max(text, near - _NEAR_BYTES), near + _NEAR_BYTES)
        at = at if at >= 0 else image.find(needle, text, text + text_bytes)
        if at < 0:
            raise KeyError(name)
        near, places[at + 1 - text] = at, name
    words = array("I", image[table : table + table_bytes])[:: _ENTRY_BYTES // 4]
    values: dict[str, int] = {}
    for entry in (i for i, word in enumerate(words) if word in places):
        name_at, _, _, section, value, _ = struct.unpack_from(
            "<IBBHQQ", image, table + entry * _ENTRY_BYTES
        )
        if section:
            values[places[name_at]] = int(value)
    return values
