"""Meshes, and the functions that lay a model out on them, as a caller gives them."""

from __future__ import annotations

import pytest
from torch import nn

import fxmem
from fxmem.errors import TraceError, UsageError
from fxmem.parallelism.layout import parse_mesh

REFUSED = [
    ({"parallelize": "fsdp"}, "parallelize or rank without a mesh"),
    ({"mesh": {"dp": 0}, "parallelize": "fsdp"}, "mesh {'dp': 0} has no processes"),
    ({"mesh": {"dp": 2}}, "no function lays the model out on the mesh"),
    ({"mesh": {"dp": 2}, "parallelize": "fsdp2"}, "unknown parallelize='fsdp2'"),
    ({"mesh": {"dp": 2}, "parallelize": "fsdp", "rank": 2}, "no rank 2 on this mesh"),
    ({"mesh": {"dp": 2}, "parallelize": "fsdp", "frontend": "fx"}, "the fx frontend with a mesh"),
    ({"mesh": {"a": 2, "b": 2}, "parallelize": "ddp"}, "ddp on a mesh of 2 dimensions"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_layouts_that_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        fxmem.analyze(nn.Linear(2, 2), "1x2", **options)  # type: ignore[arg-type]
    assert caught.value.cause == message


def test_a_mesh_that_is_not_understood() -> None:
    with pytest.raises(UsageError, match="mesh 'dp' is not understood"):
        parse_mesh("dp")


def test_a_function_that_returns_no_module() -> None:
    with pytest.raises(TraceError, match="parallelize returned a int, not a module"):
        fxmem.analyze(nn.Linear(2, 2), "1x2", mesh={"dp": 2}, parallelize=lambda model, mesh: 3)


def test_a_process_that_is_in_a_group() -> None:
    from torch import distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="this process has joined a process group"):
            fxmem.analyze(nn.Linear(2, 2), "1x2", mesh={"dp": 2}, parallelize="fsdp")
    finally:
        dist.destroy_process_group()
