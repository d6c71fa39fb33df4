"""DistributedDataParallel on fake tensors: its C++ reducer, buckets and all.

The buckets are allocated, filled and reduced by ``torch/csrc/distributed/c10d/reducer.cpp`` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.futures import Future

_FACTORIES = ("aten::empty.memory_format", "aten::zeros")


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
