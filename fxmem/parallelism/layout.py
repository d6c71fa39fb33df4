"""Layout of a parallel run: the mesh of its processes, and how the model is laid out on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fxmem.errors import UsageError

Mesh = tuple[tuple[str, int], ...]
"""Names and sizes of the dimensions of a mesh, the last of which runs fastest."""
_PLAIN = ("fsdp", "ddp")
_FEW = 8


@dataclass(frozen=True, slots=True)
class Knobs:
    """Choices within a layout that trade memory for communication or computation.

    >>> str(Knobs("ops", reshards=False))
    'checkpoint ops, no resharding'
    """

    checkpoint: str = "none"  # one of fxmem.parallelism.checkpointing.CHECKPOINTS
    reshards: bool = True  # under "fsdp": blocks free their parameters after forward
    offloads: bool = False  # under "fsdp": shards lie in the host's memory
    param_dtype: str | None = None  # under "fsdp": of parameters in forward and backward
    shards_state: bool = False  # each rank has a part of the optimizer's state, as under "ddp"

    def __str__(self) -> str:
        texts = {
            f"checkpoint {self.checkpoint}": self.checkpoint != "none",
            "no resharding": not self.reshards,
            "offloading": self.offloads,
            "sharded optimizer": self.shards_state,
        }
        return ", ".join(text for text, is_set in texts.items() if is_set)


NO_KNOBS = Knobs()


Way = str | Callable[[Any, Any], Any] | None
"""``"fsdp"``, ``"ddp"``, a TARGET, or a function of a model and a DeviceMesh."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """A way to lay a model out, with knobs."""

    way: Way
    knobs: Knobs


ParallelizeChoice = Way | Tuned


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh of processes, one of its ranks, and the function that lays a model out on it.

    >>> Layout((("dp", 4), ("tp", 2)), "fsdp", rank=5).world_size
    8
    """

    mesh: Mesh
    parallelize: Way
    rank: int | str = 0  # or "worst": the one with the highest peak
    knobs: Knobs = NO_KNOBS

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return math.prod(size for _, size in self.mesh)

    def list_differing(self) -> list[Layout]:
        """Lists the layouts of the ranks among which the one with the highest peak is.

        All ranks of up to eight; of more, those at the ends of each dimension of the mesh: what
        cannot be divided evenly gives more to the first ranks and less to the last.

        >>> [each.rank for each in Layout((("dp", 16), ("tp", 2)), "fsdp").list_differing()]
        [0, 1, 30, 31]
        """
        ranks = [0]
        for _, size in self.mesh:
            ranks = [rank * size + at for rank in ranks for at in sorted({0, size - 1})]
        if self.world_size <= _FEW:
            ranks = [*range(self.world_size)]
        return [replace(self, rank=rank) for rank in ranks]


def resolve_layout(
    mesh: Mapping[str, int] | None,
    parallelize: ParallelizeChoice,
    rank: int | str,
) -> Layout | None:
    """Checks the layout that a caller asks for; None where no mesh is given.

    Raises:
        UsageError: A part is missing or not understood.

    >>> resolve_layout({"dp": 8}, "fsdp", 0).world_size
    8
    """
    if mesh is None:
        if parallelize is not None or rank:
            raise UsageError(
                "parallelize or rank without a mesh", hint="mesh={'dp': 8} (--mesh dp=8)"
            )
        return None
    if not mesh or not all(isinstance(size, int) and size > 0 for size in mesh.values()):
        raise UsageError(f"mesh {dict(mesh)!r} has no processes", hint="{'dp': 8}: names and sizes")
    if parallelize is None:
        raise UsageError(
            "no function lays the model out on the mesh",
            hint="parallelize='fsdp', 'ddp', or a function of the model and the mesh",
        )
    knobs = NO_KNOBS
    if isinstance(parallelize, Tuned):
        knobs, parallelize = parallelize.knobs, parallelize.way
    if isinstance(parallelize, str) and ":" not in parallelize and parallelize not in _PLAIN:
        raise UsageError(
            f"unknown parallelize={parallelize!r}",
            hint="fsdp, ddp, or a TARGET such as train.py:parallelize",
        )
    layout = Layout(tuple(mesh.items()), parallelize, rank, knobs)
    last = layout.world_size - 1
    if rank != "worst" and not (isinstance(rank, int) and 0 <= rank <= last):
        raise UsageError(f"no rank {rank} on this mesh", hint=f"0 to {last}, or worst")
    return layout


def parse_mesh(text: str) -> dict[str, int | None]:
    """Parses a mesh as the command line has it, with None for a size that is left open.

    Raises:
        UsageError: It is no list of names and sizes.

    >>> parse_mesh("dp=8,tp=4"), parse_mesh("dp=*")
    ({'dp': 8, 'tp': 4}, {'dp': None})
    """
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {name.strip(): None if size == "*" else int(size) for name, size in pairs}
    except ValueError:
        raise UsageError(f"mesh {text!r} is not understood", hint="dp=8,tp=4") from None


def parse_rank(text: str) -> int | str:
    """Parses a rank as the command line has it: a number, or another text as it is.

    >>> parse_rank("3"), parse_rank("worst")
    (3, 'worst')
    """
    return int(text) if text.isdecimal() else text
