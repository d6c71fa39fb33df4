"""Live tensor bytes of a real step, as a dispatch mode sees them.

Every storage that an operator returns is counted from its first sight to its death. A kernel's
own scratch memory is not seen.

A dispatch mode changes what it observes: while one is active autograd adds two gradients that
meet at a node out of place, where without it the first one to arrive is reused if nobody else
holds it (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp). `EngineAdds` finds
those additions, and the mode can then do in place what eager would have done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_prims: Any = torch._prims_common
# The second name is that of releases until 2.10.
_is_dense = getattr(_prims, "is_non_overlapping_and_dense_or_false", None) or (
    _prims.is_non_overlapping_and_dense
)
ADD = torch.ops.aten.add.Tensor
ZEROS = (torch.ops.aten.new_zeros.default, torch.ops.aten.zeros.default)
FILLS = {
    torch.ops.aten.scatter.src: torch.Tensor.scatter_,
    torch.ops.aten.scatter.value: torch.Tensor.scatter_,
    torch.ops.aten.scatter_add.default: torch.Tensor.scatter_add_,
    torch.ops.aten.index_add.default: torch.Tensor.index_add_,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl.default: torch.ops.aten._index_put_impl_.default,
    torch.ops.aten.put.default: torch.Tensor.put_,
}
"""Operators that fill zeros in the backward of indexing and selecting reductions, as in place.

Backward formulas write into the zeros that they have just made, and under a mode they do not
(`isTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp).
"""
PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.view.default,
)


class EngineAdds:
    """Tells the autograd engine's own additions from those of backward formulas.

    The engine adds between a node's end and the next node's start. A post hook on each node
    opens that gap and a prehook closes it; post hooks run after the node and before its
    gradients are handed on.
    """

    def __init__(self) -> None:
        """Starts outside any gap; `hook_graphs` makes the nodes report."""
        self.between_nodes = False
        self._sole_counts: tuple[int, int] | None = None

    @contextmanager
    def hook_graphs(self) -> Iterator[None]:
        """Hooks each graph that the engine is about to run, nested backward passes included."""
        original = torch.autograd._engine_run_backward

        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            handles = [h for node in _reachable(outputs) for h in self._hook(node)]
            outer, self.between_nodes = self.between_nodes, False
            try:
                return original(outputs, *args, **kwargs)
            finally:
                self.between_nodes = outer
                for handle in handles:
                    handle.remove()

        torch.autograd._engine_run_backward = run
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = original

    def _hook(self, node: torch.autograd.graph.Node) -> list[Any]:
        def enter(grads: Any) -> None:
            self.between_nodes = False

        def leave(grad_inputs: Any, grad_outputs: Any) -> None:
            self.between_nodes = True

        handles = [node.register_prehook(enter)]
        if node.next_functions:  # AccumulateGrad hands nothing on, and counts its hooks
            handles.append(node.register_hook(leave))
        return handles

    def calibrate(self) -> None:
        """Learns the use counts, as the mode sees them, of a gradient held by the engine alone."""
        x = torch.ones(2, 2, requires_grad=True)
        y = x * 2
        loss = y.exp().sum() + y.cos().sum()
        self._sole_counts = None
        loss.backward()
        if self._sole_counts is None:
            raise RuntimeError("the engine's addition was not seen")

    def is_engine_add(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Tells whether this call is the engine's addition of two gradients."""
        return func is ADD and self.between_nodes and not torch.is_grad_enabled()

    def runs_in_place(self, old: torch.Tensor) -> bool:
        """Tells whether eager would add to `old` in place: nobody else holds it or its storage."""
        counts = use_counts(old)
        if self._sole_counts is None:
            self._sole_counts = counts
        return counts == self._sole_counts and _is_dense(old) and not old._is_zerotensor()


class BiasAdds:
    """Tells the addition of a bias inside `linear` from the user's own additions."""

    FUNCTIONS = (
        (torch.nn.functional, "linear"),
        (torch._VF, "gru"),
        (torch._VF, "lstm"),
        (torch._VF, "rnn_tanh"),
        (torch._VF, "rnn_relu"),
    )

    def __init__(self) -> None:
        """Starts outside any of the functions; `wrap_functions` makes them report."""
        self.product: int | None = None
        self._depth = 0

    @contextmanager
    def wrap_functions(self) -> Iterator[None]:
        """Notes when one of the functions that call the C++ `linear` is running."""
        originals = [(place, name, getattr(place, name)) for place, name in self.FUNCTIONS]

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self._depth += 1
                try:
                    return original(*args, **kwargs)
                finally:
                    self._depth -= 1
                    self.product = None

            return run

        for place, name, original in originals:
            setattr(place, name, wrap(original))
        try:
            yield
        finally:
            for place, name, original in originals:
                setattr(place, name, original)

    def is_bias_add(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Tells whether this call adds a bias to the product that the last operator returned."""
        if func is not ADD or self.product is None or not isinstance(args[1], torch.Tensor):
            return False
        return args[1].dim() == 1 and args[0].untyped_storage()._cdata == self.product

    def note(self, func: Any, out: Any) -> None:
        """Remembers a matrix product, or its view, that was made within a function."""
        product = self._depth > 0 and func in PRODUCTS
        self.product = out.untyped_storage()._cdata if product else None


def use_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the C++ reference counts of a tensor and of its storage."""
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), storage


def _reachable(outputs: Any) -> list[torch.autograd.graph.Node]:
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen: dict[torch.autograd.graph.Node, None] = {}
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            stack.extend(n for n, _ in node.next_functions if n is not None)
    return list(seen)


class LiveTensors(TorchDispatchMode):
    """Counts live storage bytes while active, and the peak since `reset_peak`."""

    def __init__(self, *, eager_adds: bool) -> None:
        """Starts at zero bytes.

        Args:
            eager_adds: Add gradients in place where eager mode would.
        """
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.engine_adds = self.in_place_adds = 0
        self.peak_at = ""
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._eager_adds = eager_adds
        self._adds = EngineAdds()
        self._biases = BiasAdds()
        self._zeros: int | None = None  # the storage that the last operator filled with zeros

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Counts everything within, graphs hooked where that is needed."""
        if not self._eager_adds:
            with self:
                yield
            return
        with self, self._adds.hook_graphs(), self._biases.wrap_functions():
            self._adds.calibrate()
            yield

    def reset_peak(self) -> None:
        """Starts the peak (and the counts of additions) anew from what is live."""
        self.peak_bytes = self.live_bytes
        self.peak_at = "start"
        self.engine_adds = self.in_place_adds = 0

    def add(self, tensor: torch.Tensor, where: str = "resident") -> None:
        """Counts the tensor's storage, unless it is counted already."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._refs:
            self._refs[key] = weakref.ref(storage, self._forget(key))
        self.live_bytes += nbytes - self._sizes.get(key, 0)
        self._sizes[key] = nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_at = self.live_bytes, where

    def _forget(self, key: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            self.live_bytes -= self._sizes.pop(key)
            del self._refs[key]

        return forget

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator and counts the storages that it returned."""
        out = self._run_as_eager(func, args, kwargs or {}) if self._eager_adds else None
        if out is None:
            out = func(*args, **(kwargs or {}))
        self._biases.note(func, out)
        self._zeros = out.untyped_storage()._cdata if func in ZEROS else None
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self.add(leaf, str(func))
        return out

    def _run_as_eager(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._biases.is_bias_add(func, args):
            return args[0].add_(args[1])
        if self._adds.is_engine_add(func, args):
            self.engine_adds += 1
            if self._adds.runs_in_place(args[0]):
                self.in_place_adds += 1
                return args[0].add_(args[1])
        in_backward = func in FILLS and torch._C._current_autograd_node() is not None
        if in_backward and args[0].untyped_storage()._cdata == self._zeros:
            return FILLS[func](*args, **kwargs)
        return None
