"""Collectives of a step: the ranks that take part, and the bytes that each of them sends.

The buckets of DistributedDataParallel are allocated, filled and reduced by PyTorch's own reducer,
``torch/csrc/distributed/c10d/reducer.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from fxmem.parallelism.layout import Mesh

_NAMESPACES = ("c10d", "_c10d_functional")
_FACTORIES = ("aten::empty.memory_format", "aten::zeros")
_NONE: tuple[int, tuple[str, ...]] = (0, ())


def describe_collective(
    func: Any, args: Sequence[Any], result: Any, mesh: Mesh
) -> tuple[int, tuple[str, ...]]:
    """Describes a collective operator.

    Returns:
        The bytes that a rank sends, and receives, in a ring or from one to another; and the
        dimensions of the mesh that the ranks of its group differ in, or without a mesh the name of
        the group. Zero and none of them for other operators, and in a group of one.
    """
    if func.namespace not in _NAMESPACES or not dist.is_initialized():
        return _NONE
    _, _, name = func.name().partition("::")
    sizes = [
        sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
        for value in (*args, result)
    ]
    if not any(sizes) or name == "wait_tensor":
        return _NONE
    group = _find_group(args)
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return _NONE
    dimensions = find_dimensions(ranks, mesh) if mesh else (group.group_name,)
    if name in ("send", "recv_"):
        return max(sizes), dimensions
    parts = 2 if name.replace("_", "").startswith("allreduce") else 1
    return parts * max(sizes) * (len(ranks) - 1) // len(ranks), dimensions


def _find_group(args: Sequence[Any]) -> dist.ProcessGroup:
    groups: Any = torch._C._distributed_c10d
    boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
    if boxed is not None:
        return dist.ProcessGroup.unbox(boxed)
    name = [arg for arg in args if isinstance(arg, str)][-1]
    return groups._resolve_process_group(name)  # type: ignore[no-any-return]


def find_dimensions(ranks: Sequence[int], mesh: Mesh) -> tuple[str, ...]:
    """Finds the dimensions of a mesh that ranks differ in, the last of which runs fastest.

    >>> find_dimensions([1, 3], (("dp", 2), ("tp", 2))), find_dimensions([0, 1, 2, 3], (("dp", 4),))
    (('dp',), ('dp',))
    """
    found, stride = [], 1
    for name, size in reversed(mesh):
        if len({rank // stride % size for rank in ranks}) > 1:
            found.append(name)
        stride *= size
    return tuple(reversed(found))


# -- the reducer of DistributedDataParallel --------------------------------------------------------


def has_reducers() -> bool:
    """Returns whether gradients are reduced in buckets, laid out anew in the second step."""
    return getattr(vars(dist).get("Reducer"), "was_made", False)


def is_count(func: Any, tensors: Sequence[Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether an operator is on a reducer's own counts, which are real tensors."""
    is_counting: bool | None = getattr(vars(dist).get("Reducer"), "is_counting", None)
    if is_counting is None:  # no reducer of this recording
        return False
    if not tensors:
        is_made = is_counting and func.name() in _FACTORIES
        return is_made and kwargs.get("dtype") is torch.int32
    return all(not isinstance(t, FakeTensor) and t.dtype is torch.int32 for t in tensors)


def run_collective(func: Any, args: Sequence[Any]) -> Any:
    """Returns what a collective returns once it is done, with its buffers as they were.

    A reducer takes the tensors out of the future of the work. The future of the fake process group
    has none, and its operators know no fake tensors until PyTorch 2.10.
    """
    work = make_work(args[0] if isinstance(args[0], list) else [args[0]]).boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def make_work(tensors: list[Tensor]) -> Any:
    """Makes the work of a collective that is done, which holds its tensors."""
    future: Future[Any] = Future()
    future.set_result(tensors)
    groups: Any = torch._C._distributed_c10d
    return groups._create_work_from_future(future)


def make_reducer_kind() -> Any:
    """Makes the class of the reducers of a recording, which takes the place of PyTorch's.

    Its ``was_made`` says whether a wrapper or ``replicate`` made one, and ``is_counting`` whether
    one makes indices of buckets, sizes or used parameters, and reads them.
    """
    real: Any = vars(dist)["Reducer"]

    def count(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            kind.was_made = kind.is_counting = True
            try:
                return function(*args, **kwargs)
            finally:
                kind.is_counting = False

        return run

    counting = ("__init__", "_rebuild_buckets", "_set_static_graph")
    methods = {name: count(getattr(real, name)) for name in counting}
    kind: Any = type("Reducer", (real,), {**methods, "was_made": False, "is_counting": False})
    return kind
