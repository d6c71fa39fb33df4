"""The results of operators on fake tensors, as the target's kernels give them."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from fxmem.graph import SourceLocation
from fxmem.kernels.target import Target
from fxmem.recording.arguments import list_tensors
from fxmem.recording.constants import (
    answer_from_values,
    comes_of_draw,
    is_known_index,
    see_result,
)
from fxmem.recording.dtypes import check_dtypes
from fxmem.recording.hints import answer_operator
from fxmem.recording.ledger import Ledger
from fxmem.tracing.operator_cache import OperatorCache
from fxmem.tracing.source import find_source


class OperatorRunner:
    """Runs operators; what depends on data is answered where something is known of it.

    Args:
        target: The device whose kernels run the step.
        ledger: Knows which tensors lie on it.
        size_hint: How many elements ``nonzero`` and the like find; None to refuse them.

    Attributes:
        draws: Lines that look at a single random number, in their order.
    """

    def __init__(self, target: Target, ledger: Ledger, size_hint: int | None) -> None:
        self.draws: dict[SourceLocation | None, None] = {}
        self._kernels = target.kernels
        self._ledger = ledger
        self._size_hint = size_hint
        self._cache = OperatorCache()

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_forward: bool
    ) -> Any:
        """The result of an operator.

        Args:
            func: The operator.
            args: Its arguments.
            kwargs: Its keyword arguments.
            in_forward: Whether the user's own code runs it, whose small values are followed.
        """
        answer = answer_from_values(func, args, kwargs)
        if answer and comes_of_draw((args, kwargs)):
            self.draws[find_source()] = None
        answer = answer or answer_operator(func, args, kwargs, self._size_hint)
        result = answer[0] if answer else self._run_kernel(func, args, kwargs)
        if in_forward or is_known_index(args):
            see_result(func, args, kwargs, result)
        return result

    def run_unwatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator that is the recording's own, no part of the step."""
        return self._cache.run(func, args, kwargs)

    def _run_kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_dtypes(func, args)
        kernel = self._kernels.get(func)
        result = kernel(*args, **kwargs) if kernel else NotImplemented
        if result is not NotImplemented:
            return result
        result = self._cache.run(func, args, kwargs)
        # What is changed in place has its device; the result that the mode returns is dropped.
        if not (self._ledger.counts_all or "device" in kwargs or func._schema.is_mutable):
            self._keep_on_device(args, result)
        return result

    def _keep_on_device(self, args: tuple[Any, ...], result: Any) -> None:
        """FakeTensorMode computes with known scalars on the host, and leaves the result there."""
        if isinstance(result, FakeTensor) and result.constant is not None:
            for tensor in list_tensors(args):
                if isinstance(tensor, FakeTensor) and self._ledger.is_counted(tensor):
                    result.fake_device = tensor.fake_device
