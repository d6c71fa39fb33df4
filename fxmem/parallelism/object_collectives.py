"""Collectives of Python objects in a group whose other ranks are not there.

Each object of another rank is taken to be as this rank's. Functions of
``torch/distributed/distributed_c10d.py``, which pickle objects into tensors and read their sizes.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def _broadcast(object_list: list[Any], *_: Any, **__: Any) -> None:
    """Leaves the objects of a list as they are: on the source, which has them."""


def _gather_to_all(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather(obj: Any, object_gather_list: Any = None, *_: Any, **__: Any) -> None:
    if object_gather_list is not None:
        _gather_to_all(object_gather_list, obj)


def _scatter(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Any = None,
    src: Any = None,
    group: Any = None,
    **_: Any,
) -> None:
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank(group)]


OBJECT_COLLECTIVES: dict[str, Any] = {
    "broadcast_object_list": _broadcast,
    "all_gather_object": _gather_to_all,
    "gather_object": _gather,
    "scatter_object_list": _scatter,
    "monitored_barrier": lambda *_, **__: None,  # which gloo alone has
}
"""By name, the functions that answer collectives of objects."""
