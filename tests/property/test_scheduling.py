"""Orders of generated tasks, against all orders there are.

``FXMEM_EXAMPLES=2000`` runs more examples, with random seeds.
"""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st
from trials import try_examples

from fxmem.planning.scheduling import find_schedule
from fxmem.planning.tasks import Program, Task, is_legal, measure_order

STRICT = try_examples(100)
MOST = 7
"""Tasks of which all orders are tried."""


def draw_earlier(index: int, most: int) -> st.SearchStrategy[frozenset[int]]:
    if not index:
        return st.just(frozenset())
    return st.frozensets(st.integers(0, index - 1), max_size=most)


@st.composite
def programs(draw: st.DrawFn, most: int = MOST) -> Program:
    """Tasks that take values of those before them; some wait for others without taking any."""
    size = draw(st.integers(1, most))
    sizes = [draw(st.integers(0, 9)) for _ in range(size)]
    tasks = []
    for index in range(size):
        takes = draw(draw_earlier(index, 3))
        after = takes | draw(draw_earlier(index, 1))
        rise_bytes = sizes[index] + draw(st.integers(0, 9))
        tasks.append(Task(after, rise_bytes, (index,), tuple(sorted(takes))))
    taken = {value for task in tasks for value in task.takes}
    kept = frozenset(range(size)) - taken | draw(st.frozensets(st.integers(0, size - 1)))
    return Program(tuple(tasks), tuple(sizes), kept)


def compute_peak(program: Program, order: tuple[int, ...]) -> int:
    """The peak as it is defined: values live from what makes them to the last that takes them."""
    places = {task: place for place, task in enumerate(order)}
    most = 0
    for place, index in enumerate(order):
        held = program.tasks[index].rise_bytes
        for maker, task in enumerate(program.tasks):
            for value in task.makes:
                takers = [places[i] for i, t in enumerate(program.tasks) if value in t.takes]
                end = len(order) if value in program.kept else max(takers, default=-1)
                if places[maker] < place <= end:
                    held += program.sizes[value]
        most = max(most, held)
    return most


def find_least(program: Program) -> int:
    return min(
        compute_peak(program, order)
        for order in permutations(range(len(program.tasks)))
        if is_legal(program, order)
    )


@STRICT
@given(programs())
def test_no_order_holds_less(program: Program) -> None:
    schedule = find_schedule(program)
    assert sorted(schedule.order) == list(range(len(program.tasks)))
    assert is_legal(program, schedule.order)
    assert compute_peak(program, schedule.order) == schedule.peak_bytes
    assert schedule.peak_bytes == max(measure_order(program, schedule.order))
    assert schedule.is_best
    assert schedule.peak_bytes == find_least(program)


@STRICT
@given(programs(), st.integers(1, 3))
def test_a_narrow_search_is_legal_and_not_worse(program: Program, width: int) -> None:
    schedule = find_schedule(program, width=width)
    assert is_legal(program, schedule.order)
    given_peak = compute_peak(program, tuple(range(len(program.tasks))))
    assert compute_peak(program, schedule.order) == schedule.peak_bytes <= given_peak
    least = find_least(program)
    assert schedule.peak_bytes >= least
    assert not schedule.is_best or schedule.peak_bytes == least


@STRICT
@given(programs())
def test_the_given_order_stays_where_nothing_is_gained(program: Program) -> None:
    schedule = find_schedule(program)
    given_order = tuple(range(len(program.tasks)))
    if schedule.peak_bytes == compute_peak(program, given_order):
        assert schedule.order == given_order


@st.composite
def branches(draw: st.DrawFn) -> Program:
    """Chains between a fork and a join, one after another as the user writes them."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    sizes, tasks = [draw(st.integers(1, 9))], [Task(frozenset(), 9, (0,))]
    ends = []
    for length in lengths:
        last = 0
        for _ in range(length):
            index = len(tasks)
            sizes.append(draw(st.integers(0, 9)))
            rise_bytes = sizes[-1] + draw(st.integers(0, 9))
            tasks.append(Task(frozenset({last}), rise_bytes, (index,), (last,)))
            last = index
        ends.append(last)
    tasks.append(Task(frozenset(ends), 1, (len(tasks),), tuple(ends)))
    return Program(tuple(tasks), (*sizes, 1), frozenset({len(tasks) - 1}))


def list_merges(chains: list[list[int]]) -> list[tuple[int, ...]]:
    """All ways to run chains side by side."""
    if not any(chains):
        return [()]
    found = []
    for at, chain in enumerate(chains):
        if chain:
            rest = [*chains[:at], chain[1:], *chains[at + 1 :]]
            found += [(chain[0], *order) for order in list_merges(rest)]
    return found


@STRICT
@given(branches())
def test_of_branches_the_best_way_to_run_them_is_found(program: Program) -> None:
    chains: list[list[int]] = []
    for index, task in enumerate(program.tasks[1:-1], 1):
        if task.takes == (0,):
            chains.append([])
        chains[-1].append(index)
    last = len(program.tasks) - 1
    least = min(compute_peak(program, (0, *order, last)) for order in list_merges(chains))
    schedule = find_schedule(program)
    assert schedule.is_best
    assert schedule.peak_bytes == least
