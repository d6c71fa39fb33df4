"""Watches a step run on fake tensors: every operator, every storage, its birth and its death.

A ``TorchDispatchMode`` sees each operator below autograd and so each new storage, a weak
reference to the storage sees its death, and ``saved_tensors_hooks`` see what autograd keeps.
"""

from __future__ import annotations

import functools
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fxmem.errors import TraceError
from fxmem.graph import RESIDENT, Category, Operation, Phase, SourceLocation
from fxmem.lowering.sparse import estimate_sparse_workspace, is_on_sparse, run_on_sparse
from fxmem.lowering.target import Target
from fxmem.recording import inplace
from fxmem.recording.arguments import iterate_memory, list_tensors
from fxmem.recording.constants import (
    answer_from_values,
    comes_of_draw,
    is_known_index,
    see_result,
)
from fxmem.recording.dtypes import check_dtypes
from fxmem.recording.effects import find_effect, find_written
from fxmem.recording.hints import answer_operator
from fxmem.recording.ledger import NO_STORAGE, Ledger, dtype_name
from fxmem.recording.overwriting import find_overwritable
from fxmem.recording.records import NodeRecord, SavedRecord, SaveRecord
from fxmem.recording.strangers import Strangers
from fxmem.tracing.fxgraph import iterate_tensors
from fxmem.tracing.operator_cache import Key, OperatorCache, make_key
from fxmem.tracing.source import find_source
from fxmem.tracing.sparse_parts import is_sparse

_CLONE = "CloneBackward0"
_prim_device = torch.ops.prim.device.default
_detach: Callable[[torch.Tensor], torch.Tensor] = torch.ops.aten.detach.default
_lift_fresh = torch.ops.aten.lift_fresh.default


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators and storages while it is active.

    Args:
        target: The device whose kernels run the step.
        size_hint: How many elements ``nonzero`` and the like find; None to refuse them.

    Attributes:
        ledger: Every storage seen, in order of allocation, and what was live when.
        operations: The operators since :meth:`begin_step`.
        saved: What was saved for backward, each storage once.
        saves: Every time that something was.
        sequences: By the number of an autograd function, the first and last operation of its
            backward.
        node_records: By index of the traced node.
        let_go: By storage, the operation in which the user's code let go of a tensor on it last.
        strangers: Real tensors that the step met.
        draws: Lines that look at a single random number, in their order.
    """

    def __init__(self, target: Target, size_hint: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger(target.device)
        self.operations: list[Operation] = []
        self.saved: list[SavedRecord] = []
        self.saves: list[SaveRecord] = []
        self.sequences: dict[int, tuple[int, int]] = {}
        self.node_records: dict[int, NodeRecord] = {}
        self.let_go: dict[int, int] = {}
        self.strangers = Strangers()
        self.draws: dict[SourceLocation | None, None] = {}
        self._estimate_workspace_bytes = target.estimate_workspace_bytes
        self._size_hint = size_hint
        self._kernels = target.kernels
        self._libraries = target.libraries
        self._keepers = target.keepers
        self._cache = OperatorCache()
        self._flops: dict[Key, int] = {}
        self._keeps: tuple[tuple[str, int], ...] = ()
        self._packing = False
        self._visible: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}
        self._phase = Phase.FORWARD
        self._node: int | None = None
        self._node_operators = self._node_storages = self._node_sequence = 0
        self._saved_storages: set[int] = set()
        self._sequence_starts: list[int] = []
        self._sequence_ends: list[tuple[int, int]] = []
        self._engine = inplace.EngineWatch()
        self._autograd: tuple[str, int] | None = None
        self._autograd_start = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper that TorchDispatchMode puts around __torch_dispatch__ otherwise imports
        # torch._dynamo, which takes longer than a whole analysis.
        return False

    # -- the step ------------------------------------------------------------------------------

    def label(self, value: Any, category: Category, name: str = "") -> None:
        """Says what the storages of the tensors in a value are for, unless it is known."""
        for tensor in iterate_memory(value):
            index = self.track(tensor)
            if index == NO_STORAGE:
                continue
            storage = self.ledger.storages[index]
            if storage.category is Category.TEMPORARY:
                storage.category, storage.name = category, name

    def begin_step(self) -> None:
        """Starts recording; whatever is alive now is resident."""
        self.ledger.begin()
        self.operations = [Operation(0, "step.begin", Phase.FORWARD)]

    def end_step(self) -> None:
        """Stops recording; what is freed from now on is no part of the step."""
        self.ledger.recording = False

    def set_phase(self, phase: Phase) -> None:
        """The part of the step that begins now."""
        self._phase, self._node = phase, None

    def enter_node(self, index: int) -> None:
        """See :class:`fxmem.tracing.tracer.NodeListener`."""
        self._node = index
        self.ledger.peak_bytes = self.ledger.live_now_bytes
        self._node_operators = len(self.operations)
        self._node_storages = len(self.ledger.storages)
        self._node_sequence = _get_sequence_nr()

    def exit_node(self, index: int, result: Any) -> int:
        """See :class:`fxmem.tracing.tracer.NodeListener`."""
        self._node = None
        sequence = _get_sequence_nr()
        if sequence > self._node_sequence:
            self._sequence_starts.append(self._node_sequence)
            self._sequence_ends.append((sequence, index))
        results = {self.track(tensor) for tensor in iterate_memory(result)}
        if self.ledger.recording:
            self._watch_results(result)
        self.node_records[index] = NodeRecord(
            output_bytes=sum(
                self.ledger.storages[i].nbytes for i in results if i >= self._node_storages
            ),
            transient_bytes=self.ledger.peak_bytes - self.ledger.live_now_bytes,
            results=tuple(sorted(results - {NO_STORAGE})),
        )
        return len(self.operations) - self._node_operators

    def find_storages(self, value: Any) -> tuple[int, ...]:
        """See :class:`fxmem.tracing.tracer.NodeListener`."""
        indices = (
            self.ledger.find(t) for t in map(self.strangers.find_fake, iterate_memory(value))
        )
        return tuple(dict.fromkeys(index for index in indices if index != NO_STORAGE))

    @property
    def held(self) -> set[int]:
        """The storages of tensors that nodes returned and that the user's code still holds."""
        return {index for index, _ in self._visible.values()}

    def _watch_results(self, result: Any) -> None:
        for tensor in iterate_tensors(result):
            if isinstance(tensor, torch.nn.Parameter) or is_sparse(tensor):
                continue
            index, key = self.track(tensor), id(tensor)
            if index != NO_STORAGE:
                see_end = functools.partial(self._see_let_go, key)
                self._visible[key] = index, weakref.ref(tensor, see_end)

    def _is_visible(self, tensor: torch.Tensor) -> bool:
        """Whether a node returned a tensor, or what it is a view of and so keeps."""
        if id(tensor) in self._visible:
            return True
        return tensor._is_view() and id(tensor._base) in self._visible

    def _see_let_go(self, key: int, _reference: weakref.ref[torch.Tensor]) -> None:
        index, _ = self._visible.pop(key)
        if self.ledger.recording:
            self.let_go[index] = self.ledger.operation

    @contextmanager
    def watch_saved(self) -> Iterator[None]:
        """Records what autograd saves for backward while active."""
        if not self.ledger.recording:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return self._pack_tensor(tensor)

    def _pack_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        for part in iterate_memory(tensor):
            index = self.track(part, RESIDENT)  # before the operator that reads it
            if index != NO_STORAGE:
                self._note_saved(index, part, tensor.grad_fn)
        node = tensor.grad_fn
        is_own = node is not None and node._sequence_nr() == _get_sequence_nr() - 1
        if not (is_own or self._is_visible(tensor)):
            return tensor
        # The saving operator's own output would hold its graph, and that graph it; and when the
        # user's code lets go of a tensor can be seen only where autograd holds another on its
        # storage. Source: ``SavedVariable::unpack`` gives what is unpacked its function back.
        self._packing = True
        try:
            return _detach(tensor)
        finally:
            self._packing = False

    def _note_saved(self, index: int, tensor: torch.Tensor, maker: Any) -> None:
        sequence = _get_sequence_nr() - 1  # a function gets its number before it saves
        if maker is not None and maker.name() == _CLONE and maker._sequence_nr() == sequence:
            sequence -= 1  # in place: it saves a copy of its argument, which has a number too
        self.saves.append(SaveRecord(index, self._node, len(self.operations), sequence))
        if index not in self._saved_storages:
            self._saved_storages.add(index)
            self.saved.append(
                SavedRecord(index, self._node, tuple(tensor.shape), dtype_name(tensor.dtype))
            )
        saved_by = self.ledger.storages[index].saved_by
        if self._node is not None and self._node not in saved_by:
            saved_by.append(self._node)

    # -- operators -----------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._packing:
            return self._cache.run(func, args, kwargs)
        if func is _prim_device:
            self._engine.see_device_query()
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        # The bookkeeping asks tensors for much that no torch-function mode has to hear of.
        with torch._C.DisableTorchFunction():
            read = list_tensors((args, kwargs))
            if func is _lift_fresh:  # torch.tensor(...) hands it the memory of its result
                read = []
            elif not all(isinstance(tensor, FakeTensor) for tensor in read):
                args, kwargs = self.strangers.replace((args, kwargs))
                read = list_tensors((args, kwargs))
            return self._watch(func, args, kwargs, read)

    def _watch(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], read: list[torch.Tensor]
    ) -> Any:
        """Runs an operator, which reads these tensors, and notes what it did."""
        autograd_node = None
        if self._phase is Phase.BACKWARD:
            autograd_node = torch._C._current_autograd_node()
            self._see_autograd_node(autograd_node)
            reused = self._engine.find_reused(func, args, sys._getframe(2), self._is_fresh)
        else:
            reused = None
        on_sparse = is_on_sparse(func, args, read)
        workspace_bytes = None
        if reused is None and on_sparse:
            read = [*iterate_memory(read)]  # before an operator in place gives it other memory
            workspace_bytes = estimate_sparse_workspace(func, args, kwargs)
            result = self._run_on_sparse(func, args, kwargs)
        elif reused is None:
            answer = answer_from_values(func, args, kwargs)
            if answer and comes_of_draw((args, kwargs)):
                self.draws[find_source()] = None
            answer = answer or answer_operator(func, args, kwargs, self._size_hint)
            result = answer[0] if answer else self._run(func, args, kwargs)
            if self._phase in (Phase.FORWARD, Phase.LOSS) or is_known_index(args):
                see_result(func, args, kwargs, result)
        else:
            result = reused
        self._keeps = tuple(self._keepers[func](args)) if func in self._keepers else ()
        for name, nbytes in self._keeps:
            in_backward = self._phase is Phase.BACKWARD
            self.ledger.keep(name, nbytes, self._node, in_backward=in_backward)
        made = [*iterate_memory(result)] if on_sparse else list_tensors((result,))
        if not self.ledger.recording:
            for tensor in (*read, *made):
                self.track(tensor)
            if self.ledger.is_warming_up:
                self.ledger.hold(self._estimate(func, args, kwargs, result))
            return result
        if workspace_bytes is None:
            workspace_bytes = self._estimate(func, args, kwargs, result)
        self._record(func, (args, kwargs, result), autograd_node, read, made, workspace_bytes)
        return result

    def _run_on_sparse(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.ledger.counts_all:
            raise TraceError(
                "sparse tensors are modelled on the CPU only", hint="--device cpu or device='cpu'"
            )
        try:
            return run_on_sparse(func, args, kwargs)
        except DataDependentOutputException:
            answer = answer_operator(func, args, kwargs, self._size_hint)
            if answer is None:
                raise
            return answer[0]

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_dtypes(func, args)
        kernel = self._kernels.get(func)
        result = kernel(*args, **kwargs) if kernel else NotImplemented
        if result is not NotImplemented:
            return result
        result = self._cache.run(func, args, kwargs)
        # What is changed in place has its device; the result that the mode returns is dropped.
        if not (self.ledger.counts_all or "device" in kwargs or func._schema.is_mutable):
            self._keep_on_device(args, result)
        return result

    def _keep_on_device(self, args: tuple[Any, ...], result: Any) -> None:
        """FakeTensorMode computes with known scalars on the host, and leaves the result there."""
        if isinstance(result, FakeTensor) and result.constant is not None:
            for tensor in list_tensors(args):
                if isinstance(tensor, FakeTensor) and self.ledger.is_counted(tensor):
                    result.fake_device = tensor.fake_device

    def _record(
        self,
        func: Any,
        call: tuple[Any, Any, Any],
        autograd: Any,
        read: Iterable[torch.Tensor],
        made: Iterable[torch.Tensor],
        workspace_bytes: int,
    ) -> None:
        """Notes an operator; the call is its arguments and its result."""
        index = len(self.operations)
        node = self._find_node(autograd) if autograd is not None else self._node
        if autograd is not None:
            sequence = autograd._sequence_nr()
            self.sequences[sequence] = self.sequences.get(sequence, (index, 0))[0], index
        reads = [self.track(tensor, RESIDENT) for tensor in read]
        # A sparse tensor that is written has other memory by now.
        written = (tensor for tensor in find_written(func, *call[:2]) if not is_sparse(tensor))
        writes = [self.track(tensor) for tensor in written]
        self.ledger.operation = index
        self.operations.append(
            Operation(
                index,
                operator_name(func),
                self._phase,
                node,
                autograd.name() if autograd is not None else "",
                tuple(dict.fromkeys(i for i in reads if i != NO_STORAGE)),
                workspace_bytes,
                self._count_flops(func, *call),
                # The engine runs backward without gradients: what asks for them computes again.
                recomputed=autograd is not None and torch.is_grad_enabled(),
                library_bytes=self._estimate_library_bytes(func, *call),
                writes=tuple(dict.fromkeys(i for i in writes if i != NO_STORAGE)),
                effect=find_effect(func, *call[:2]),
                keeps=tuple(name for name, nbytes in self._keeps if nbytes),
                overwritable=self._list_overwritable(*call),
            )
        )
        for tensor in made:
            self.track(tensor, index, node)
        self.ledger.hold(workspace_bytes)

    def _list_overwritable(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> tuple[int, ...]:
        if self._phase not in (Phase.FORWARD, Phase.LOSS):
            return ()
        indices = (self.track(tensor) for tensor in find_overwritable(args, kwargs, result))
        return tuple(dict.fromkeys(index for index in indices if index != NO_STORAGE))

    def _count_flops(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> int:
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

    def _estimate(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> int:
        """What the kernel holds inside itself, where it is the target's."""
        if not self.ledger.counts_all:
            tensors = iterate_tensors((args, kwargs, result))
            if not any(map(self.ledger.is_counted, tensors)):
                return 0
        return self._estimate_workspace_bytes(func, args, kwargs, result)

    def _estimate_library_bytes(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> int:
        estimate = self._libraries.get(func)
        if estimate is None or not self.ledger.is_counted(args[0]):
            return 0
        return estimate(args, kwargs, result)

    def _see_autograd_node(self, autograd: Any) -> None:
        running = (autograd.name(), autograd._sequence_nr()) if autograd is not None else None
        if running != self._autograd:
            self._autograd, self._autograd_start = running, len(self.ledger.storages)

    def _is_fresh(self, tensor: torch.Tensor) -> bool:
        return self.track(tensor) >= self._autograd_start

    def see_random_state(self, state: torch.Tensor) -> None:
        """A copy of the random number generator's state was made, without an operator."""
        if not self.ledger.is_counted(state):
            return
        if self.ledger.recording:
            index = len(self.operations)
            self.operations.append(Operation(index, "random.get_state", self._phase, self._node))
            self.ledger.operation = index
        storage = self.ledger.storages[self.track(state)]
        storage.category, storage.name = Category.WORKSPACE, "random number generator's state"

    def _find_node(self, autograd: Any) -> int | None:
        """The node whose backward is running, by the number autograd gave its forward.

        What has no number of its own (AccumulateGrad, a graph recomputed in backward) belongs
        to the node whose backward ran last.
        """
        sequence = autograd._sequence_nr()
        at = bisect_right(self._sequence_starts, sequence) - 1
        if at >= 0 and sequence < self._sequence_ends[at][0]:
            self._node = self._sequence_ends[at][1]
        return self._node

    def track(self, tensor: torch.Tensor, born: int | None = None, node: int | None = None) -> int:
        """See :meth:`fxmem.recording.ledger.Ledger.track`; of the node that runs if none is."""
        fake = self.strangers.find_fake(tensor)
        return self.ledger.track(fake, born, self._node if born is None else node)


@functools.cache
def operator_name(func: Any) -> str:
    """``aten.mm.default`` for the operator's overload."""
    return str(func)
