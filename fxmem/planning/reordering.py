"""Which runs of forward's nodes could come earlier, so that an inference holds less at its peak.

A node stays behind those whose results it takes, and whatever reads and writes one storage keeps
its order, as do nodes that draw random numbers or whose results depend on data. What could lie on
the same memory for other sizes or settings counts as one storage. Results are then the same, bit
for bit: every operation gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from fxmem.graph import RESIDENT, MemoryGraph, Node, Operation, Phase, Storage
from fxmem.planning.facts import Made, StepFacts, gather_facts
from fxmem.planning.inplace_forms import copies_where_it_must, may_return_input
from fxmem.planning.plan import Reorder
from fxmem.planning.scheduling import Schedule, find_schedule
from fxmem.planning.tasks import Program, Task, is_legal, measure_order, pin_independent

_T = TypeVar("_T")


class _Move(NamedTuple):
    """Consecutive nodes that come to stand before another, which is before them."""

    first: int
    last: int
    before: int


def find_reorders(
    facts: StepFacts, precedences: Iterable[tuple[str, str]] = (), *, time_limit_s: float = 10.0
) -> tuple[Reorder, ...]:
    """Runs of nodes to move, one after another, so that the rewritten graph holds least.

    Args:
        facts: An inference, with what runs in place.
        precedences: Pairs of nodes, by name, of which the first comes first besides.
        time_limit_s: About how long it may take.

    Returns:
        In the order in which they are made, without what they save.
    """
    program = build_program(facts, precedences)
    schedule = find_schedule(program, time_limit_s=time_limit_s)
    moves = _prune_moves(program, [*_list_moves(schedule.order)], schedule)
    nodes = facts.graph.nodes
    return tuple(
        Reorder(
            first=nodes[move.first].name,
            last=nodes[move.last].name,
            nodes=size,
            before=nodes[move.before].name,
            source=nodes[move.first].source,
            before_source=nodes[move.before].source,
        )
        for move, size in _count_nodes(len(program.tasks), moves)
    )


def build_program(facts: StepFacts, precedences: Iterable[tuple[str, str]] = ()) -> Program:
    """The nodes of forward as tasks, and what they make as values.

    Args:
        facts: An inference.
        precedences: Pairs of nodes, by name, of which the first comes first besides.
    """
    after = [set(others) for others in _iterate_constraints(facts)]
    indices = {node.name: node.index for node in facts.graph.nodes[: facts.nodes]}
    for first, second in precedences:
        if first in indices and second in indices and indices[first] < indices[second]:
            after[indices[second]].add(indices[first])
    lasting = [made for made in facts.made if _outlasts_node(made)]
    makes: list[list[int]] = [[] for _ in after]
    takes: list[list[int]] = [[] for _ in after]
    for value, made in enumerate(lasting):
        makes[made.node].append(value)
        for reader in made.readers:
            takes[reader].append(value)
            after[reader].add(made.node)
    rises = _measure_rises(facts)
    arguments = [n.index for n in facts.graph.nodes[: facts.nodes] if n.op == "placeholder"]
    program = Program(
        tasks=tuple(
            Task(frozenset(after[index]), rises[index], tuple(makes[index]), tuple(takes[index]))
            for index in range(facts.nodes)
        ),
        sizes=tuple(made.nbytes for made in lasting),
        kept=frozenset(
            value for value, made in enumerate(lasting) if made.is_output or made.is_cached
        ),
    )
    program = pin_independent(program, arguments)
    last = max(arguments, default=len(after))
    return replace(  # a function takes all its arguments before it begins
        program,
        tasks=tuple(
            replace(task, after=task.after | {last}) if index > last else task
            for index, task in enumerate(program.tasks)
        ),
    )


def reorder_nodes(graph: MemoryGraph, reorders: Iterable[Reorder]) -> MemoryGraph:
    """The inference in which runs of nodes are moved.

    Lifetimes are those of a rewritten graph, in which each value goes after its last use.

    Args:
        graph: The inference that they were found in.
        reorders: What is moved, one after another.
    """
    order = find_order(graph, reorders)
    facts = gather_facts(graph)
    operations = list_operations(facts, order)
    places = {old: new for new, old in enumerate(operations)}
    lives = [
        (s, places.get(s.born, RESIDENT), _find_death(facts, s, places)) for s in graph.storages
    ]
    lives.sort(key=lambda life: life[1])  # those born together keep their order
    renamed = {storage.index: index for index, (storage, _, _) in enumerate(lives)}
    nodes = {old: new for new, old in enumerate(order)}

    def rename(indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(renamed[index] for index in indices)

    return replace(
        graph,
        nodes=tuple(
            replace(
                graph.nodes[old],
                index=new,
                inputs=tuple(nodes[i] for i in graph.nodes[old].inputs),
                results=rename(graph.nodes[old].results),
            )
            for new, old in enumerate(order)
        ),
        storages=tuple(
            replace(s, index=index, born=born, died=died, node=_rename_node(s.node, nodes))
            for index, (s, born, died) in enumerate(lives)
        ),
        operations=tuple(
            replace(
                graph.operations[old],
                index=new,
                node=_rename_node(graph.operations[old].node, nodes),
                reads=rename(graph.operations[old].reads),
                writes=rename(graph.operations[old].writes),
                overwritable=rename(graph.operations[old].overwritable),
            )
            for new, old in enumerate(operations)
        ),
        calls=(),
        let_go=(),
    )


def find_order(graph: MemoryGraph, reorders: Iterable[Reorder]) -> list[int]:
    """The nodes of a step by their indices, in the order in which they run once some are moved.

    Args:
        graph: The step.
        reorders: What is moved, one after another.
    """
    names = [node.name for node in graph.nodes if node.phase is Phase.FORWARD]
    indices = {name: index for index, name in enumerate(names)}
    moved = [indices[name] for name in move_names(names, reorders)]
    return [*moved, *range(len(names), len(graph.nodes))]


def move_names(names: Sequence[str], reorders: Iterable[Reorder]) -> list[str]:
    """Nodes in the order in which they run once some are moved.

    Args:
        names: Of the nodes, in the order in which they run else.
        reorders: What is moved, one after another.

    Raises:
        ValueError: One of the nodes that are moved is not among them.

    >>> move_names("abcd", [Reorder("c", "d", 2, before="b")])
    ['a', 'c', 'd', 'b']
    """
    order = [*names]
    for reorder in reorders:
        order = _move(order, reorder.first, reorder.last, reorder.before)
    return order


def list_operations(facts: StepFacts, order: Iterable[int]) -> list[int]:
    """The operations of a step by their indices, in the order of its nodes.

    Args:
        facts: The step.
        order: Its nodes.
    """
    if not facts.nodes:
        return [operation.index for operation in facts.graph.operations]
    first, stop = facts.first_operation[0], facts.end_operation[facts.nodes - 1]
    inside = [
        index
        for node in order
        if node < facts.nodes
        for index in range(facts.first_operation[node], facts.end_operation[node])
    ]
    return [*range(first), *inside, *range(stop, len(facts.graph.operations))]


def _iterate_constraints(facts: StepFacts) -> Iterator[set[int]]:
    """By node, those that it has to stay behind."""
    graph, classes = facts.graph, _find_classes(facts)
    wrote: dict[int, int] = {}
    read: dict[int, set[int]] = {}
    last_effect = last_argument = None
    for node in graph.nodes[: facts.nodes]:
        operations = facts.list_operations(node.index, node.index + 1)
        after: set[int | None] = {*node.inputs}
        if node.op == "placeholder":
            after.add(last_argument)
            last_argument = node.index
        if any(operation.effect is not None for operation in operations):
            after.add(last_effect)
            last_effect = node.index
        for operation in operations:
            writes = {classes[index] for index in operation.writes}
            reads = {classes[index] for index in operation.reads}
            after |= {wrote[index] for index in reads | writes if index in wrote}
            for index in writes:
                after |= read.get(index, set())
                wrote[index] = node.index
            for index in reads:
                read.setdefault(index, set()).add(node.index)
        yield {index for index in after if index is not None and index != node.index}


def _find_classes(facts: StepFacts) -> list[int]:
    """By storage, the first of those that may be one for other sizes or settings."""
    graph = facts.graph
    classes = [storage.index for storage in graph.storages]

    def find(index: int) -> int:
        while classes[index] != index:
            index = classes[index]
        return index

    for node in graph.nodes[: facts.nodes]:
        operations = facts.list_operations(node.index, node.index + 1)
        if _may_share(node, operations):
            taken = (index for source in node.inputs for index in graph.nodes[source].results)
            for index in (*taken, *node.results):
                one, other = find(index), find(node.results[0] if node.results else index)
                classes[max(one, other)] = min(one, other)
    return [find(storage.index) for storage in graph.storages]


def _may_share(node: Node, operations: Iterable[Operation]) -> bool:
    return may_return_input(node.op, node.target) or any(
        copies_where_it_must(node.target, operation.name) for operation in operations
    )


def _outlasts_node(made: Made) -> bool:
    return bool(made.readers) or made.is_output or made.is_cached


def _measure_rises(facts: StepFacts) -> list[int]:
    """By node, the most that its own storages and workspaces take while it runs."""
    own: list[list[tuple[int, int, int]]] = [[] for _ in range(facts.nodes)]
    for made in facts.made:
        last = facts.end_operation[made.node] - 1
        end = last if _outlasts_node(made) else min(last, made.local_end)
        own[made.node].append((made.born, end, made.nbytes))
    rises = []
    for node in range(facts.nodes):
        live = (
            facts.graph.operations[at].workspace_bytes
            + sum(nbytes for born, end, nbytes in own[node] if born <= at <= end)
            for at in range(facts.first_operation[node], facts.end_operation[node])
        )
        rises.append(max(live, default=0))
    return rises


def _list_moves(order: Sequence[int]) -> Iterator[_Move]:
    """The moves that make an order of the one that is given, front to back."""
    now = sorted(order)
    for place, wanted in enumerate(order):
        if now[place] == wanted:
            continue
        start = stop = now.index(wanted)
        while now[start:stop] == [*order[place : place + stop - start]] and stop < len(now):
            stop += 1
        if now[start:stop] != [*order[place : place + stop - start]]:
            stop -= 1
        move = _Move(wanted, now[stop - 1], now[place])
        yield move
        now = _move(now, *move)


def _move(order: Sequence[_T], first: _T, last: _T, before: _T) -> list[_T]:
    start, stop = order.index(first), order.index(last) + 1
    at = order.index(before)
    if at >= start:  # another move has brought it there
        return [*order]
    return [*order[:at], *order[start:stop], *order[at:start], *order[stop:]]


def _prune_moves(program: Program, moves: list[_Move], schedule: Schedule) -> list[_Move]:
    """Those moves without which more would be held."""
    at = 0
    while at < len(moves):
        fewer = [*moves[:at], *moves[at + 1 :]]
        if _keeps(program, fewer, schedule.peak_bytes):
            moves, at = fewer, 0
        else:
            at += 1
    return moves


def _keeps(program: Program, moves: Iterable[_Move], peak_bytes: int) -> bool:
    order = [*range(len(program.tasks))]
    for move in moves:
        order = _move(order, *move)
        if not is_legal(program, order):
            return False
    return max(measure_order(program, order), default=0) <= peak_bytes


def _count_nodes(size: int, moves: Iterable[_Move]) -> Iterator[tuple[_Move, int]]:
    order = [*range(size)]
    for move in moves:
        yield move, order.index(move.last) - order.index(move.first) + 1
        order = _move(order, *move)


def _find_death(facts: StepFacts, storage: Storage, places: Mapping[int, int]) -> int | None:
    """After which operation a storage goes, in places of the new order."""
    if storage.died is None:
        return None
    made = facts.makers.get(storage.index)
    if made is not None and made.is_cached:  # autocast exits after forward
        return len(places) - 1
    if made is None or storage.died < facts.end_operation[made.node]:
        return places[storage.died]
    ends = [facts.end_operation[node] - 1 for node in (made.node, *made.readers)]
    return max(places[end] for end in ends)


def _rename_node(node: int | None, nodes: Mapping[int, int]) -> int | None:
    return None if node is None else nodes[node]
