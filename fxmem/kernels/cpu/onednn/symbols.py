"""Functions that are linked into PyTorch's CPU library but not exported.

oneDNN and LAPACK are parts of ``libtorch_cpu``; their functions are found through the library's
symbol table (ELF ``.symtab``). Where that is impossible (another object format, a stripped
library, a library that was built otherwise) there are none, and callers fall back.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

_ENTRY_BYTES = 24  # of an Elf64_Sym
_NEAR_BYTES = 1 << 20
_ANCHOR = "_ZN2at15get_num_threadsEv"
"""An exported function: how far it is from where the table says is how far all are."""


def find_addresses(names: Sequence[str]) -> dict[str, int] | None:
    """Addresses of functions in this process, or None if one of them cannot be found.

    Takes some 0.2 s, most of which does not depend on how many are looked for.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        offsets = _read_offsets(path, (_ANCHOR, *names))
        loaded = ctypes.CDLL(str(path))
        anchor = ctypes.cast(getattr(loaded, _ANCHOR), ctypes.c_void_p).value or 0
    except (OSError, ValueError, AttributeError, KeyError):
        return None
    bias = anchor - offsets[_ANCHOR]
    return {name: bias + offsets[name] for name in names}


def _read_offsets(path: Path, names: Iterable[str]) -> dict[str, int]:
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
        table, text, text_bytes = symbols[4], strings[4], strings[5]
        # Where each name stands, then the entries that refer to it. The tables have some 90 MB and
        # a search for each name would take longer than an analysis, so names are looked for near
        # the one before, and entries all at once.
        places: dict[int, str] = {}
        near = text
        for name in names:
            needle = b"\0" + name.encode() + b"\0"
            at = image.find(needle, max(text, near - _NEAR_BYTES), near + _NEAR_BYTES)
            at = at if at >= 0 else image.find(needle, text, text + text_bytes)
            if at < 0:
                raise KeyError(name)
            near, places[at + 1 - text] = at, name
        words = array("I", image[table : table + symbols[5]])[:: _ENTRY_BYTES // 4]
        values: dict[str, int] = {}
        for entry in (i for i, word in enumerate(words) if word in places):
            name_at, _, _, section, value, _ = struct.unpack_from(
                "<IBBHQQ", image, table + entry * _ENTRY_BYTES
            )
            if section:
                values[places[name_at]] = int(value)
        return values
