"""Autograd as a step runs it: what its functions save and release, and where they write in place.

Autograd numbers its functions in the order in which forward makes them; so each function has a
node, and backward tells when a save is released.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr

from fxmem.graph import Save
from fxmem.patching import patch
from fxmem.recording.ledger import Ledger
from fxmem.specs import strip_torch
from fxmem.versions.fallbacks import is_dense
from fxmem.versions.operators import aten

_CLONE = "CloneBackward0"
_COPY_SLICES = "torch::autograd::CopySlices"
"""Runs the function of an operator that changed a view in place, and copies its results into
the gradient of the view's base: ``torch/csrc/autograd/functions/tensor.cpp``."""


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """A save of a tensor for backward, by the function with that number."""

    storage: int
    node: int | None
    position: int
    sequence: int
    shape: tuple[int, ...]
    dtype: str


class AutogradLog:
    """Notes what autograd's functions save, which node made each, and when they run.

    Attributes:
        saves: Every save.
        early: The nodes whose backward runs in forward, as in ``torch.autograd.grad``.
        ran: By number, the first and last operation of a function's backward.
        returned: By number, the last operation before a function's backward returned; the engine's
            sums of gradients in the function's name come later. Only of functions that saved what
            other functions made.
        rewrites: Numbers of functions of operators that changed a view in place, or overwrote
            what they save.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.saves: list[SaveRecord] = []
        self.early: set[int] = set()
        self._ledger = ledger
        # Numbers of the functions that copied what operators in place overwrote.
        self._copies: set[int] = set()
        self.ran: dict[int, tuple[int, int]] = {}
        self.returned: dict[int, int] = {}
        # By number of a CopySlices: the first operation of the function that it runs.
        self._copied: dict[int, int] = {}
        self._unpacked: list[weakref.ref[Tensor]] = []
        self._entered = 0
        self._starts: list[int] = []
        self._ends: list[tuple[int, int]] = []

    @property
    def rewrites(self) -> set[int]:
        return self._copies | self._copied.keys()

    @property
    def saved(self) -> list[SaveRecord]:
        """The first save of each storage."""
        first: dict[int, SaveRecord] = {}
        for save in self.saves:
            first.setdefault(save.storage, save)
        return [*first.values()]

    # -- forward -------------------------------------------------------------------------------

    def enter_node(self) -> None:
        self._entered = _get_sequence_nr()

    def exit_node(self, node: int, results: Iterable[Tensor] = ()) -> None:
        """Gives the functions that were numbered since the node began to it.

        The gradients of views that the node changed in place and returns are copied. Autograd makes
        the function of such a view anew, after the base's ``CopySlices``. In eager that is
        ``AsStridedBackward0``, which fills a new tensor of the base's size (``as_strided_backward``
        in ``torch/csrc/autograd/FunctionsManual.cpp``); tensors of a Python class have the view's
        own function, which hands on its gradient's memory.
        """
        for tensor in results if torch.is_grad_enabled() else ():
            base, function = tensor._base, tensor.grad_fn
            if base is None or tensor.numel() != base.numel():
                continue
            made: Any = function
            while made is not None and made._sequence_nr() >= self._entered:
                if made.name() == _COPY_SLICES:
                    function.register_prehook(  # type: ignore[union-attr]
                        lambda gradients: tuple(g if g is None else g.clone() for g in gradients)
                    )
                    break
                made = made.next_functions[0][0] if made.next_functions else None
        sequence = _get_sequence_nr()
        if sequence > self._entered:
            self._starts.append(self._entered)
            self._ends.append((sequence, node))

    def give_running(self, node: int) -> None:
        """Gives the function whose forward runs, which is numbered before it does, to a node."""
        sequence = _get_sequence_nr()
        self._starts.append(sequence - 1)
        self._ends.append((sequence, node))

    def add_save(
        self, storage: int, tensor: Tensor, maker: Any, node: int | None, position: int
    ) -> None:
        """Notes a save of the function that autograd is making, of a tensor that ``maker`` made."""
        saver = sequence = _get_sequence_nr() - 1  # a function gets its number before it saves
        if is_own_output(maker):
            base = maker.next_functions[0][0] if maker.next_functions else None
            if maker.name() == _CLONE:
                saver -= 1  # in place: a copy of the argument is saved, which has a number too
                self._copies.add(sequence)
            elif base is not None and base.name() == _COPY_SLICES:  # a changed view, made anew
                saver = int(base._sequence_nr())
        shape, dtype = tuple(tensor.shape), strip_torch(tensor.dtype)
        self.saves.append(SaveRecord(storage, node, position, saver, shape, dtype))

    # -- backward ------------------------------------------------------------------------------

    def see_operation(self, function: Any, operation: int, operator: Any, result: Any) -> None:
        """Notes an operation that a function of autograd runs."""
        sequence = function._sequence_nr()
        self.ran[sequence] = self.ran.get(sequence, (operation, 0))[0], operation
        if operator is aten.clone.default and function.name() == _COPY_SLICES:
            self._copied.setdefault(sequence, operation + 1)  # the gradient it hands on
        if operator is aten.detach.default:
            # ``SavedVariable::unpack`` makes a tensor that the function alone holds, or it is a
            # gradient without a number: it dies as the function returns.
            def see_return(_: object) -> None:
                last = self.returned.get(sequence, 0)
                self.returned[sequence] = max(self._ledger.operation, last)

            self._unpacked.append(weakref.ref(result, see_return))

    def find_node(self, function: Any) -> int | None:
        """Finds the node whose forward made a function of autograd.

        None for functions without a number: AccumulateGrad, a graph recomputed in backward.
        """
        sequence = function._sequence_nr()
        at = bisect_right(self._starts, sequence) - 1
        if at >= 0 and sequence < self._ends[at][0]:
            return self._ends[at][1]
        return None

    # -- afterwards ----------------------------------------------------------------------------

    def list_saves(self) -> Iterator[Save]:
        """Lists saves by the functions that run: for an operator in place on a view, CopySlices.

        Autograd makes it right after the operator's own function, or the copy that this one saves.
        """
        runs = {number - 1 - (number - 1 in self._copies): number for number in self._copied}
        saves = [replace(s, sequence=runs.get(s.sequence, s.sequence)) for s in self.saves]
        released = self._find_releases(saves)
        for save in saves:
            unpacked, _ = self.ran.get(save.sequence, (None, None))
            unpacked = self._copied.get(save.sequence, unpacked)
            last = returned = released.get(save.sequence)
            if last is not None:
                returned = min(last, self.returned.get(save.sequence, last))
            yield Save(save.storage, save.node, save.position, unpacked, last, returned)

    def _find_releases(self, saves: Iterable[SaveRecord]) -> dict[int, int]:
        """Finds by function the operation of its backward after which it releases its saves.

        This is its last operation, unless the engine adds up gradients in its name afterwards: then
        the deaths of its saves tell.
        """
        last = {sequence: last for sequence, (_, last) in self.ran.items()}
        holders: dict[int, int] = {}  # by storage, the function that releases it last
        for save in saves:
            if save.sequence in last:
                holder = holders.get(save.storage, save.sequence)
                holders[save.storage] = max(holder, save.sequence, key=last.__getitem__)
        seen: dict[int, int] = {}
        for index, sequence in holders.items():
            died = self._ledger.storages[index].died
            if died is not None and self.ran[sequence][0] <= died <= last[sequence]:
                seen[sequence] = max(died, seen.get(sequence, died))
        return last | seen


def is_own_output(maker: Any) -> bool:
    """Returns whether a tensor with this ``grad_fn`` is saved by the function that made it."""
    return maker is not None and maker._sequence_nr() == _get_sequence_nr() - 1


# -- the engine --------------------------------------------------------------------------------


def watch_engine(
    begin: Callable[[Any], None], run_engine: Callable[[Callable[..., Any], Any, Any], Any]
) -> AbstractContextManager[None]:
    """Makes a context that watches each ``backward`` and ``torch.autograd.grad``.

    Args:
        begin: Is told of the tensors that gradients are wanted of, before the first gradients are
            made.
        run_engine: Is given the engine's function, and its positional and keyword arguments.
    """
    namespace: Any = torch.autograd
    run, make_gradients = namespace._engine_run_backward, namespace._make_grads

    def make_watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        begin(outputs)
        return make_gradients(outputs, *args, **kwargs)

    def run_watched(*args: Any, **kwargs: Any) -> Any:
        return run_engine(run, args, kwargs)

    return patch({namespace: {"_make_grads": make_watched, "_engine_run_backward": run_watched}})


# -- gradients that eager autograd writes in place, and not while Python watches -------------------

_FILLS = frozenset(
    {
        aten._index_put_impl.default,
        aten.index_put.default,
        aten.put.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
        aten.index_add.default,
        aten.index_fill.int_Tensor,
    }
)
_OUT_OF_PLACE = frozenset(
    {"ScatterReduceBackward0", "IndexReduceBackward0", "LinalgCholeskyExBackward0"}
)
"""Formulas that add their own results out of place."""

_SOLE_TENSOR_REFERENCES = 4
"""``Tensor._use_count()`` inside ``__torch_dispatch__`` of a tensor that the engine's buffer
alone holds: the buffer, the dispatcher's stack, the argument of the call, and the Python object."""

_SOLE_STORAGE_REFERENCES = 2
"""Uses of the storage of such a tensor: the tensor, and the Python storage object."""


class EngineWatch:
    """Finds, in backward, the operators that would run in place without anyone watching.

    While a ``TorchDispatchMode`` is active or a tensor is a subclass, C++ autograd takes the
    out-of-place branch in a few spots (``at::isTensorSubclassLike``), which plain eager runs in
    place. A recording would show a buffer that the real step never allocates. These are the spots:

    - The sum of gradients that meet at one node: ``torch/csrc/autograd/input_buffer.cpp``,
      ``accumulate`` and ``can_accumulate_inplace``: in place if the engine holds the last reference
      to the older gradient and its storage, and makes no graph of its own (``create_graph=True``).
    - Backward formulas that fill a fresh buffer: ``torch/csrc/autograd/FunctionsManual.cpp``,
      e.g. ``index_backward``, ``value_selecting_reduction_backward``, ``gather_backward`` and
      ``take_backward``.
    """

    def __init__(self) -> None:
        self._returned = False
        self._is_wrapped = False

    def see_wrapper(self) -> None:
        """Notes that a subclass such as DTensor takes the operator, which it then runs on parts.

        Eager takes the branch for subclasses too.
        """
        self._is_wrapped = True

    def see_device_query(self) -> None:
        """Notes that ``prim::device`` was dispatched: an addition straight after is the engine's.

        The engine validates a node's result, and asks for its device, before it adds the result
        to the gradient of the next node (``torch/csrc/autograd/engine.cpp``, ``validate_outputs``).
        """
        self._returned, self._is_wrapped = True, False

    def find_reused(
        self,
        func: Any,
        args: tuple[Any, ...],
        caller: FrameType,
        is_fresh: Callable[[Tensor], bool],
    ) -> Tensor | None:
        """Finds the argument that eager would have written the result into, or None.

        The caller is the Python frame that led here: the engine's, or that of user code inside
        backward, which eager never rewrites; fresh is a tensor that the running function made.
        """
        returned, self._returned = self._returned, False
        is_wrapped, self._is_wrapped = self._is_wrapped, False
        if is_wrapped:
            return None
        is_engine = caller.f_code.co_name == "_engine_run_backward"
        if func is aten.add.Tensor and returned and is_engine:
            self._returned = True  # the next gradient of the same node may be added right away
            reused = not torch.is_grad_enabled() and _is_accumulated_in_place(*args[:2])
        else:
            reused = func in _FILLS and is_fresh(args[0]) and is_engine
        tensor: Tensor = args[0]
        node = torch._C._current_autograd_node()
        is_out_of_place = node is not None and node.name() in _OUT_OF_PLACE
        return None if not reused or (is_out_of_place and is_fresh(tensor)) else tensor


def _is_accumulated_in_place(older: Tensor, newer: Any) -> bool:
    uses = torch._C._storage_Use_Count(older.untyped_storage()._cdata)
    return (
        older.dtype == newer.dtype
        and older.shape == newer.shape  # else it is part of a formula
        and older._use_count() <= _SOLE_TENSOR_REFERENCES  # type: ignore[attr-defined]
        and uses <= _SOLE_STORAGE_REFERENCES
        and is_dense(older)
    )
