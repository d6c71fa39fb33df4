"""A process group of one rank, whose other ranks are not there.

PyTorch's fake process group (``torch/testing/_internal/distributed/fake_pg.py``) answers every
collective at once, with what its buffers held before. Shards, buffers and buckets are allocated as
in a run with all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import distributed as parallel_distributed
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.errors import UsageError
from fxmem.parallelism.collectives import make_reducer_kind, make_work
from fxmem.parallelism.layout import Layout
from fxmem.patching import change_items, patch
from fxmem.versions.release import is_release

_MESH_METHODS = ("__init__", "__getitem__", "_flatten", "_unflatten", "_concatenate", "from_group")
"""Methods of a mesh that compute with the ranks in it, which are real tensors."""
_ELASTIC = {
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "ROLE_NAME": "default",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
"""Variables that ``torchrun`` sets for all processes by default."""
_NOT_GIVEN = -1
_WARNINGS = (
    "FSDP2-wrapped module .* returned a view",  # what in-place operations on it would do
    "Accessing the data pointer of FakeTensor",  # as FSDP1 compares it
)
_CHECKS = ("_verify_param_shape_across_processes", "_sync_module_states")
"""Functions by which ``DistributedDataParallel`` compares ranks, and takes over their state."""
_REBUILD = "_rebuild_tensor_from_dtensor_meta"
_PROPAGATION = "_propagate_tensor_meta_non_cached"
"""Runs an operator of DTensors on fake tensors of global shapes, which the step never makes."""


@contextlib.contextmanager
def run_outside_modes() -> Iterator[None]:
    """Records nothing within, and makes nothing fake."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def be_rank(
    rank: int, world_size: int, node_size: int | None = None, **variables: str
) -> contextlib.AbstractContextManager[None]:
    """Sets the variables that ``torchrun`` sets for one of its processes.

    Args:
        rank: Which of them.
        world_size: How many there are.
        node_size: How many are on a node; None for all of them.
        variables: Others, and other values.
    """
    node_size = node_size or world_size
    node, place = divmod(rank, node_size)
    numbers = {
        **dict.fromkeys(("RANK", "ROLE_RANK"), rank),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), world_size),
        "LOCAL_RANK": place,
        "LOCAL_WORLD_SIZE": node_size,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": world_size // node_size,
    }
    texts = {name: str(value) for name, value in numbers.items()}
    return change_items(os.environ, {**_ELASTIC, **texts, **variables})


@contextlib.contextmanager
def offer_group(layout: Layout | None = None, offered: str = "nccl") -> Iterator[None]:
    """Makes this process one rank of a layout's group; code that joins one is in it already.

    Without a layout, code that joins a group is the rank that it names, or that the variables of
    ``torchrun`` name; else it is alone.

    Args:
        layout: Whose rank is meant.
        offered: The backend that its group seems to have; other code's is the one it asks for.

    Raises:
        UsageError: This process is in a real group.
    """
    if not dist.is_available() or dist.is_initialized():
        if layout is not None:
            raise UsageError(
                "this process has joined a process group, or PyTorch has none to join",
                hint="analyze before init_process_group",
            )
        yield
        return
    init_real = dist.init_process_group
    with contextlib.ExitStack() as stack:

        def join(
            backend: str | None = None,
            *_: Any,
            world_size: int = _NOT_GIVEN,
            rank: int = _NOT_GIVEN,
            **__: Any,
        ) -> None:
            if not dist.is_initialized():
                size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", 1))
                place = rank if rank >= 0 else int(os.environ.get("RANK", 0))
                stack.enter_context(_join(init_real, size, place, backend or "undefined"))

        stack.enter_context(patch(_replace_everywhere("init_process_group", join)))
        if layout is not None:
            stack.enter_context(be_rank(int(layout.rank), layout.world_size))
            join(offered)
        yield


@contextlib.contextmanager
def _join(
    init_real: Callable[..., None], world_size: int, rank: int, backend: str
) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # which joining replaces
    with run_outside_modes():
        init_real("fake", store=FakeStore(), rank=rank, world_size=world_size)
    sys.excepthook = hook
    _forget_meshes()
    logger = logging.getLogger("torch.distributed")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # advice on speed; errors, which are raised too
    with (
        patch(_list_patches(backend)),
        warnings.catch_warnings(),
    ):
        for message in _WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        try:
            yield
        finally:
            logger.setLevel(level)
            _forget_meshes()
            if dist.is_initialized():  # the code may have left it
                dist.destroy_process_group()


def _list_patches(backend: str) -> dict[Any, dict[str, Any]]:
    """Lists what code finds in a group whose other ranks are not there, by owner and name.

    Args:
        backend: The backend that the group seems to have.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor import _op_schema, _random
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    new_group, get_backend = dist.new_group, dist.get_backend
    asked: dict[Any, str] = {None: backend}  # by group

    def new_fake_group(*args: Any, backend: Any = None, pg_options: Any = None, **kw: Any) -> Any:
        made = new_group(*args[:2], **kw)  # on no other backend, such as gloo's on the host
        asked[made] = backend or asked[None]
        return made

    def get_asked_backend(group: Any = None) -> str:
        """Answers users, and ``torch.distributed.nn``, whose gradients depend on it."""
        get_backend(group)
        return asked.get(group, asked[None]).lower()

    patches = _replace_everywhere("new_group", new_fake_group)
    for module in (dist, dist.distributed_c10d):
        patches[module].update(_OBJECT_COLLECTIVES)
    patches[dist].update(get_backend=get_asked_backend, Reducer=make_reducer_kind())
    tracker = type("OffsetBasedRNGTracker", (_StatelessTracker,), {})
    patches |= {
        parallel_distributed: dict.fromkeys(_CHECKS, _pass),
        parallel_distributed.DistributedDataParallel: {"_check_comm_hook": _pass},
        _op_schema: {_REBUILD: _rebuild_on_host},
        _random: {tracker.__name__: tracker, "_rng_tracker": None},
        _fsdp_param: {"_chunk_with_empty": _Chunks},
        DeviceMesh: _run_outside(DeviceMesh, _MESH_METHODS),
        ShardingPropagator: _run_outside(ShardingPropagator, (_PROPAGATION,)),
    }
    if is_release(before=(2, 8)):  # which coalesces what a GPU sends, whatever the backend
        done = make_work([])
        ends = {"_start_coalescing": lambda *_: None, "_end_coalescing": lambda *_: done}
        patches[dist.ProcessGroup] = ends
    return patches


def _pass(*_args: Any, **_kwargs: Any) -> None:
    pass


def _replace_everywhere(name: str, function: Any) -> dict[Any, dict[str, Any]]:
    """Lists a function of process groups for all modules that have it by name."""
    owners = (dist, dist.distributed_c10d, device_mesh)
    return {owner: {name: function} for owner in owners if hasattr(owner, name)}


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


_OBJECT_COLLECTIVES: dict[str, Any] = {
    "broadcast_object_list": _broadcast,
    "all_gather_object": _gather_to_all,
    "gather_object": _gather,
    "scatter_object_list": _scatter,
    "monitored_barrier": lambda *_, **__: None,  # which gloo alone has
}
"""Answers to collectives of Python objects, which pickle objects into tensors and read their sizes.

The objects of other ranks are taken to be as this rank's. Source:
``torch/distributed/distributed_c10d.py``.
"""


class _StatelessTracker:
    """Tracker of DTensor's random numbers that keeps no state of a generator.

    Source: ``OffsetBasedRNGTracker`` in ``torch/distributed/tensor/_random.py``.
    """

    distribute_region_enabled = False  # results are drawn as they are

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _manual_seed(self, _seed: int) -> None:
        pass

    def _distribute_region(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _Chunks:
    """Chunks of a tensor, each made when asked for: of one for each rank FSDP takes its own.

    Source: ``_chunk_with_empty`` in ``torch/distributed/fsdp/_fully_shard/_fsdp_common.py``.
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._dim = dim
        self._length = tensor.size(dim)
        self._chunk_length = -(-self._length // num_chunks)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._chunk_length
        if start >= self._length and index:
            return self._tensor.new_empty(0)
        length = min(self._chunk_length, self._length - start)
        return self._tensor.narrow(self._dim, start, length)


def _rebuild_on_host(spec: Any) -> torch.Tensor:
    """Makes a tensor of global shape for DTensor, whose own would be a fake one on a GPU."""
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)


def _forget_meshes() -> None:
    """Empties the caches in which DTensor keeps the meshes of a group that is left.

    They take meshes of equal sizes for one, and hold their process groups.
    """
    from torch.distributed.tensor import DTensor, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    clear_native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear_native is not None:
        clear_native()


def _run_outside(kind: type, names: tuple[str, ...]) -> dict[str, Any]:
    """Makes methods of a class, as far as it has them, run on real tensors and unrecorded."""

    def replace(method: Any) -> Any:
        @functools.wraps(function := getattr(method, "__func__", method))
        def run(*args: Any, **kwargs: Any) -> Any:
            with run_outside_modes():
                return function(*args, **kwargs)

        return staticmethod(run) if isinstance(method, staticmethod) else run

    return {name: replace(vars(kind)[name]) for name in names if name in vars(kind)}


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Makes the mesh of a layout, to be called within :func:`offer_group`."""
    names, sizes = zip(*layout.mesh, strict=True)
    with run_outside_modes():
        return device_mesh.init_device_mesh(device_type, sizes, mesh_dim_names=names)
