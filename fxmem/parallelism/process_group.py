"""A process group of one rank, whose other ranks are not there.

PyTorch's fake process group (``torch/testing/_internal/distributed/fake_pg.py``) answers every
collective at once, with what its buffers held before. Shards, buffers and buckets are allocated as
in a run with all ranks.
"""

from __future__ import annotations

import contextlib
import functools
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

_MESH_METHODS = ("__init__", "__getitem__", "_flatten", "_unflatten", "_concatenate", "from_group")
"""Methods of a mesh that compute with the ranks in it, which are real tensors."""
_PROPAGATION = "_propagate_tensor_meta_non_cached"
"""Runs an operator of DTensors on fake tensors of global shapes, which the step never makes."""


@contextlib.contextmanager
def run_outside_modes() -> Iterator[None]:
    """Records nothing within, and makes nothing fake."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def join_fake_group(world_size: int, rank: int) -> Iterator[None]:
    """Makes this process one rank of a group; code that joins one by itself is in it already.

    Raises:
        UsageError: This process is in a real group.
    """
    if not dist.is_available():
        raise UsageError("this build of PyTorch has no torch.distributed", hint="another build")
    if dist.is_initialized():
        raise UsageError(
            "this process has joined a process group", hint="analyze before init_process_group"
        )
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    environment = {name: str(value) for name, value in places.items()}
    defaults = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {**defaults, **os.environ, **environment}))
        stack.callback(setattr, sys, "excepthook", sys.excepthook)  # which joining replaces
        with run_outside_modes():
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(dist.destroy_process_group)
        for joining in (dist, dist.distributed_c10d, device_mesh):
            if hasattr(joining, "init_process_group"):
                joins = mock.patch.object(joining, "init_process_group", lambda *a, **k: None)
                stack.enter_context(joins)
        methods = [(DeviceMesh, name) for name in _MESH_METHODS]
        for owner, name in [*methods, (ShardingPropagator, _PROPAGATION)]:
            if name in vars(owner):
                method = _run_real(vars(owner)[name])
                stack.enter_context(mock.patch.object(owner, name, method))
        stack.enter_context(run_reducers())
        yield


def _run_real(method: Any) -> Any:
    function: Callable[..., Any] = getattr(method, "__func__", method)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with run_outside_modes():
            return function(*args, **kwargs)

    return staticmethod(run) if isinstance(method, staticmethod) else run


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Makes the mesh of a layout, to be called within :func:`join_fake_group`."""
    names, sizes = zip(*layout.mesh, strict=True)
    with run_outside_modes():
        return device_mesh.init_device_mesh(device_type, sizes, mesh_dim_names=names)
