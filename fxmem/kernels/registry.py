"""Registry of the differences between a target device and fake tensors."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from fxmem.graph import Blocks
from fxmem.versions.operators import find_operators
from fxmem.versions.release import Release, is_release

Function = Callable[..., Any]
Mover = Callable[[Any], None]
Context = Callable[[], AbstractContextManager[None]]
Workspace = int | Blocks
"""Bytes of one block that a kernel takes after its results; or its blocks in order, in which the
complement of an index (``~0``) stands for that tensor of the result."""

_OF_TORCH = frozenset(
    {
        *("aten", "prim", "prims", "rngprims", "inductor_prims", "mkldnn", "streams", "flex_lib"),
        *("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp", "symm_mem"),
    }
)


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator, the arguments that it was called with, and what it returned.

    Attributes:
        args: Positional arguments; of tensors only the metadata is read.
        kwargs: Keyword arguments.
        outputs: A tensor or several; None before the operator ran.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Any = None

    def get(self, index: int, name: str) -> Any:
        """Returns an argument given by position or by name; None if it was left out."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name)

    def tensor(self, index: int) -> Tensor:
        """Returns the tensor at a position of the arguments."""
        return as_tensor(self.args[index])

    def get_result(self, index: int) -> Tensor:
        """Returns one of several results."""
        return as_tensor(self.outputs[index])

    @property
    def result(self) -> Tensor:
        """The only result."""
        return as_tensor(self.outputs)

    @property
    def result_bytes(self) -> int:
        """Bytes of the storages of all results."""
        return storage_bytes(self.outputs)


Estimator = Callable[[OperatorCall], Workspace]
Limit = Callable[[OperatorCall], int]
Keeper = Callable[[OperatorCall], tuple[tuple[str, int], ...]]
"""From a call to the names and bytes of the memory that its library keeps from then on."""


def as_tensor(value: object) -> Tensor:
    """Returns a value that an operator's schema says is a tensor."""
    assert isinstance(value, Tensor)
    return value


def storage_bytes(outputs: object) -> int:
    """Returns the bytes of the storages of tensors."""
    if isinstance(outputs, Tensor):
        return outputs.untyped_storage().nbytes()
    if isinstance(outputs, (tuple, list)):
        return sum(map(storage_bytes, outputs))
    return 0


class Backend:
    """The differences between a target device and fake tensors, filled by the device's modules.

    Operators are named as in ``torch.ops.aten``, without ``.default``: ``"sum.dim_IntList"``.

    Args:
        name: As in ``device=``.
        base: A backend whose entries hold here too, unless they are replaced.
        device: The device of the fake tensors that stand for its tensors.

    Attributes:
        functions: From torch functions, as a ``TorchFunctionMode`` gets them, to replacements
            that take the same arguments.
        kernels: From operators to fake kernels that take the place of PyTorch's own, unless
            they return NotImplemented; below autograd, and seen by recordings as the operator.
        estimators: From operators to the workspace rules of their kernels.
        libraries: From operators to rules for the most that a library may take besides.
        keepers: From operators to rules for the memory that a library takes at its first use in
            a thread, and does not give back.
        python_kernels: From namespaces of operators whose kernels are Python to contexts in which
            that Python runs as it is and launches nothing.
        unmodelled: From operators whose kernels take memory that nothing here states, to why.
        movers: From classes of modules to further work of ``module.to(device)``.
        make_scaler: Makes the gradient scaler of a step in float16; None where there is none.
        contexts: Context managers that a step on this target runs in.
    """

    def __init__(
        self,
        name: str,
        base: Backend | None = None,
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
        self.python_kernels: dict[str, Context] = {}
        self.unmodelled: dict[OpOverload, str] = {}
        self.movers: dict[type[nn.Module], Mover] = {}
        self.make_scaler: Callable[[], Any] | None = None
        self.contexts: list[Context] = []

    @property
    def functions(self) -> dict[Function, Function]:
        """The replacements, with the replacements of the base."""
        return (self._base.functions if self._base else {}) | self._functions

    @property
    def kernels(self) -> dict[OpOverload, Function]:
        """The fake kernels, with the kernels of the base."""
        return (self._base.kernels if self._base else {}) | self._kernels

    def function(
        self, *functions: Function, since: Release | None = None
    ) -> Callable[[Function], Function]:
        """Registers the replacement of these torch functions, from a release on."""
        return _register(self._functions, functions if is_release(since) else ())

    def kernel(self, *operators: str | OpOverload) -> Callable[[Function], Function]:
        """Registers the fake kernel of these operators."""
        return _register(self._kernels, find_operators(*operators))

    def workspace(self, *operators: str | OpOverload) -> Callable[[Estimator], Estimator]:
        """Registers the workspace rule of these operators."""
        return _register(self.estimators, find_operators(*operators))

    def library(self, *operators: str | OpOverload) -> Callable[[Limit], Limit]:
        """Registers a rule for the most that a library may take besides."""
        return _register(self.libraries, find_operators(*operators))

    def keeper(self, *operators: str | OpOverload) -> Callable[[Keeper], Keeper]:
        """Registers a rule for the memory that is kept after these operators."""
        return _register(self.keepers, find_operators(*operators))

    def leave_out(self, reason: str, *operators: str | OpOverload) -> None:
        """Registers operators whose kernels take memory that is not counted, and why."""
        self.unmodelled.update(dict.fromkeys(find_operators(*operators), reason))

    def list_uncounted(self, names: Iterable[str]) -> Iterator[str]:
        """Lists the operators among these whose kernels take memory that is not counted, and why.

        Operators of extensions are among them, unless they have a workspace rule.
        """
        reasons = {str(operator): reason for operator, reason in self.unmodelled.items()}
        stated = {str(operator) for operator in (*self.estimators, *self.libraries)}
        found: dict[str, dict[str, None]] = {}
        foreign: dict[str, None] = {}
        for name in dict.fromkeys(names):
            namespace, *rest = name.split(".")
            if name in reasons:
                found.setdefault(reasons[name], {})[name] = None
            elif len(rest) == 2 and namespace not in _OF_TORCH and name not in stated:
                foreign[f"{namespace}::{rest[0]}"] = None
        for reason, operators in found.items():
            yield f"Memory inside {', '.join(operators)} is not counted: {reason}."
        if foreign:
            hint = "counted as 0 (fxmem.register_workspace)"
            yield f"The workspace of {', '.join(foreign)} is not known: {hint}."

    def mover(self, *classes: type[nn.Module]) -> Callable[[Mover], Mover]:
        """Registers further work of moving these modules, besides moving their tensors."""
        return _register(self.movers, classes)

    def context(self, context: Context) -> Context:
        """Registers a context manager that a step on this target runs in."""
        self.contexts.append(context)
        return context

    def estimate_workspace(self, func: OpOverload, call: OperatorCall) -> Workspace:
        """Returns the workspace of a kernel of this device; 0 where it has none."""
        estimator = self.estimators.get(func)
        return 0 if estimator is None else estimator(call)


def import_modules(package: ModuleType) -> None:
    """Imports all modules of a package and of the packages in it, which register themselves."""
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


ANY = Backend("any")
"""Differences between real tensors of any device and fake ones."""

CPU = Backend("cpu", ANY)
"""PyTorch's CPU build; filled by the modules of :mod:`fxmem.kernels.cpu`."""


def _register(table: dict[Any, Any], keys: Iterable[Any]) -> Callable[[Any], Any]:
    def register(replacement: Any) -> Any:
        for key in keys:
            table[key] = replacement
        return replacement

    return register
