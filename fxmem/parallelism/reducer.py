"""DistributedDataParallel on fake tensors: its C++ reducer, buckets and all.

The buckets are allocated, filled and reduced by ``torch/csrc/distributed/c10d/reducer.cpp`` itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.futures import Future
from torch.nn.parallel import distributed

_FACTORIES = ("aten::empty.memory_format", "aten::zeros")


class _Reducers:
    """The reducers of a recording.

    Attributes:
        are_there: Some may be in use.
        is_counting: One makes indices of buckets, sizes or used parameters, and reads them.
        were_made: One was made, by a wrapper or by ``replicate``.
    """

    are_there = False
    is_counting = False
    were_made = False


def has_reducers() -> bool:
    """Tells whether gradients are reduced in buckets, laid out anew in the second step."""
    return _Reducers.were_made


def is_count(func: Any, tensors: Sequence[Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Tells whether an operator is on a reducer's own counts, which are real tensors."""
    if not _Reducers.are_there:
        return False
    if not tensors:
        is_made = _Reducers.is_counting and func.name() in _FACTORIES
        return is_made and kwargs.get("dtype") is torch.int32
    return all(not isinstance(t, FakeTensor) and t.dtype is torch.int32 for t in tensors)


def run_collective(func: Any, args: Sequence[Any]) -> Any:
    """Returns what a collective returns once it is done, with its buffers as they were.

    Its work has a future with its tensors, which a reducer takes out of it: that of the fake
    process group has none in it, and its operators know no fake tensors until PyTorch 2.10.
    """
    work = make_work(args[0] if isinstance(args[0], list) else [args[0]]).boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def make_work(tensors: list[Tensor]) -> Any:
    """Makes the work of a collective that is done, which holds its tensors."""
    future: Future[Any] = Future()
    future.set_result(tensors)
    groups: Any = torch._C._distributed_c10d
    return groups._create_work_from_future(future)


@contextlib.contextmanager
def run_reducers() -> Iterator[None]:
    """Lets reducers run on fake tensors within."""
    none: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731 - compares ranks, asks for NCCL
    counting = "__init__", "_rebuild_buckets", "_set_static_graph"
    real: Any = vars(dist)["Reducer"]
    kind = type("Reducer", (real,), {name: _count(getattr(real, name)) for name in counting})
    with (
        mock.patch.object(distributed, "_verify_param_shape_across_processes", none),
        mock.patch.object(distributed, "_sync_module_states", none),
        mock.patch.object(distributed.DistributedDataParallel, "_check_comm_hook", none),
        mock.patch.object(dist, "Reducer", kind),
        mock.patch.object(_Reducers, "are_there", True),
        mock.patch.object(_Reducers, "were_made", False),
    ):
        yield


def _count(function: Callable[..., Any]) -> Callable[..., Any]:
    def count(*args: Any, **kwargs: Any) -> Any:
        _Reducers.were_made = True
        with mock.patch.object(_Reducers, "is_counting", True):
            return function(*args, **kwargs)

    return count
