"""What an operator costs besides its results: FLOPs, and memory of its kernel and library."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from fxmem.kernels.target import Target, Workspace
from fxmem.recording.ledger import Ledger
from fxmem.tracing.fxgraph import iterate_tensors
from fxmem.tracing.operator_cache import Key, make_key


class KernelCosts:
    """Says what the target's kernels take.

    Args:
        target: The device whose kernels run the step.
        ledger: Knows which tensors lie on it.
    """

    def __init__(self, target: Target, ledger: Ledger) -> None:
        self._target = target
        self._ledger = ledger
        self._flops: dict[Key, int] = {}

    def count_flops(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> int:
        """As ``torch.utils.flop_counter`` counts them; of like calls once."""
        count = flop_registry.get(func._overloadpacket)
        if count is None:
            return 0
        key = make_key(func, args, kwargs)
        flops = self._flops.get(key) if key is not None else None
        if flops is None:
            flops = int(count(*args, **kwargs, out_val=result))
            if key is not None:
                self._flops[key] = flops
        return flops

    def estimate_workspace(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Workspace:
        """What the kernel holds inside itself, where it is the target's."""
        if not self._ledger.counts_all:
            tensors = iterate_tensors((args, kwargs, result))
            if not any(map(self._ledger.is_counted, tensors)):
                return 0
        return self._target.estimate_workspace(func, args, kwargs, result)

    def estimate_library_bytes(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> int:
        """The most that the library behind the kernel may take besides, as it chooses."""
        estimate = self._target.libraries.get(func)
        if estimate is None or not self._ledger.is_counted(args[0]):
            return 0
        return estimate(args, kwargs, result)

    def list_kept(self, func: Any, args: tuple[Any, ...]) -> tuple[tuple[str, int], ...]:
        """Names and bytes of what the library keeps from its first use on."""
        keeper = self._target.keepers.get(func)
        return () if keeper is None else tuple(keeper(args))
