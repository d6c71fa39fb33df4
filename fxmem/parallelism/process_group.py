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
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.errors import UsageError
from fxmem.parallelism.layout import Layout
from fxmem.parallelism.reducer import run_reducers
from fxmem.versions.release import is_release

_MESH_METHODS = ("__init__", "__getitem__", "_flatten", "_unflatten", "_concatenate", "from_group")
"""Methods of a mesh that compute with the ranks in it, which are real tensors."""
_ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
_NOT_GIVEN = -1
_PROPAGATION = "_propagate_tensor_meta_non_cached"
"""Runs an operator of DTensors on fake tensors of global shapes, which the step never makes."""


@contextlib.contextmanager
def run_outside_modes() -> Iterator[None]:
    """Records nothing within, and makes nothing fake."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def offer_group(layout: Layout | None = None) -> Iterator[None]:
    """Makes this process one rank of a layout's group; code that joins one is in it already.

    Without a layout, code that joins a group is alone in it, or the rank that it names.

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

    def join(*_: Any, world_size: int = _NOT_GIVEN, rank: int = _NOT_GIVEN, **__: Any) -> None:
        if dist.is_initialized():
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size = layout.world_size if layout else max(world_size, 1)
        place = int(layout.rank) if layout else max(rank, 0)
        hook = sys.excepthook  # which joining replaces
        with run_outside_modes():
            init_real("fake", store=FakeStore(), rank=place, world_size=size)
        sys.excepthook = hook

    init_real = dist.init_process_group
    logger = logging.getLogger("torch.distributed")
    level = logger.level
    with contextlib.ExitStack() as stack:
        for owner in (dist, dist.distributed_c10d, device_mesh):
            if hasattr(owner, "init_process_group"):
                stack.enter_context(mock.patch.object(owner, "init_process_group", join))
        for kind, name in _list_outside(layout):
            method = _run_real(vars(kind)[name])
            stack.enter_context(mock.patch.object(kind, name, method))
        stack.enter_context(run_reducers())
        stack.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        if layout is not None:
            places = {"RANK": layout.rank, "LOCAL_RANK": layout.rank, **_ADDRESS}
            environment = {name: str(value) for name, value in places.items()}
            environment["WORLD_SIZE"] = str(layout.world_size)
            stack.enter_context(mock.patch.dict(os.environ, environment))
            _forget_meshes()
            stack.callback(_forget_meshes)
            join()
        logger.setLevel(logging.ERROR)  # advice on speed, at each redistribution
        stack.callback(logger.setLevel, level)
        yield


def _list_outside(layout: Layout | None) -> Iterator[tuple[type, str]]:
    """Lists methods that run outside of the recording, with their classes."""
    methods: list[tuple[type, str]] = [(DeviceMesh, name) for name in _MESH_METHODS]
    if layout is not None:
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        methods.append((ShardingPropagator, _PROPAGATION))
    return ((kind, name) for kind, name in methods if name in vars(kind))


def _forget_meshes() -> None:
    """Has DTensor plan nothing by the meshes of a group that is left.

    Its caches take meshes of equal sizes for one, and hold their process groups.
    """
    from torch.distributed.tensor import DTensor, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    if is_release((2, 10)):
        torch._C._clear_DTensor_sharding_propagator_cache()


def _run_real(method: Any) -> Any:
    function: Callable[..., Any] = getattr(method, "__func__", method)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with run_outside_modes():
            return function(*args, **kwargs)

    return staticmethod(run) if isinstance(method, staticmethod) else run


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Makes the mesh of a layout, to be called within :func:`offer_group`."""
    names, sizes = zip(*layout.mesh, strict=True)
    with run_outside_modes():
        return device_mesh.init_device_mesh(device_type, sizes, mesh_dim_names=names)
