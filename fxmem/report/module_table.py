"""The table of a model's modules, by depth, with equal ones that follow each other as one row."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from fxmem.memory.module_tree import SUMS, Module
from fxmem.report.tables import Bytes, Flops, Table
from fxmem.report.text import write_shape

DEPTH = 3
_HEADERS = ("module", "class", "result", "parameters", "forward", "backward", "output", "saved")
_AT_PEAK = "at the peak"


def list_modules(model: Module, name: str, depth: int = DEPTH) -> Table:
    """Lists the table of a model's modules down to a depth; the model's own row is the first.

    Each row includes the modules in it. Of equal modules that follow each other there is one row,
    with their sums.
    """
    rows, has_copies = [], False
    for level, label, module, copies in _list_rows([model], "", 0, depth):
        has_copies |= copies > 1
        called = f"{copies} x {module.class_name}" if copies > 1 else module.class_name
        flops = (module.forward_flops, module.backward_flops)
        sizes = (module.output_bytes, module.saved_bytes, module.live_bytes)
        figures = (
            f"{module.parameters:,}" if module.parameters else "-",
            *(Flops(n) if n else "-" for n in flops),
            *(Bytes(n) if n else "-" for n in sizes),
        )
        label = "- " * level + (label or name)
        rows.append((label, called, write_shape(module.shape), *figures))
    copies_too = ", and a row of several the sums of all" if has_copies else ""
    return Table(
        [*_HEADERS, _AT_PEAK],
        rows,
        right=[*_HEADERS[3:], _AT_PEAK],
        names=["module", "class"],
        optional=["result", "output", "backward", "class", "forward"],
        rest=f"Each row includes the modules in it{copies_too}.",
    )


def _list_rows(
    modules: Iterable[Module], around: str, level: int, depth: int, times: int = 1
) -> Iterator[tuple[int, str, Module, int]]:
    """Yields level, name, sums and number of each run of equal modules, and of those within.

    The modules are sums themselves, of so many times one.
    """
    for _, group in groupby(_skip_lists(modules), key=_sign):
        copies = [*group]
        first, last = (module.fqn.removeprefix(around) for module in (copies[0], copies[-1]))
        merged = _merge(copies)
        label = first if len(copies) == 1 else f"{first} ... {last}"
        yield level, label, merged, times * len(copies)
        if level < depth:
            inside = f"{merged.fqn}." if merged.fqn else ""
            more = _list_rows(merged.children, inside, level + 1, depth, times * len(copies))
            yield from more


def _skip_lists(modules: Iterable[Module]) -> Iterator[Module]:
    """Yields modules, and the children of lists of modules in place of the lists."""
    for module in modules:
        if module.fqn and not module.class_name and not module.nodes:
            yield from _skip_lists(module.children)
        else:
            yield module


def _sign(module: Module) -> Hashable:
    """Signs a module: alike for two that have the same classes, sizes and work within."""
    start = len(module.fqn)
    inside = tuple((child.fqn[start:], _sign(child)) for child in module.children)
    return module.class_name, module.shape, module.parameters, module.forward_flops, inside


def _merge(copies: list[Module]) -> Module:
    """Adds up equal modules, and what is in them."""
    if len(copies) == 1:
        return copies[0]
    sums = {name: sum(getattr(module, name) for module in copies) for name in SUMS}
    children = zip(*(module.children for module in copies), strict=True)
    return replace(copies[0], **sums, children=tuple(_merge([*each]) for each in children))
