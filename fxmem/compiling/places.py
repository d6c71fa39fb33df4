"""Places in the user's code that the buffers of compiled code come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx
from torch._ops import OpOverload

from fxmem.graph import Category, SourceLocation, is_installed
from fxmem.recording.recorder import Recorder
from fxmem.source import is_user_file
from fxmem.tracing.nodes import TracedNode

_COPIES = ("_to_copy", "_unsafe_view", "clone")
_UNUSED = "zeros, the gradient of an unused output"
_FRAME = re.compile(r'File "(.*)", line ([0-9]+), in (.*)')
_VARIABLE = re.compile(r"[LG]\['(\w+)'\]\.?")
_LIST = re.compile(r"(?:\.?_modules)?\['?(\w+)'?\]")
"""The part of a path for a list's element, or up to 2.6 of a module in another's dict."""


Direction = Literal["inference", "forward", "backward"]
"""The direction in which a graph runs; inference is a forward without a backward."""


@dataclass(frozen=True, slots=True)
class Place:
    """The origin of a buffer.

    Attributes:
        operators: Of which the kernel is fused that writes it, in the order of the graph.
        fqn: The module, as seen from the compiled function.
        target: The name of the function, or the class of the leaf module, that the code calls.
        source: The line of the code.
        way: How the buffer comes from there: empty in forward.
    """

    operators: tuple[str, ...]
    fqn: str
    target: str
    source: SourceLocation | None
    way: str = ""


def find_places(graph: Any) -> dict[str, Place]:
    """Finds where the buffers of a lowered graph come from, by their names in the wrapper.

    Args:
        graph: ``torch._inductor.graph.GraphLowering``, after ``codegen``.
    """
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    neighbors = _find_named(graph.graph.nodes)
    places = {}
    for name, buffer in graph.name_to_buffer.items():
        if type(buffer).__name__ == "MutationOutput":  # no buffer of its own
            continue
        origins = sorted(buffer.get_origins(), key=lambda node: order.get(node, -1))
        last = buffer.get_origin_node() or (origins[-1] if origins else None)
        if last is not None:
            is_again = last.meta.get("partitioner_tag") == "is_forward"
            way = ("recomputed " if is_again else "backward of ") if graph.is_backward else ""
            last = _find_reader(last)
            named = last if _read_modules(last) else neighbors.get(_read_stack(last), last)
            places[name] = _describe(named, origins, way)
    return places


def _find_named(nodes: Iterable[fx.Node]) -> dict[str, fx.Node]:
    """Finds a node of each line that calls one module alone, by the stack.

    Passes of inductor make nodes that have a stack, but no module: padded products.
    """
    found: dict[str, dict[str, fx.Node]] = {}
    for node in nodes:
        modules = _read_modules(node)
        if modules:
            found.setdefault(_read_stack(node), {})[next(reversed(modules))] = node
    return {stack: next(iter(each.values())) for stack, each in found.items() if len(each) == 1}


def _find_reader(node: fx.Node) -> fx.Node:
    """Finds the first with a stack of a node and those that read it, a few steps on.

    Passes of inductor make nodes that have none: maximum and sum of a softmax in one go.
    """
    near = [node]
    for each in near:
        if _read_stack(each):
            return each
        near += list(each.users)[: 8 - len(near)]
    return node


def _read_modules(node: fx.Node) -> Any:
    return node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}


def _read_stack(node: fx.Node) -> str:
    return node.meta.get("stack_trace") or ""


def _describe(last: fx.Node, origins: Sequence[fx.Node], way: str) -> Place:
    found = dict.fromkeys(each.meta.get("original_aten", each.target) for each in origins)
    operators = [operator for operator in found if isinstance(operator, OpOverload)]
    names = dict.fromkeys(each.overloadpacket.__name__ for each in operators if not each.is_view)
    computing = [name for name in names if name not in _COPIES] or [*names]
    modules = _read_modules(last)
    calls = last.meta.get("source_fn_stack") or last.meta.get("fwd_source_fn_stack") or ()
    path, target = next(reversed(modules.values()), ("", None))[0], calls[-1][1] if calls else ""
    return Place(
        operators=tuple(computing),
        fqn=_LIST.sub(r".\1", _VARIABLE.sub(_name_variable, path)).strip("."),
        target=target if isinstance(target, str) else getattr(target, "__name__", str(target)),
        source=_find_line(_read_stack(last)),
        way=way,
    )


def _name_variable(match: re.Match[str]) -> str:
    return "" if match[1] in ("self", "fn") else f"{match[1]}."


def _find_line(trace: str) -> SourceLocation | None:
    """Finds the user's innermost line in a stack; packages count only where nothing else does."""
    lines = [SourceLocation(file, int(line), name) for file, line, name in _FRAME.findall(trace)]
    lines = [line for line in lines if is_user_file(line.file)]
    return next((each for each in reversed(lines) if not is_installed(each.file)), None) or (
        lines[-1] if lines else None
    )


_Nodes = dict[Place, TracedNode | None]
"""The nodes of a run of forward, by place, without operators."""


class PlaceLog:
    """Makes the places of a function's graphs nodes of a recording, while the graphs run."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.see_kernel = recorder.see_kernel
        self._operations: object = None  # of the step
        self._runs: list[tuple[frozenset[int], _Nodes]] = []  # of forward, by what each handed on
        self._held: dict[int, list[str]] = {}  # what a buffer held, one after the other

    def _find_run(self, inputs: Sequence[Any]) -> _Nodes:
        """Finds the nodes of the run of forward that has handed on most of the inputs."""
        indices = self._recorder.find_storages(inputs)
        self._recorder.name_made(indices, "aten.zeros.default", _UNUSED)  # by autograd
        counts = [len(given.intersection(indices)) for given, _ in self._runs]
        most = max(counts, default=0)  # another graph's result may be one of them too
        return self._runs[-1 - counts[::-1].index(most)][1] if most else {}

    @contextmanager
    def follow(
        self, places: Mapping[str, Place], inputs: Sequence[Any], way: Direction
    ) -> Iterator[tuple[Callable[[str], None], Callable[[str, Any], None], Callable[[Any], Any]]]:
        """Follows a run of a graph, which belongs in backward to a run of forward.

        Yields:
            A function that is called with the name of a buffer before the buffer is made, one that
            is called with the name and the buffer afterwards, and one that takes and returns the
            results.
        """
        recorder = self._recorder
        if self._operations is not recorder.operations:
            self._operations = recorder.operations
            self._runs.clear()
            self._held.clear()
        is_backward = way == "backward"
        if is_backward:
            recorder.free_cycles()
        nodes = self._find_run(inputs) if is_backward else {}
        del inputs  # which the wrapper frees as it goes
        before = recorder.ledger.node

        def enter(name: str) -> None:
            place = places[name]
            key = replace(place, operators=(), way="")
            if key not in nodes and is_backward:  # which makes no nodes
                near = [known for known in nodes if known.fqn == place.fqn]
                near.sort(key=lambda known: (known.source != place.source, not known.source))
                nodes[key] = nodes[near[0]] if near else None
            elif key not in nodes:
                nodes[key] = recorder.add_node(place.fqn, place.target, place.source)
            node = nodes[key]
            recorder.run_at(None if node is None else node.index)

        def see(name: str, buffer: Any) -> None:
            place, node = places[name], nodes[replace(places[name], operators=(), way="")]
            operators = "+".join(place.operators) or place.target  # a higher-order operator's
            label = operators if node is None else f"{place.way}{node.first_name}"
            if node is not None and operators != place.target:
                label += f": {operators}"
            self._name(buffer, label)  # an operator may have several results

        def end(results: Any) -> Any:
            if way == "forward":
                self._runs.append((frozenset(recorder.find_storages(results)), nodes))
            return results

        try:
            yield enter, see, end
        finally:
            last = recorder.ledger.node
            if way == "forward" and any(nodes.values()) and last is not None:
                recorder.autograd.give_running(last)
            recorder.run_at(None)
            recorder.ledger.node = before

    def _name(self, buffer: Any, label: str) -> None:
        """Names a buffer by what it holds, and by what it held before."""
        for index in self._recorder.find_storages(buffer):
            storage = self._recorder.ledger.storages[index]
            held = self._held.setdefault(index, [storage.name] if storage.name else [])
            if label not in held[-1:]:
                held.append(label)
            name, *others = held
            if others:
                name += f", reused {len(others)} times, last" if len(others) > 1 else ", reused"
                name += f" for {label}"
            if storage.category is Category.TEMPORARY:  # what it is for is not known yet
                storage.name = name
