"""Memory graphs made by hand, and a strategy that makes them at random."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from fxmem.analysis import Analysis
from fxmem.graph import (
    NEXT_RESULT,
    RESIDENT,
    Blocks,
    Category,
    FirstOperation,
    MemoryGraph,
    Node,
    Operation,
    Phase,
    SavedTensor,
    SourceLocation,
    Storage,
    measure_blocks,
)
from fxmem.setup import Setup

MIB = 1024**2


def make_node(index: int, name: str, line: int, **fields: object) -> Node:
    fqn = name.rpartition(".")[0]
    defaults = {
        "op": "call_module",
        "target": "Linear",
        "shape": (8, 1024),
        "dtype": "float32",
        "source": SourceLocation("/home/me/nets/net.py", line, "forward"),
    }
    return Node(index=index, name=name, fqn=fqn, **{**defaults, **fields})


def make_graph() -> MemoryGraph:
    """Two linear layers with a ReLU between; the peak lies in the ReLU's backward.

    =====  ======  =======  ==========================================
    step   phase   alive    why
    =====  ======  =======  ==========================================
    0      begin   13 MiB   parameters 8, buffer 1, input 2, state 2
    1      fc1     17       its output 4
    2      relu    21       its output 4, which it saves
    3      fc2     18       its output 1; fc1's output is freed
    4      loss    18       a scalar of 4 bytes
    5      relu    30       backward: gradients 4 + 4, workspace 4
    6      fc1     29       backward: a temporary 3
    7      step    19       the saved 4, and 7 of temporaries are gone; a temporary 1
    =====  ======  =======  ==========================================
    """
    relu = {"op": "call_function", "target": "relu", "inputs": (1,), "saved_bytes": 4 * MIB}
    total = {"op": "call_method", "target": "sum", "phase": Phase.LOSS, "shape": ()}
    flops = {"forward_flops": 2_000_000}
    nodes = (
        make_node(0, "x", 0, op="placeholder", target="x", source=None),
        make_node(1, "fc1", 11, output_bytes=4 * MIB, **flops),
        make_node(2, "block.relu", 12, output_bytes=4 * MIB, **relu),
        make_node(3, "fc2", 13, output_bytes=MIB, backward_flops=4_000_000, **flops),
        make_node(4, "loss.sum", 14, output_bytes=4, **total),
    )
    relu_backward = {"autograd_node": "ReluBackward0", "workspace_bytes": 4 * MIB}
    mm_backward = {"autograd_node": "AddmmBackward0", "flops": 7}
    operations = (
        Operation(0, "step.begin", Phase.FORWARD),
        Operation(1, "aten.addmm.default", Phase.FORWARD, 1, reads=(0, 4)),
        Operation(2, "aten.relu.default", Phase.FORWARD, 2, reads=(6,)),
        Operation(3, "aten.addmm.default", Phase.FORWARD, 3, reads=(7, 1)),
        Operation(4, "aten.sum.default", Phase.LOSS, 4, reads=(8,)),
        Operation(
            5, "aten.threshold_backward.default", Phase.BACKWARD, 2, reads=(7,), **relu_backward
        ),
        Operation(6, "aten.mm.default", Phase.BACKWARD, 1, reads=(11,), **mm_backward),
        Operation(7, "aten.sqrt.default", Phase.OPTIMIZER, reads=(3,)),
    )

    def storage(index, mib, category, name, born, died, **fields):
        return Storage(
            index, int(mib * MIB), category, name, (8, 1024), "float32", born, died, **fields
        )

    storages = (
        storage(0, 4, Category.PARAMETER, "fc1.weight", RESIDENT, None),
        storage(1, 4, Category.PARAMETER, "fc2.weight", RESIDENT, None, saved_by=(3,)),
        storage(2, 1, Category.BUFFER, "norm.running_mean", RESIDENT, None),
        storage(3, 2, Category.OPTIMIZER_STATE, "fc2.weight.exp_avg_sq", RESIDENT, None),
        storage(4, 2, Category.INPUT, "x", RESIDENT, None, node=0, saved_by=(1,)),
        storage(5, 0, Category.TEMPORARY, "empty", 1, 1, node=1),
        storage(6, 4, Category.TEMPORARY, "fc1", 1, 2, node=1),
        storage(7, 4, Category.ACTIVATION, "block.relu", 2, 6, node=2, saved_by=(2, 3)),
        storage(8, 1, Category.OUTPUT, "fc2", 3, None, node=3),
        storage(9, 4 / MIB, Category.OUTPUT, "loss.sum", 4, None, node=4),
        storage(10, 4, Category.GRADIENT, "fc2.weight.grad", 5, None, node=3),
        storage(11, 4, Category.TEMPORARY, "block.relu", 5, 6, node=2),
        storage(12, 3, Category.TEMPORARY, "fc1", 6, 6, node=1),
        storage(13, 1, Category.TEMPORARY, "", 7, 7),
    )
    saved = tuple(
        SavedTensor(n.name, n.fqn, s.shape, s.dtype, s.nbytes, n.source, s.index, s.category)
        for n, s in ((nodes[1], storages[4]), (nodes[2], storages[7]), (nodes[3], storages[1]))
    )
    return MemoryGraph(nodes, storages, operations, saved)


def add_first_step(graph: MemoryGraph, state_mib: int) -> MemoryGraph:
    """The hand-made step after a first one: its forward, and an optimizer that takes so much.

    The model and the input hold 11 MiB, the forward 8 of its own.
    """
    mib = (4, 4, 1, 2)
    warmup = [(index, size * MIB) for index, size in zip((0, 1, 2, 4), mib, strict=True)]
    warmup += [(-1, 4 * MIB), (-2, 4 * MIB), (-2, -4 * MIB), (-1, -4 * MIB)]
    warmup += [(3, 2 * MIB), (None, state_mib * MIB), (None, -state_mib * MIB)]
    operations = (
        FirstOperation(4, Phase.FORWARD, 1),
        FirstOperation(5, Phase.FORWARD, 2),
        FirstOperation(8, Phase.OPTIMIZER, None),
    )
    return replace(graph, warmup=tuple(warmup), first_operations=operations)


def make_setup(**fields: object) -> Setup:
    defaults = {
        "model": "nets/net.py:Net",
        "inputs": ("8x1024:float32",),
        "mode": "train",
        "device": "cpu",
        "optimizer": "adam",
        "loss": None,
        "frontend": "fx",
    }
    return Setup(**{**defaults, **fields})


def make_analysis(graph: MemoryGraph | None = None, **setup: object) -> Analysis:
    return Analysis(make_setup(**setup), graph or make_graph())


@st.composite
def memory_graphs(draw: st.DrawFn) -> MemoryGraph:
    """Any well-formed memory graph: lifetimes, sizes, categories, workspaces, names."""
    steps = draw(st.integers(1, 12))
    names = st.text(max_size=8)
    node_count = draw(st.integers(0, 4))
    nodes = tuple(
        make_node(i, f"{draw(names)}{i}", draw(st.integers(0, 99))) for i in range(node_count)
    )
    any_node = st.none() | st.integers(0, node_count - 1) if node_count else st.none()
    phases = sorted(
        draw(st.lists(st.sampled_from(Phase), min_size=steps, max_size=steps)),
        key=list(Phase).index,
    )
    operations = tuple(
        Operation(
            index,
            "aten.op.default",
            phase,
            node=draw(any_node),
            workspace_bytes=draw(st.integers(0, 99)),
        )
        for index, phase in enumerate(phases)
    )
    births = sorted(draw(st.lists(st.integers(RESIDENT, steps - 1), max_size=20)))
    storages = tuple(
        Storage(
            index,
            draw(st.integers(0, 1000)),
            draw(st.sampled_from([c for c in Category if c is not Category.WORKSPACE])),
            draw(names),
            tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
            "float32",
            born,
            draw(st.none() | st.integers(max(born, 0), steps - 1)),
            node=draw(any_node),
            saved_by=tuple(range(draw(st.integers(0, node_count)))),
            death_rank=draw(st.integers(0, 3)),
        )
        for index, born in enumerate(births)
    )
    operations = tuple(_draw_blocks(draw, operation, storages) for operation in operations)
    return MemoryGraph(nodes, storages, operations, ())


def _draw_blocks(draw: st.DrawFn, operation: Operation, storages: tuple[Storage, ...]) -> Operation:
    """Blocks in place of one workspace, or none: around a result, side by side, one by one."""
    size, other = operation.workspace_bytes, draw(st.integers(1, 99))
    choices: tuple[Blocks, ...] = (
        ((0, size), (NEXT_RESULT, 0), (0, -size)),
        ((0, size), (1, other), (0, -size), (1, -other)),
        ((0, size), (0, -size), (1, other), (NEXT_RESULT, 0), (NEXT_RESULT, 0), (1, -other)),
    )
    if not size or draw(st.booleans()):
        return operation
    blocks = draw(st.sampled_from(choices))
    results = [s.nbytes for s in storages if s.born == operation.index]
    return replace(operation, blocks=blocks, workspace_bytes=measure_blocks(blocks, results))
