"""Workspaces of operators that packages bring, stated by their users."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxmem.errors import UsageError
from fxmem.kernels.cuda.gpu import CUDA
from fxmem.kernels.registry import CPU, OperatorCall


def add_workspace(operator: str, rule: Callable[..., int]) -> None:
    """Registers the workspace rule of an operator: :func:`fxmem.register_workspace`."""
    namespace, _, name = operator.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), name.partition(".")[0] or "?", None)
    overload = getattr(packet, name.partition(".")[2] or "default", None)
    if overload is None:
        raise UsageError(
            f"there is no operator {operator!r}",
            hint="import the package that defines it first; names are like 'mylib::splitk'",
        )

    def estimate(call: OperatorCall) -> int:
        return int(rule(*call.args, **call.kwargs))

    for target in (CPU, CUDA):
        target.estimators[overload] = estimate
