"""Names that would do harm if a page took them for more than text."""

from __future__ import annotations

from dataclasses import replace

from hand_made import make_graph, make_setup

from fxmem.analysis import Analysis
from fxmem.graph import SourceLocation

EVIL = (
    "</script><img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(2)>",
    "<!--<script>alert(3)",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(4)",
    "${alert(5)}`",
    "]]></title><a href=//evil.example>&lt;b&gt;&amp;",
)


def make_evil_analysis() -> Analysis:
    """The step of hand_made, and every text in it is evil."""
    graph = make_graph()

    def pick(index: int) -> str:
        return f"{EVIL[index % len(EVIL)]}{index}"

    return Analysis(
        make_setup(model=EVIL[0], inputs=(EVIL[1],), optimizer=EVIL[2], notes=EVIL),
        replace(
            graph,
            nodes=tuple(
                replace(
                    node,
                    name=pick(node.index),
                    fqn=pick(node.index + 1),
                    target=pick(node.index + 2),
                    dtype=EVIL[3],
                    source=SourceLocation(f"/home/{pick(node.index)}.py", 7, EVIL[4]),
                )
                for node in graph.nodes
            ),
            storages=tuple(
                replace(storage, name=pick(storage.index), dtype=EVIL[5])
                for storage in graph.storages
            ),
            operations=tuple(
                replace(operation, name=pick(operation.index)) for operation in graph.operations
            ),
        ),
    )
