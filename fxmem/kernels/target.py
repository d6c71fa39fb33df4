"""What a target device does otherwise than fake tensors do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

from fxmem.graph import NEXT_RESULT, Blocks, measure_blocks

Function = Callable[..., Any]
Arguments = tuple[object, ...]
Keeper = Callable[[Arguments], tuple[tuple[str, int], ...]]
"""From an operator's arguments to names and bytes of what its library keeps from then on."""
Mover = Callable[[Any], None]
Surrounding = Callable[[], AbstractContextManager[None]]
Workspace = int | Blocks
"""What a kernel holds inside: bytes of one block, which it takes after its results; or its blocks
in order, in which the complement of an index (``~0``) stands for that tensor of the result."""
Estimator = Callable[[Arguments, Mapping[str, object], object], Workspace]
"""From an operator's arguments and its result to what its kernel holds inside."""
Limit = Callable[[Arguments, Mapping[str, object], object], int]
"""From an operator's arguments and its result to the most bytes that its library may take."""


class Target:
    """The differences between a target device and fake tensors, filled by the device's modules.

    Args:
        name: As in ``device=``.
        base: What holds for this target too unless it says otherwise.
        device: Where the fake tensors lie that stand for those of the device.

    Attributes:
        functions: From torch functions, as a ``TorchFunctionMode`` gets them, to replacements
            that take the same arguments.
        kernels: From operators to fake kernels that take the place of PyTorch's own, unless
            they return NotImplemented; below autograd, and seen by recordings as the operator.
        estimators: From operators to what states their kernels' buffers.
        libraries: From operators to what states the most that the library behind them may take
            besides, as it chooses.
        keepers: From operators to what states the memory that the library behind them takes at
            its first use in a thread, and does not give back.
        unmodelled: From operators whose kernels take memory that nothing here states, to why.
        movers: From classes of modules to what ``module.to(device)`` does besides moving tensors.
        make_scaler: Makes the gradient scaler of a step in float16; None where there is none.
        surroundings: Context managers that a step on this target runs in.
    """

    def __init__(
        self,
        name: str,
        base: Target | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
    ) -> None:
        self.name = name
        self.device = device
        self._base = base
        self._functions: dict[Function, Function] = {}
        self._kernels: dict[OpOverload, Function] = {}
        self.estimators: dict[OpOverload, Estimator] = {}
        self.libraries: dict[OpOverload, Limit] = {}
        self.keepers: dict[OpOverload, Keeper] = {}
        self.unmodelled: dict[OpOverload, str] = {}
        self.movers: dict[type[nn.Module], Mover] = {}
        self.make_scaler: Callable[[], Any] | None = None
        self.surroundings: list[Surrounding] = []

    @property
    def functions(self) -> dict[Function, Function]:
        """The replacements, those of the base included."""
        return (self._base.functions if self._base else {}) | self._functions

    @property
    def kernels(self) -> dict[OpOverload, Function]:
        """The fake kernels, those of the base included."""
        return (self._base.kernels if self._base else {}) | self._kernels

    def function(self, *functions: Function) -> Callable[[Function], Function]:
        """Registers the replacement of these torch functions."""
        return _register(self._functions, functions)

    def kernel(self, *operators: OpOverload) -> Callable[[Function], Function]:
        """Registers the fake kernel of these operators."""
        return _register(self._kernels, operators)

    def workspace(self, *operators: OpOverload) -> Callable[[Estimator], Estimator]:
        """Registers what states what these operators' kernels need beyond their outputs."""
        return _register(self.estimators, operators)

    def library(self, *operators: OpOverload) -> Callable[[Limit], Limit]:
        """Registers what states the most that a library may take besides."""
        return _register(self.libraries, operators)

    def keeper(self, *operators: OpOverload) -> Callable[[Keeper], Keeper]:
        """Registers what states the memory that is kept after these operators."""
        return _register(self.keepers, operators)

    def mover(self, *classes: type[nn.Module]) -> Callable[[Mover], Mover]:
        """Registers what moving these modules does besides moving their tensors."""
        return _register(self.movers, classes)

    def surrounding(self, surrounding: Surrounding) -> Surrounding:
        """Registers a context manager that a step on this target runs in."""
        self.surroundings.append(surrounding)
        return surrounding

    def estimate_workspace(
        self, func: OpOverload, args: Arguments, kwargs: Mapping[str, object], outputs: object
    ) -> Workspace:
        """What a kernel of this device holds inside itself; 0 where it has no buffers.

        Args:
            func: The operator that reached the dispatcher.
            args: Its positional arguments; of tensors only the metadata is read.
            kwargs: Its keyword arguments.
            outputs: What it returned.
        """
        estimator = self.estimators.get(func)
        return 0 if estimator is None else estimator(args, kwargs, outputs)

    def estimate_workspace_bytes(
        self, func: OpOverload, args: Arguments, kwargs: Mapping[str, object], outputs: object
    ) -> int:
        """Bytes that a kernel of this device needs at its peak beyond what it returns.

        Args:
            func: The operator that reached the dispatcher.
            args: Its positional arguments; of tensors only the metadata is read.
            kwargs: Its keyword arguments.
            outputs: What it returned: new tensors, where the order of its blocks names them.

        Returns:
            Bytes above (live before) + (bytes of new outputs).
        """
        workspace = self.estimate_workspace(func, args, kwargs, outputs)
        if isinstance(workspace, int):
            return workspace
        results: list[Any] = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        named = [~block for block, _ in workspace if block < 0]
        blocks = tuple((max(block, NEXT_RESULT), nbytes) for block, nbytes in workspace)
        return measure_blocks(blocks, [results[at].untyped_storage().nbytes() for at in named])


ANY = Target("any")
"""What differs between real tensors of any device and fake ones."""


def _register(table: dict[Any, Any], keys: tuple[Any, ...]) -> Callable[[Any], Any]:
    def register(replacement: Any) -> Any:
        for key in keys:
            table[key] = replacement
        return replacement

    return register
