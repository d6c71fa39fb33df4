"""What each module of a model makes, saves and computes: a tree of sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fxmem.graph import Category, Storage
from fxmem.report.document import NodeRow


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A module with all that is in it, or one operation.

    Attributes:
        name: Within the row around it; empty for the model itself.
        level: How many rows it lies in.
        node: Index of the node where it is one; None for what holds several.
        parameter_bytes: Its parameters, those of modules within included.
        output_bytes: New storages in the results of its nodes.
        saved_bytes: What its nodes were the first to save for backward.
        live_bytes: What its nodes made that is alive at the peak.
        forward_flops: Those of its nodes.
        backward_flops: Likewise.
    """

    name: str
    level: int
    node: int | None
    parameter_bytes: int
    output_bytes: int
    saved_bytes: int
    live_bytes: int
    forward_flops: int
    backward_flops: int


def list_modules(nodes: Sequence[NodeRow], storages: Iterable[Storage]) -> tuple[ModuleRow, ...]:
    """The modules of a model and the operations in them, each before what is in it.

    Args:
        nodes: Those of the report.
        storages: Of the step, of which the parameters are read.
    """
    model = _Module("")
    for index, node in enumerate(nodes):
        if node.op not in ("placeholder", "output"):
            model.find(node.fqn).nodes.append(index)
    for storage in storages:
        if storage.category is Category.PARAMETER:
            model.find_nearest(storage.name.rpartition(".")[0]).parameter_bytes += storage.nbytes
    return tuple(_list_rows(model, "", 0, nodes))


@dataclass(slots=True)
class _Module:
    fqn: str
    children: dict[str, _Module] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)
    parameter_bytes: int = 0

    def find(self, fqn: str) -> _Module:
        """The module of that name, made where it is new."""
        found = self
        for part in filter(None, fqn.split(".")):
            inner = f"{found.fqn}.{part}" if found.fqn else part
            found = found.children.setdefault(part, _Module(inner))
        return found

    def find_nearest(self, fqn: str) -> _Module:
        """The innermost one around a name that ran."""
        found = self
        for part in fqn.split("."):
            if part not in found.children:
                break
            found = found.children[part]
        return found


def _list_rows(
    module: _Module, name: str, level: int, nodes: Sequence[NodeRow]
) -> Iterator[ModuleRow]:
    is_leaf = len(module.nodes) == 1 and not module.children and level > 0
    if is_leaf and nodes[module.nodes[0]].op == "call_module":
        yield _describe_node(name, level, module.nodes[0], nodes, module.parameter_bytes)
        return
    # Children and operations in the order in which they first ran.
    inside: list[tuple[int, str, _Module | None]] = [(index, "", None) for index in module.nodes]
    inside += [(_find_first(child), part, child) for part, child in module.children.items()]
    rows: list[ModuleRow] = []
    for first, part, child in sorted(inside, key=lambda item: item[:2]):
        if child is not None:
            rows += _list_rows(child, part, level + 1, nodes)
        else:
            own = nodes[first].name.removeprefix(f"{module.fqn}.") if module.fqn else ""
            rows.append(_describe_node(own or nodes[first].name, level + 1, first, nodes))
    direct = [row for row in rows if row.level == level + 1]
    yield ModuleRow(
        name=name,
        level=level,
        node=None,
        parameter_bytes=module.parameter_bytes + sum(row.parameter_bytes for row in direct),
        output_bytes=sum(row.output_bytes for row in direct),
        saved_bytes=sum(row.saved_bytes for row in direct),
        live_bytes=sum(row.live_bytes for row in direct),
        forward_flops=sum(row.forward_flops for row in direct),
        backward_flops=sum(row.backward_flops for row in direct),
    )
    yield from rows


def _find_first(module: _Module) -> int:
    return min([*module.nodes, *map(_find_first, module.children.values())])


def _describe_node(
    name: str, level: int, index: int, nodes: Sequence[NodeRow], parameter_bytes: int = 0
) -> ModuleRow:
    node = nodes[index]
    return ModuleRow(
        name=name,
        level=level,
        node=index,
        parameter_bytes=parameter_bytes,
        output_bytes=node.output_bytes,
        saved_bytes=node.saved_bytes,
        live_bytes=node.live_bytes,
        forward_flops=node.forward_flops,
        backward_flops=node.backward_flops,
    )
