"""Collectives of a step: the ranks that take part, and the bytes that each of them sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from fxmem.parallelism.layout import Mesh

_NAMESPACES = ("c10d", "_c10d_functional")
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
