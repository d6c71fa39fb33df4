"""What an allocator reserves for steps of different sizes, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from fxmem.memory.succession import Fragmentation, choose_settings
from fxmem.report.blocks import Block, Paragraph
from fxmem.report.tables import Bytes, Cell, Table

_FIGURES = ("reserved", "of them unused", "cache emptied")


def list_fragmentation(found: Sequence[Fragmentation], title: str) -> list[Block]:
    """Lists what is reserved with each of several settings, and the best of them."""
    if not found:
        return []
    headers, rows = ["PYTORCH_ALLOC_CONF", *_FIGURES], [_write_row(each) for each in found]
    blocks: list[Block] = [Table(headers, rows, _FIGURES, title=title)]
    best = choose_settings(found)
    if best is not None and best is not found[0]:
        line = f"The least is reserved with PYTORCH_ALLOC_CONF={best.alloc_conf}."
        blocks.append(Paragraph([line]))
    return blocks


def _write_row(found: Fragmentation) -> Sequence[Cell]:
    name, retries = found.alloc_conf or "as it is", found.retries or ""
    if found.failed is not None:
        return name, f"out of memory in step {found.failed:,}", "", retries
    return name, Bytes(found.reserved_bytes), Bytes(found.unused_bytes), retries
