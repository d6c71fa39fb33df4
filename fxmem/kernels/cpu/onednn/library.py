"""Ask oneDNN, inside the running PyTorch, which memory layouts its primitives use.

PyTorch's CPU convolutions and recurrent layers run on oneDNN. Their allocations (blocked
copies of the operands, scratchpads) follows from the implementation that oneDNN picks for the
problem, the instruction set and the number of threads. oneDNN answers that itself: a
*primitive descriptor* is created from shapes alone, without data, in microseconds, and tells
the memory descriptor of each operand and of the scratchpad. That is what the kernels do too
(``ideep``'s ``get_primitive_desc``), so the sizes are the kernels' own and not a model of them.

The C functions are linked into ``libtorch_cpu`` but not exported, so they are looked up in its
symbol table, once per process. Where that is impossible (:mod:`fxmem.kernels.cpu.onednn.symbols`)
``library()`` gives ``None`` and callers fall back.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from fxmem.kernels.cpu.onednn.symbols import find_addresses

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
        """Returns whether two memory descriptors are the same."""
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


def ask(question: Callable[[Scope], Answer], otherwise: Answer) -> Answer:
    """Puts a question to oneDNN; the other answer where it cannot be asked or refuses."""
    found = library()
    if found is None:
        return otherwise
    try:
        with Scope(found) as scope:
            return question(scope)
    except UnsupportedError:
        return otherwise


def longs(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """An array of oneDNN's ``dnnl_dim_t``."""
    return (ctypes.c_int64 * len(values))(*values)


@functools.cache
def library() -> Library | None:
    """oneDNN inside this process's ``libtorch_cpu``, or None where it cannot be reached."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    addresses = find_addresses(_NAMES)
    if addresses is None:
        return None
    version = ctypes.CFUNCTYPE(ctypes.POINTER(_Version))(addresses["dnnl_version"])()
    if version.contents.major != SUPPORTED_MAJOR:
        return None
    return Library(addresses)
