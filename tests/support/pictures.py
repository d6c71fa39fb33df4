"""Reports made by hand for pictures, and what a picture says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxmem.graph import Category, Phase
from fxmem.report.document import Document, Headline, NodeRow
from fxmem.report.graph.view import Box, Cluster
from fxmem.setup import Setup

MIB = 1024**2


def make_row(name: str, index: int, inputs: Sequence[int] = (), **fields: object) -> NodeRow:
    """A function in the module that its name says; 1 MiB of output."""
    defaults: dict[str, object] = {
        "target": name.rpartition(".")[2],
        "shape": (8, 16),
        "dtype": "float32",
        "output_bytes": MIB,
        "fqn": name.rpartition(".")[0],
        "op": "call_function",
        "results": (index,),
    }
    return NodeRow(index=index, name=name, inputs=tuple(inputs), **{**defaults, **fields})


def make_document(rows: Iterable[NodeRow], peak: str | None = None) -> Document:
    rows = tuple(rows)
    return Document(
        headline=Headline(64 * MIB, Phase.BACKWARD, peak, None),
        setup=Setup("net.py:Net", ("8x16:float32",), "train", "cpu", None, None, "fx"),
        nodes=rows,
        breakdown={Category.ACTIVATION: 64 * MIB},
        live=(),
        storage_bytes=(MIB,) * len(rows),
        totals={},
    )


def make_chain(names: Iterable[str], peak: str | None = None, **fields: object) -> Document:
    """Each takes the result of the one before."""
    rows = [
        make_row(name, index, (index - 1,) if index else (), **fields)
        for index, name in enumerate(names)
    ]
    return make_document(rows, peak)


def outline(children: Iterable[Cluster | Box]) -> list[object]:
    """Titles of boxes; of a cluster its names, its copies and what is in it."""
    return [
        child.title
        if isinstance(child, Box)
        else (child.kind.value, *child.names, child.copies, outline(child.children))
        for child in children
    ]
