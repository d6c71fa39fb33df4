"""The memory graph as a networkx.DiGraph."""

from __future__ import annotations

import networkx

from fxmem.report.document import Document

_FIELDS = (
    *("fqn", "op", "target", "shape", "dtype", "output_bytes", "saved_bytes", "transient_bytes"),
    *("forward_flops", "backward_flops"),
)


def build_digraph(document: Document) -> networkx.DiGraph[str]:
    """Builds the graph of a step's nodes, annotated with their memory.

    Nodes have the name of the traced node, in order of execution; an edge leads from a node to
    one that takes its result. The attributes are listed at :meth:`fxmem.Analysis.to_networkx`.

    All is plain data; sizes are in bytes, of storages as the allocator hands them out.
    """
    nodes, headline = document.nodes, document.headline
    graph = networkx.DiGraph(
        model=document.setup.model, peak_bytes=headline.peak_bytes, phase=headline.phase.value
    )
    for row in nodes:
        graph.add_node(
            row.name,
            phase=row.phase.value,
            source=None if row.source is None else f"{row.source.file}:{row.source.line}",
            live_at_peak_bytes=row.live_bytes,
            is_peak=row.name == headline.node,
            **{name: getattr(row, name) for name in _FIELDS},
        )
    for row in nodes:
        for tail in row.inputs:
            sizes = {index: document.storage_bytes[index] for index in nodes[tail].results}
            graph.add_edge(nodes[tail].name, row.name, storages=sizes, nbytes=sum(sizes.values()))
    return graph
