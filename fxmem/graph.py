"""The memory graph of one step: pure data, no torch.

A :class:`MemoryGraph` is what a recording leaves behind and what everything else reads: the
nodes of the traced model, the operators that ran in the step (forward, loss, backward,
optimizer), and every storage with the operator that made it and the one after which it died.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Category(str, Enum):
    """Purpose of a storage, in the words of torch's own memory profiler.

    A further one is labelled where ``recording/`` makes it, and has its look in
    ``report/categories.py`` and a line in ``docs/json.md``.

    Source of the words: ``torch/profiler/_memory_profiler.py``, ``Category``.
    """

    PARAMETER = "PARAMETER"
    BUFFER = "BUFFER"
    INPUT = "INPUT"
    ACTIVATION = "ACTIVATION"
    KV_CACHE = "KV_CACHE"
    TEMPORARY = "TEMPORARY"
    GRADIENT = "GRADIENT"
    OPTIMIZER_STATE = "OPTIMIZER_STATE"
    COMMUNICATION = "COMMUNICATION"
    WORKSPACE = "WORKSPACE"
    OUTPUT = "OUTPUT"


class Phase(str, Enum):
    """The part of the step in which an operator ran, or of a script that is no step."""

    LOADING = "loading"
    EVALUATION = "evaluation"
    GENERATION = "generation"
    SAVING = "saving"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


def is_installed(path: str) -> bool:
    """Returns whether a file belongs to a package that pip installed."""
    return f"{os.sep}site-packages{os.sep}" in path


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line of the user's code.

    >>> str(SourceLocation("/home/me/nets/resnet.py", 97, "forward"))
    'resnet.py:97'
    """

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the traced graph: a leaf module, a torch function, or a whole region.

    Attributes:
        index: Position in :attr:`MemoryGraph.nodes`.
        name: Unique and the same from every frontend: the fqn of the module, or of the module
            around a function and the function's name, then its occurrence.
        fqn: Qualified name of the module it is or lies in; empty for the model itself.
        op: As in torch.fx: ``call_module``, ``call_function``, ``call_method``,
            ``placeholder``, ``get_attr`` or ``output``.
        target: What is called, as text: ``Conv2d``, ``relu``, ``view``.
        phase: FORWARD, or LOSS for what the loss function calls.
        shape: Shape of its first tensor output; None where there is none.
        dtype: Of that tensor, as text (``float32``).
        source: The user's own line.
        inputs: Indices of the nodes whose results it takes.
        output_bytes: New storages in its result; a view or an in-place result counts 0.
        saved_bytes: Storages that it was the first to save for backward; parameters, buffers
            and inputs are not counted.
        transient_bytes: How far its forward rises above what it leaves behind.
        forward_flops: Floating-point operations of its forward; a multiply-add is 2.
        backward_flops: Those of its backward, recomputation included.
        results: Indices of the storages that its result lies on, views included.
        early_backward: Whether forward itself runs its backward, as ``torch.autograd.grad`` does.
        remark: Why its kernel needs more memory than another would, as attention's does; empty for
            most.
    """

    index: int
    name: str
    fqn: str
    op: str
    target: str
    phase: Phase = Phase.FORWARD
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    source: SourceLocation | None = None
    inputs: tuple[int, ...] = ()
    output_bytes: int = 0
    saved_bytes: int = 0
    transient_bytes: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    results: tuple[int, ...] = ()
    early_backward: bool = False
    remark: str = ""


RESIDENT = -1
"""``Storage.born`` of what was there before the step began."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation: the memory that a tensor and all its views share.

    Attributes:
        index: Position in :attr:`MemoryGraph.storages`, in the order of allocation.
        nbytes: What it takes.
        category: What it is for, over its whole life.
        name: The fqn of a parameter or buffer, the name of an input, or that of its node.
        shape: Shape of the first tensor that was seen on it.
        dtype: Of that tensor, as text.
        born: Index of the operation that allocated it, or :data:`RESIDENT`.
        died: Index of the operation after which it was freed; None if it outlives the step.
        node: Index of the node that made it, or in whose backward it was made.
        saved_by: Indices of the nodes that saved it for backward, first to last.
        death_rank: Orders the frees of one operation: lower goes first.
        slack_bytes: Bytes beyond the request, where the allocator hands out larger blocks.
        cast_until: Index of the operation to which autocast keeps it at least, as the cast of a
            weight that other operators may use too; None where it does not.
        stream: Number of the CUDA stream that it is allocated on; 0 for the default one.
    """

    index: int
    nbytes: int
    category: Category
    name: str
    shape: tuple[int, ...]
    dtype: str
    born: int
    died: int | None
    node: int | None = None
    saved_by: tuple[int, ...] = ()
    death_rank: int = 0
    slack_bytes: int = 0
    cast_until: int | None = None
    stream: int = 0


Blocks = tuple[tuple[int, int], ...]
"""Allocations and frees inside a kernel, in its order.

Pairs of the number of a block and its bytes, which are negative where the block is freed; or of
:data:`NEXT_RESULT` and 0 where the kernel allocates the next of its operator's results. Results
that are not named come before everything else. Sums are the same in any order; which free block a
caching allocator hands out, and so what it reserves, depends on it.
"""

NEXT_RESULT = -1
"""The number of a block that stands for the operator's next result."""


def measure_blocks(blocks: Blocks, result_bytes: Sequence[int]) -> int:
    """Measures the most bytes that a kernel holds above its operator's new results.

    >>> measure_blocks(((0, 100), (0, -100), (NEXT_RESULT, 0), (1, 50), (1, -50)), [80])
    50
    """
    named = sum(block == NEXT_RESULT for block, _ in blocks)
    coming = iter(result_bytes[max(len(result_bytes) - named, 0) :])
    live = sum(result_bytes[: max(len(result_bytes) - named, 0)])
    most = live
    for block, nbytes in blocks:
        live += next(coming, 0) if block == NEXT_RESULT else nbytes
        most = max(most, live)
    return max(most - sum(result_bytes), 0)


EMPTY_CACHE = "cuda.empty_cache"
"""``Operation.name`` where the program gives back what its allocator caches."""


class Effect(str, Enum):
    """Reason why an operator cannot be recomputed as it was, or not without care.

    Attributes:
        RANDOM: It draws from the global random number generator, whose state can be restored.
        GENERATOR: It draws from a generator of its own, whose state is not.
        DATA: The size or the value of its result depends on the data.
    """

    RANDOM = "random"
    GENERATOR = "generator"
    DATA = "data"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator of the step as the dispatcher ran it, below autograd.

    Attributes:
        index: Position in :attr:`MemoryGraph.operations`.
        name: The operator, e.g. ``aten.mm.default``; ``step.begin`` for the first, which
            allocates nothing.
        phase: Where in the step it ran.
        node: Index of the node it belongs to; in backward, the node it is the backward of.
        autograd_node: The autograd function that ran it in backward (``MmBackward0``).
        reads: Indices of the storages that its arguments lie on.
        workspace_bytes: Scratch memory inside the kernel, above its outputs.
        flops: As ``torch.utils.flop_counter`` counts them.
        library_bytes: The most that a library behind the kernel may take besides, as it chooses;
            in no other number.
        recomputed: It ran in backward to compute again what forward did not keep (a checkpoint).
        writes: Indices of the storages that it changes in place.
        effect: What keeps it from being run again; None for most.
        keeps: Names of the storages that a library behind it takes at its first use, in the
            thread it runs in, and does not give back.
        overwritable: Indices of the storages of arguments that its result could lie on: in
            forward and loss only, and only as far as the tensors themselves go.
        blocks: What makes up ``workspace_bytes``, where the kernel takes something else than one
            block after its results.
        stream: Number of the CUDA stream that its workspace is allocated on.
        communication_bytes: What a rank sends, and receives, in a collective.
        group: Names of the mesh's dimensions that the ranks of a collective differ in; of a script,
            the name of their process group.
    """

    index: int
    name: str
    phase: Phase
    node: int | None = None
    autograd_node: str = ""
    reads: tuple[int, ...] = ()
    workspace_bytes: int = 0
    flops: int = 0
    recomputed: bool = False
    library_bytes: int = 0
    writes: tuple[int, ...] = ()
    effect: Effect | None = None
    keeps: tuple[str, ...] = ()
    overwritable: tuple[int, ...] = ()
    blocks: Blocks = ()
    stream: int = 0
    communication_bytes: int = 0
    group: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Save:
    """One autograd function keeps one storage for its backward.

    Attributes:
        storage: Index of the storage.
        node: Index of the node in which it was kept; None outside of nodes.
        position: Index of the operation that runs next when it is kept.
        unpacked: Index of the first operation of the function's backward, before which the
            storage is taken out; None where that backward runs no operator.
        released: Index of the last operation of that backward, after which the function releases
            the storage. None if it ran no operator.
        returned: Index of the last operation before the function returned; later ones only
            accumulate gradients for it. None if it ran no operator.
    """

    storage: int
    node: int | None
    position: int
    unpacked: int | None
    released: int | None
    returned: int | None


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A storage that autograd keeps for backward, with the node that saved it first."""

    node: str
    fqn: str  # of that node, like the source
    shape: tuple[int, ...]  # of the tensor that was saved, like the dtype
    dtype: str
    nbytes: int  # of the whole storage
    source: SourceLocation | None
    storage: int
    category: Category  # ACTIVATION, or PARAMETER, BUFFER or INPUT, listed but not counted


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of one module of the model in forward, without the module's hooks.

    Attributes:
        fqn: Qualified name of the module.
        start: Index of the first node that it made.
        stop: Index after that of the last; the same where it made none.
        inputs: Indices of the storages that its arguments lie on.
        results: Indices of the storages that its result lies on.
        obstacle: Why it may not run twice; empty where nothing speaks against it.
        class_name: Name of the module's class.
    """

    fqn: str
    start: int
    stop: int
    inputs: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    obstacle: str = ""
    class_name: str = ""


@dataclass(frozen=True, slots=True)
class FirstOperation:
    """An operator of the first step, to which a part of :attr:`MemoryGraph.warmup` belongs.

    Attributes:
        start: Index of its first allocation or free in ``warmup``; the next operator's begin
            where its own end.
        phase: Where in the step it ran. All that the optimizer runs is one.
        twin: Index of the same operation in the steady step; None where that has none.
    """

    start: int
    phase: Phase
    twin: int | None


@dataclass(frozen=True, slots=True)
class MemoryGraph:
    """Everything that is known of one steady step.

    Attributes:
        nodes: In order of execution; placeholders first.
        storages: In order of allocation; the resident ones first.
        operations: In order of execution, ``step.begin`` first.
        saved: What autograd keeps for backward, in order of saving, each storage once.
        warmup: Allocations and frees that led to the step, from the model's move to the device
            on: what an allocator that caches still knows of. Each is the index of a resident
            storage, or a negative number for one that is gone, or None for a kernel's workspace;
            and its bytes, negative where it is freed. None and 0 where the cache is emptied.
        saves: Every time that an autograd function keeps a storage, in order.
        calls: The calls of modules, in the order in which they ended.
        let_go: Per storage, the operation during which user code dropped its last reference to a
            tensor that a node returned, whatever autograd keeps; None where it kept one, or no node
            returned one. Empty where that is not known.
        first_operations: The operators of the first step, as far as they allocate or free.
        warmup_streams: Negative numbers in ``warmup`` with the CUDA streams of those storages, as
            far as these are not the default one.
    """

    nodes: tuple[Node, ...]
    storages: tuple[Storage, ...]
    operations: tuple[Operation, ...]
    saved: tuple[SavedTensor, ...]
    warmup: tuple[tuple[int | None, int], ...] = ()
    saves: tuple[Save, ...] = ()
    calls: tuple[ModuleCall, ...] = ()
    let_go: tuple[int | None, ...] = ()
    first_operations: tuple[FirstOperation, ...] = ()
    warmup_streams: tuple[tuple[int, int], ...] = ()
