"""Workspaces of operators that packages bring, stated by their users."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxmem.errors import UsageError
from fxmem.kernels.cuda.gpu import CUDA
from fxmem.kernels.registry import CPU, OperatorCall


def register_workspace(operator: str, rule: Callable[..., int]) -> None:
    """States the memory that the kernel of an operator takes besides its results.

    Analyses count this memory while the operator runs, and no longer name the operator among
    those whose memory is unknown. Results and saved tensors need no rule: they come from
    ``torch.library.register_fake`` and ``register_autograd``.

    Args:
        operator: ``"mylib::splitk"``, or with an overload ``"mylib::splitk.out"``.
        rule: Takes the operator's arguments, whose tensors have shapes and no values, and returns
            bytes.

    Raises:
        UsageError: There is no such operator.
    """
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
