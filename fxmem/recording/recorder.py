"""Recorder of a step on fake tensors: every operator, every storage, its birth and its death.

A ``TorchDispatchMode`` sees each operator below autograd and so each new storage, a weak
reference to the storage sees its death, and ``saved_tensors_hooks`` see what autograd keeps.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from fxmem.fakes.containers import iterate_stored, iterate_tensors
from fxmem.fakes.fake_mode import LeanDispatchMode, find_inner, is_wrapper
from fxmem.graph import (
    EMPTY_CACHE,
    RESIDENT,
    Category,
    Operation,
    Phase,
    SourceLocation,
    measure_blocks,
)
from fxmem.kernels.cuda.gpu import current_state, find_stream
from fxmem.kernels.registry import Backend, OperatorCall, Workspace
from fxmem.parallelism.collectives import describe_collective, run_collective
from fxmem.parallelism.layout import Mesh
from fxmem.patching import patch
from fxmem.recording.autograd import AutogradLog, EngineWatch
from fxmem.recording.casts import CastLog
from fxmem.recording.constants import find_written, list_tensors
from fxmem.recording.handlers import (
    PASS,
    DispatchedCall,
    Handler,
    refuse_results,
    run_count,
    run_library,
    run_marker,
    run_own,
    run_sparse,
    run_wrapper,
    turn_devices,
)
from fxmem.recording.ledger import NO_STORAGE, Ledger, UserReferences
from fxmem.recording.operators import (
    FirstStepLog,
    OperatorRunner,
    RealTensorCache,
    find_effect,
    find_overwritable,
)
from fxmem.recording.size_hints import SizeHints
from fxmem.source import find_source
from fxmem.tracing.compiled import read_fqn
from fxmem.tracing.nodes import TracedNode
from fxmem.versions.operators import aten

prim_device = torch.ops.prim.device.default
_detach = aten.detach.default
_lift_fresh = aten.lift_fresh.default
_OWN_FRAMES = ("__torch_dispatch__", "record", "record_known", "run_on_fakes", "draw")
"""Functions between an operator of a script and :meth:`Recorder.record`."""
_UNNAMED = (Category.TEMPORARY, Category.COMMUNICATION)


@dataclass(slots=True)
class NodeRecord:
    """Measurements of a node while it ran, in bytes."""

    output_bytes: int = 0
    transient_bytes: int = 0
    results: tuple[int, ...] = ()
    remark: str = ""


class Recorder(LeanDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators and storages while it is active.

    Args:
        target: The device whose kernels run the step.
        hints: How many elements ``nonzero`` and the like find.
        mesh: The mesh of processes of which this is one.

    Attributes:
        is_packing: Whether fakes are made that are no part of the step.
        makes_graph: Whether the backward that runs makes a graph of its own (``create_graph=``).
        before_first: Is called before the next operator, with which a step begins.
        has_cycles: Whether code was compiled since cycles were freed.
        compiling: The function that is being compiled; empty for none.
        add_node: Makes a node of a module, a function and a line; None where no nodes are made.
        handlers: Are given each call in turn until one takes it; else the call is recorded.
    """

    def __init__(self, target: Backend, hints: SizeHints | None = None, mesh: Mesh = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger(target.device)
        self.operations: list[Operation] = []  # since begin_step
        self.node_records: dict[int, NodeRecord] = {}  # by index of the traced node
        self.target = target
        self.mesh = mesh
        self.notes: dict[str, None] = {}  # on what runs otherwise, a sentence each
        self.runner = OperatorRunner(target, self.ledger, hints or SizeHints())
        self.autograd = AutogradLog(self.ledger)
        self.real_tensors = RealTensorCache(self.ledger.hand_over)
        self.user_references = UserReferences(self.ledger)
        self.casts = CastLog(self.ledger, target.name)
        self.first_step = FirstStepLog()
        self.seeding: dict[SourceLocation | None, None] = {}  # lines of forward that seed
        self.makes_graph = False
        self.before_first: Callable[[], None] | None = None
        self.is_packing = self.has_cycles = False
        self.add_node: Callable[..., TracedNode | None] = lambda *_place: None
        self.compiling = ""
        self._place: int | None = None  # the node of compiled code that runs
        self._phase = Phase.FORWARD
        self._node_operators = self._node_storages = 0
        self.engine = EngineWatch()
        self._function: tuple[str, int] | None = None  # of autograd, that runs
        self._function_start = 0

    # -- the step ------------------------------------------------------------------------------

    def label(self, value: Any, category: Category, name: str = "") -> None:
        """Sets category and name of the storages of the tensors in a value, unless known."""
        for tensor in iterate_stored(value):
            index = self.track(tensor)
            found = self.ledger.storages[index] if index != NO_STORAGE else None
            storage = found or self.ledger.find_emptied(find_inner(tensor))
            if storage is not None and storage.category in _UNNAMED:
                storage.category, storage.name = category, read_fqn(name)

    def name_made(self, indices: Iterable[int], operator: str, name: str) -> None:
        """Names those storages that an operator of the step has made."""
        for storage in map(self.ledger.storages.__getitem__, indices):
            if storage.born != RESIDENT and self.operations[storage.born].name == operator:
                storage.name = storage.name or name

    def run_at(self, node: int | None) -> None:
        """Has what runs next belong to a node of compiled code; None for the end of such code."""
        self._place = node
        if node is not None:
            self.ledger.node = node

    def set_category(self, tensor: torch.Tensor, category: Category, name: str) -> None:
        """Sets category and name of a tensor's storage, whatever they were."""
        index = self.track(tensor)
        if index != NO_STORAGE:
            storage = self.ledger.storages[index]
            storage.category, storage.name = category, read_fqn(name)

    def begin_step(self) -> None:
        """Starts recording, or starts again with the next step; live storages are resident."""
        self.ledger.begin()
        self.node_records = {}
        self.autograd = AutogradLog(self.ledger)
        self.user_references = UserReferences(self.ledger)
        self.casts.forget()
        self.operations = [Operation(0, "step.begin", Phase.FORWARD)]

    def end_step(self) -> None:
        """Stops recording; later frees are no part of the step."""
        self.ledger.recording = False
        self.free_cycles()

    def free_cycles(self) -> None:
        """Frees tensors that a compiler left in cycles, if code was compiled since the last call.

        Python's collector does so while more is compiled, as backward is when it first runs.
        """
        if self.has_cycles:
            self.has_cycles = False
            gc.collect()

    def set_phase(self, phase: Phase) -> None:
        self._phase, self.ledger.node = phase, None

    def enter_node(self, index: int) -> None:
        """Begins a node (:class:`fxmem.tracing.tracer.NodeListener`)."""
        self.ledger.node = index
        self.ledger.peak_bytes = self.ledger.live_now_bytes
        self._node_operators = len(self.operations)
        self._node_storages = len(self.ledger.storages)
        current_state().remarks.clear()
        self.autograd.enter_node()
        self.casts.enter_node()

    def exit_node(self, index: int, result: Any) -> int:
        """Ends a node, and returns how many operators it ran."""
        self.ledger.node = None
        with torch._C.DisableTorchFunction():
            self.autograd.exit_node(index, iterate_tensors(result) if self.ledger.recording else ())
        results = {self.track(tensor) for tensor in iterate_stored(result)}
        self.casts.exit_node(results)
        for tensor in iterate_tensors(result) if self.ledger.recording else ():
            storage = self.track(tensor)
            if storage != NO_STORAGE and not isinstance(tensor, torch.nn.Parameter):
                self.user_references.watch(tensor, storage)
        self.node_records[index] = NodeRecord(
            output_bytes=sum(
                self.ledger.storages[i].nbytes for i in results if i >= self._node_storages
            ),
            transient_bytes=self.ledger.peak_bytes - self.ledger.live_now_bytes,
            results=tuple(sorted(results - {NO_STORAGE})),
            remark="; ".join(current_state().remarks),
        )
        return len(self.operations) - self._node_operators

    def find_storages(self, value: Any) -> tuple[int, ...]:
        """Finds the known storages of the tensors in a value, each once."""
        indices = (
            self.ledger.find(self.real_tensors.find_fake(tensor))
            for tensor in iterate_stored(value)
        )
        return tuple(dict.fromkeys(index for index in indices if index != NO_STORAGE))

    # -- operators -----------------------------------------------------------------------------

    handlers: ClassVar[tuple[Handler, ...]] = (
        run_own,
        run_marker,
        run_wrapper,
        run_sparse,
        run_count,
        run_library,
    )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is prim_device:  # by far the most frequent: C++ asks fakes where they lie
            self.engine.see_device_query()
            if isinstance(args[0], FakeTensor):
                return args[0].fake_device
            with contextlib.nullcontext() if any(map(is_wrapper, types)) else no_dispatch():
                return func(*args)
        args, kwargs = turn_devices(self.target, args, kwargs or {})
        call = DispatchedCall(func, types, args, kwargs, list_tensors((args, kwargs)))
        for handle in self.handlers:
            result = handle(self, call)
            if result is not PASS:
                return result
        return self.record(call)

    def record(self, call: DispatchedCall) -> Any:
        """Runs an operator on fakes, the last of the handlers, and records it."""
        func, _, args, kwargs, read = call
        # Torch-function modes need not see the recorder's own questions to tensors.
        with torch._C.DisableTorchFunction():
            if func is _lift_fresh:  # its argument is the memory of its result, torch.tensor(...)
                read = []
            elif not all(isinstance(tensor, FakeTensor) for tensor in read):
                find_fake = self.real_tensors.find_fake
                args, kwargs = tree_map_only(torch.Tensor, find_fake, (args, kwargs))
                read = list_tensors((args, kwargs))
            if self.before_first is not None:
                self.before_first()
            running = torch._C._current_autograd_node()
            result = self._run(func, args, kwargs, running)
            made = list_tensors((result,))
            if func.namespace == "c10d":
                name = func._schema.name.partition("::")[2].strip("_")
                self.label(read, Category.COMMUNICATION, name)
            refuse_results(made)
            self._count(func, OperatorCall(args, kwargs, result), read, made, running)
            return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], running: Any) -> Any:
        """Runs an operator, which a function of autograd runs or none."""
        in_backward = self._phase is Phase.BACKWARD
        if running is not None and not in_backward:  # forward runs a backward of its own
            node = self.autograd.find_node(running)
            self.autograd.early |= set() if node is None else {node}
        result = self._reuse_sum(func, args, running)
        if func.namespace == "c10d":
            result = run_collective(func, args)
        if result is not None:
            return result
        by_user = self._phase in (Phase.FORWARD, Phase.LOSS)
        if in_backward:  # the gradient to begin with, and functions that the user wrote
            by_user = running is None or isinstance(running, BackwardCFunction)
        return self.runner.run(func, args, kwargs, by_user=by_user)

    def _reuse_sum(self, func: Any, args: tuple[Any, ...], running: Any) -> Any:
        """Finds the gradient in whose memory the engine adds another one; None for no such sum."""
        if running is None and self._phase is not Phase.BACKWARD:
            return None
        function = None if running is None else (running.name(), running._sequence_nr())
        if function != self._function:
            self._function, self._function_start = function, len(self.ledger.storages)
        caller = sys._getframe(3)
        while caller.f_back is not None and caller.f_code.co_name in _OWN_FRAMES:
            caller = caller.f_back
        return self.engine.find_reused(
            func, args, caller, lambda x: self.track(x) >= self._function_start
        )

    def _count(
        self,
        func: Any,
        call: OperatorCall,
        read: list[torch.Tensor],
        made: list[torch.Tensor],
        running: Any,
    ) -> None:
        """Counts what an operator that has run took; in a step, it becomes an operation.

        The engine's thread for the GPU runs backward: torch/csrc/autograd/engine.cpp, ready_queue.
        """
        ledger, runner = self.ledger, self.runner
        workspace = runner.estimate_workspace(func, call)
        kept = runner.list_kept(func, call.args)
        if ledger.recording:
            autograd = running if self._phase is Phase.BACKWARD else None
            self._add_operator(func, call, read, workspace, kept, autograd)
        else:
            if ledger.is_warming_up:
                self.first_step.see(func, self._phase, len(ledger.history))
            for tensor in read:
                self.track(tensor)
            workspace = workspace if ledger.is_warming_up else 0
        by_engine = running is not None and torch._C._is_multithreading_enabled()
        count, inner = len(ledger.storages), list(map(self._find_counted, made))
        blocks = ledger.allocate(inner, workspace, kept, by_engine=by_engine)
        if not ledger.recording:
            return
        for tensor, counted in zip(made, inner, strict=True):
            self.casts.see(func, call.args, tensor, ledger.find(counted))
        if blocks:
            results = [storage.nbytes for storage in ledger.storages[count:]]
            nbytes = measure_blocks(blocks, results)
            operation = replace(self.operations[-1], workspace_bytes=nbytes, blocks=blocks)
            self.operations[-1] = operation

    def _add_operator(
        self,
        func: Any,
        call: OperatorCall,
        read: list[torch.Tensor],
        workspace: Workspace,
        kept: tuple[tuple[str, int], ...],
        autograd: Any,
    ) -> None:
        """Adds the operation of an operator, run by a function of autograd or by none."""
        index = len(self.operations)
        if autograd is not None:
            # A function without a number belongs to the node whose backward ran last.
            found = self.autograd.find_node(autograd) if self._place is None else self._place
            self.ledger.node = self.ledger.node if found is None else found
            self.autograd.see_operation(autograd, index, func, call.outputs)
        node, is_forward = self.ledger.node, self._phase in (Phase.FORWARD, Phase.LOSS)
        reads = self._list_storages(read, RESIDENT)
        writes = self._list_storages(find_written(func, call.args, call.kwargs))
        overwritable: Iterable[torch.Tensor] = ()
        if is_forward and func is not _lift_fresh:
            overwritable = find_overwritable(call.args, call.kwargs, call.outputs)
        self.ledger.operation = index
        sent_bytes, group = describe_collective(func, call.args, call.outputs, self.mesh)
        operation = Operation(
            index,
            describe_operator(func),
            self._phase,
            node,
            autograd.name() if autograd is not None else "",
            reads,
            workspace if isinstance(workspace, int) else 0,
            self.runner.count_flops(func, call),
            recomputed=self.may_recompute(autograd) and torch.is_grad_enabled(),
            library_bytes=self.runner.estimate_library_bytes(func, call),
            writes=writes,
            effect=find_effect(func, call.args, call.kwargs),
            keeps=tuple(name for name, nbytes in kept if nbytes),
            overwritable=self._list_storages(overwritable),
            stream=find_stream(),
            communication_bytes=sent_bytes,
            group=group,
        )
        self.operations.append(operation)

    def may_recompute(self, running: Any) -> bool:
        """Returns whether code with gradients that a function of autograd runs does forward again.

        The engine runs backward without gradients, unless it makes a graph of it.
        """
        return running is not None and self._phase is Phase.BACKWARD and not self.makes_graph

    def _list_storages(
        self, tensors: Iterable[torch.Tensor], born: int | None = None
    ) -> tuple[int, ...]:
        indices = [self.ledger.track(self._find_counted(each), born) for each in tensors]
        return tuple(dict.fromkeys(index for index in indices if index != NO_STORAGE))

    def make_unseen(self, make: Callable[[], Any]) -> Any:
        """Makes fake tensors that no operator of the step made."""
        packing, self.is_packing = self.is_packing, True
        try:
            with torch._C.DisableTorchFunction():
                return make()
        finally:
            self.is_packing = packing

    def see_random_state(self, state: torch.Tensor) -> None:
        """Records a copy of the random number generator's state, made without an operator."""
        if not self.ledger.is_counted(state):
            return
        self._add_operation("random.get_state")
        storage = self.ledger.storages[self.track(state)]
        storage.category, storage.name = Category.WORKSPACE, "random number generator's state"

    def see_seeding(self) -> None:
        """Notes a line outside of nodes that sets a random state: no graph repeats it."""
        if self.ledger.recording and self.ledger.node is None and self._phase is Phase.FORWARD:
            self.seeding[find_source()] = None

    def track(self, tensor: torch.Tensor, born: int | None = None) -> int:
        """Tracks a tensor in the ledger, by default as born in the running node."""
        return self.ledger.track(self._find_counted(tensor), born)

    def _find_counted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Finds the tensor whose storage the ledger counts for a tensor."""
        return find_inner(self.real_tensors.find_fake(find_inner(tensor)))

    def empty_cache(self) -> None:
        """Records that the program gives back what its allocator caches."""
        self._add_operation(EMPTY_CACHE)
        self.ledger.empty_cache()

    def see_kernel(self, name: str, read: Iterable[Any], written: Iterable[Any]) -> None:
        """Records a kernel of compiled code, which is no operator."""
        if self.ledger.recording:
            self._add_operation(name)
            reads, writes = map(self._list_storages, (read, written))
            self.operations[-1] = replace(self.operations[-1], reads=reads, writes=writes)

    def _add_operation(self, name: str) -> None:
        """Records what is no operator of PyTorch's dispatcher."""
        if self.ledger.recording:
            index = len(self.operations)
            self.operations.append(Operation(index, name, self._phase, self.ledger.node))
            self.ledger.operation = index

    def watch_resizing(self) -> AbstractContextManager[None]:
        """Records resized storages, while active, as operators."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            self._add_operation("storage.resize_")
            self.ledger.resize(storage)
            return result

        return patch({torch.UntypedStorage: {"resize_": resize_}})


@functools.cache
def describe_operator(func: Any) -> str:
    return str(func)
