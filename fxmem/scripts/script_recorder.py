"""Recorder of a script, in which fake tensors and real ones live side by side.

An operator on fake tensors is recorded and computes nothing; one on real tensors runs as ever: data
sets, loaders and metrics stay real. Tensors become fake where the script puts them on the GPU; on
the CPU as the target, where it makes them.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.fake_impl import FakeImplCtx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from fxmem.fakes.containers import iterate_stored
from fxmem.fakes.fake_mode import find_inner
from fxmem.fakes.values import (
    STAND_IN,
    find_known,
    find_partly_known,
    remember_constant,
)
from fxmem.graph import RESIDENT, Category, Effect, Phase
from fxmem.kernels.registry import Backend
from fxmem.patching import patch
from fxmem.recording.bounds import bound_whole
from fxmem.recording.constants import fill_value, is_index, list_tensors
from fxmem.recording.counts import PUT, find_most, see_mask
from fxmem.recording.handlers import (
    PASS,
    DispatchedCall,
    run_library,
    run_marker,
    run_own,
    run_sparse,
    run_wrapper,
)
from fxmem.recording.ledger import KEPT, NO_STORAGE, is_own
from fxmem.recording.operators import find_effect
from fxmem.recording.recorder import Recorder
from fxmem.recording.size_hints import SizeHints
from fxmem.scripts.reads import Origin, ReadLog
from fxmem.scripts.script_run import ALL_ELEMENTS
from fxmem.versions.operators import aten

_to_copy = aten._to_copy.default
_empty_strided = aten.empty_strided.default
_copy = aten.copy_.default
_scalar = aten._local_scalar_dense.default
_HOST = torch.device("cpu")
LOAD = "host.load"
"""Name of the operation in which real tensors begin to count."""
_WHOLE = frozenset({"aten::randint", "aten::randint.low", "aten::randperm"})
_LONGEST_ROW = 4096
"""Numbers of a schedule, such as times or the noise of diffusion's steps, at which code looks."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_SOFTMAXES = (aten._softmax.default, aten._log_softmax.default)
_MOST_TRACED = 64
"""Operators before a copy to the host among which a softmax is looked for."""
_NOT_FINITE = (aten.isnan.default, aten.isinf.default)
_EQUALITIES = {
    aten.eq.Tensor: True,
    aten.ne.Tensor: False,
    aten.eq.Scalar: True,
    aten.ne.Scalar: False,
}


class ScriptRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Records the operators on fake tensors while it is active, above the mode of the fakes.

    Attributes:
        reads: The lines that read values.
        makes_fakes: Tensors that are made of nothing are fake, whatever their device.
        in_model: A module runs: its routing of tokens to experts is assumed, and no read.
        see_move: Is called with real tensors that are copied to the GPU.
    """

    def __init__(self, target: Backend, hints: SizeHints) -> None:
        super().__init__(target, hints)
        self.reads = ReadLog(self._trace_back)
        self.makes_fakes = self.ledger.counts_own = target.device == _HOST
        self.in_model = False
        self._softmaxes: dict[int, int] = {}  # by storage, the dimension from the last one
        self.see_move: Callable[[Tensor], None] = lambda _tensor: None
        self._device = target.device

    def begin_step(self) -> None:
        super().begin_step()
        self._softmaxes.clear()
        self.reads.begin_step(self.operations)

    def run_real(self, call: DispatchedCall) -> Any:
        """Runs an operator on real tensors that makes no fake one."""
        if _has_fakes(call) or self._makes_fake(call):
            return PASS
        with no_dispatch():
            return self.hold(call.func(*call.args, **call.kwargs))

    def run_on_fakes(self, call: DispatchedCall) -> Any:
        """Runs an operator that reads or makes fake tensors, one thread at a time."""
        with self.ledger.lock:
            self.runner.is_routed = self.in_model
            for handle in (self.move, self.copy_to_host, self.answer_assumed, self.draw):
                result = handle(call)
                if result is not PASS:
                    return result
            return self.record_known(call)

    def move(self, call: DispatchedCall) -> Any:
        """Copies a real tensor to the GPU; a copy into a real tensor leaves that as it was."""
        if call.func is _to_copy and not _has_fakes(call):
            return self._move(call.args[0], call.kwargs)
        if call.func is _copy and not isinstance(call.args[0], FakeTensor):
            self.reads.note("left as it was")
            return call.args[0]
        return PASS

    def copy_to_host(self, call: DispatchedCall) -> Any:
        """Makes a real copy of a value that is known, or stands in for one."""
        if call.func is not _to_copy or not call.kwargs.get("device") == _HOST != self._device:
            return PASS
        real = self.reads.copy_to_host(call.args[0])
        if real is None:
            return PASS
        with no_dispatch():
            return real.to(call.kwargs.get("dtype") or real.dtype)

    def answer_assumed(self, call: DispatchedCall) -> Any:
        """Answers a script that reads a value that was assumed."""
        value = find_known(call.args[0]) if call.func is _scalar else None
        if value is None or not value.assumed:
            return PASS
        is_read = value.assumed == STAND_IN or not self.in_model
        return self.reads.answer_scalar(call.args[0]) if is_read else PASS

    def _trace_back(self, tensor: Tensor) -> Iterator[Origin]:
        """Yields the operators of this step that a tensor was computed by, the last one first."""
        coming, seen = deque([self.ledger.find(find_inner(tensor))]), set[int]()
        while coming and len(seen) < _MOST_TRACED:
            index = coming.popleft()
            storage = self.ledger.storages[index] if index != NO_STORAGE else None
            if storage is None or storage.born == RESIDENT or index in seen:
                continue
            seen.add(index)
            operation = self.operations[storage.born]
            yield operation.name, storage.shape, self._softmaxes.get(index)
            coming.extend(operation.reads)

    def _stand_in(self, call: DispatchedCall, result: Any) -> None:
        """Lets a whole number that is not known be 1, as where it is read.

        What is computed of it then agrees with it: the end of a slice lies behind its start. Of
        floating numbers is known that they are finite, and not all of them zeros.
        """
        answer = _find_usual(call.func, call.args)
        for made in list_tensors((result,)):
            is_number = type(made) is FakeTensor and made.numel() == 1
            is_whole = made.dim() == 0 and made.dtype in _INTEGERS
            if is_number and (is_whole or answer is not None) and find_partly_known(made) is None:
                fill_value(made, 1 if is_whole else answer, 1, assumed=STAND_IN)

    def record_known(self, call: DispatchedCall) -> Any:
        """Records an operator, with an answer where values decide over its result."""
        before = find_most(call.args[0]) if call.func is PUT else 0
        try:
            result = self.record(call)
            self._stand_in(call, result)
            see_mask(call.func, call.args, result, before)
            if call.func in _SOFTMAXES and result.dim():
                dim = call.args[1] % result.dim() - result.dim()
                self._softmaxes[self.ledger.find(find_inner(result))] = dim
            return result
        except DataDependentOutputException:
            if call.func in (aten.equal.default, aten.allclose.default):
                return self.reads.answer_truth(sys._getframe(1))
            if call.func is not _scalar:
                raise
            return self.reads.answer_scalar(call.args[0])
        except DynamicOutputShapeException:
            # As many as there may be: the most memory.
            self.reads.note(ALL_ELEMENTS)
            tensors = call.tensors
            masks = [t for t in tensors if t.dtype in (torch.bool, torch.uint8)] or tensors
            hints = self.runner.hints
            is_own = call.func.namespace == "aten"  # others find rows: boxes that do not overlap
            most = max(
                (find_most(mask) if is_own else len(mask) for mask in masks if mask.dim()),
                default=1,
            )
            given = (hints.find_own(), hints.default)
            most = next((size for size in given if size is not None), most)
            if call.func is aten.bincount.default and call.args[2:] > (0,):
                most = 0  # classes are counted, of which there are as many as was said
            self.runner.hints = replace(hints, default=most)
            size: Any = lambda *_, **__: most  # noqa: E731 - of an operator's own fake
            try:
                with patch({FakeImplCtx: {"new_dynamic_size": size}}):
                    result = self.record(call)
                if call.func is aten.nonzero.default:
                    shape = call.args[0].shape
                    bound_whole(result, [0] * len(shape), [size - 1 for size in shape])
                return result
            finally:
                self.runner.hints = hints

    def name_kept(self, held: Iterable[tuple[str, Tensor]]) -> None:
        """Names the tensors of steps before that nothing names, of those that are held by name."""
        if not any(storage.name == KEPT for storage in self.ledger.storages):
            return
        for name, tensor in held:
            category = Category.PARAMETER if isinstance(tensor, nn.Parameter) else Category.BUFFER
            for part in iterate_stored(tensor):
                index = self.ledger.find(find_inner(part))
                if index != NO_STORAGE and self.ledger.storages[index].name == KEPT:
                    self.set_category(part, category, name)

    def _makes_fake(self, call: DispatchedCall) -> bool:
        """Returns whether an operator of no fake tensor makes one, as factories and moves do."""
        func, _, args, kwargs, tensors = call
        if not self.makes_fakes:
            return bool(kwargs.get("device") == self._device)
        # Whole numbers stay real: scripts index their data with them. An optimizer does not, and
        # torchao's, which compiles its step, holds states in bytes.
        if func is aten.lift_fresh.default:
            return bool(tensors[0].is_floating_point()) and is_own(tensors[0].untyped_storage())
        dtype = kwargs.get("dtype")
        is_state = dtype is torch.uint8 and self._phase is Phase.OPTIMIZER
        is_range = func.overloadpacket is aten.arange and dtype is None
        is_whole = (
            func.name() in _WHOLE
            or (dtype in _INTEGERS and not is_state)
            or (is_range and all(isinstance(each, int) for each in args))
        )
        is_factory = not tensors and any(each.name == "device" for each in func._schema.arguments)
        return is_factory and not is_whole

    def draw(self, call: DispatchedCall) -> Any:
        """Runs a random operator, which draws from the host's generator what a real one draws.

        On a GPU that is nothing. Other draws, such as the order of the data, are then a real run's.
        """
        func, _, args, kwargs, _ = call
        if find_effect(func, args, kwargs) not in (Effect.RANDOM, Effect.GENERATOR):
            return PASS
        generator = kwargs.get("generator") or torch.default_generator
        with torch._C.DisableTorchFunction(), no_dispatch():
            state = generator.get_state()
        result = self.record(call)
        made = list_tensors((result,))[0]
        with torch._C.DisableTorchFunction(), no_dispatch():
            generator.set_state(state)  # what is computed from known values may have drawn
            if not self.makes_fakes or made.device != _HOST or "attention" in func.name():
                return result  # attention draws nothing on the host
            real = func(*tree_map_only(FakeTensor, _make_real, args), **kwargs)
        if made.numel() == 1 and not list_tensors(args):
            remember_constant(made, real)
        return result

    def hold(self, value: Any, *, is_loaded: bool = False) -> Any:
        """Counts real tensors where the host's memory is the target's; returns the value.

        Not those of NumPy, which torch's allocator knows nothing of.
        """
        for tensor in iterate_stored(value) if self.makes_fakes else ():
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                is_known = self.ledger.find(tensor) != NO_STORAGE
                if (is_loaded or is_own(storage)) and not self.real_tensors.has_fake(storage):
                    if not is_known:  # what was freed before is not alive with it
                        self._add_operation(LOAD)
                    self.ledger.track(tensor)
        return value

    def adopt(self, value: Any) -> Any:
        """Makes a fake of a real tensor that becomes a parameter, such as one from a file."""
        is_active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        with torch._C.DisableTorchFunction():
            if not is_active or type(value) not in (Tensor, nn.Parameter) or value.is_meta:
                return value
            self.hold(value, is_loaded=True)
            fake = self.real_tensors.find_fake(value)
            self.ledger.count_other(fake.untyped_storage())  # an operator may have run on it
            self.track(fake)
            return fake

    def _move(self, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Copies a real tensor to the GPU: a fake there, with the value of a small one."""
        self.see_move(tensor)
        dtype = kwargs.get("dtype") or tensor.dtype
        with no_dispatch():
            strides = torch.empty_like(tensor, device="meta").stride()
        options = {"dtype": dtype, "device": self._device}
        call = DispatchedCall(_empty_strided, (), (tuple(tensor.shape), strides), options, [])
        made: Tensor = self.record(call)
        is_row = tensor.dim() == 1 and not isinstance(tensor, nn.Parameter)
        if tensor.numel() == 1 or is_index(tensor) or (is_row and tensor.numel() <= _LONGEST_ROW):
            with no_dispatch():
                value = tensor.to(dtype)
            remember_constant(made, value)
        return made

    def label_input(self, tensor: Tensor, name: str = "") -> None:
        """Labels a tensor's storages as an input, unless they are known as something else."""
        for index in map(self.track, iterate_stored(tensor)):
            if index == NO_STORAGE:
                continue
            storage = self.ledger.storages[index]
            is_unnamed = storage.category is Category.INPUT and not storage.name
            if is_unnamed or storage.category is Category.TEMPORARY or storage.name == KEPT:
                storage.category, storage.name = Category.INPUT, name


ScriptRecorder.handlers = (
    run_wrapper,
    ScriptRecorder.run_real,
    run_own,
    run_marker,
    run_sparse,
    run_library,
    ScriptRecorder.run_on_fakes,
)


def _find_usual(func: Any, args: tuple[Any, ...]) -> bool | None:
    """Finds what a test of unknown floating numbers says, if these are as usual; None for others.

    ``torch.isfinite`` compares numbers with themselves and with infinity.
    """
    if not (args and isinstance(args[0], Tensor) and args[0].is_floating_point()):
        return None
    if func is aten.any.default:
        return True
    if func in _NOT_FINITE:
        return False
    if func not in _EQUALITIES:
        return None
    if args[1] is args[0]:
        return _EQUALITIES[func]
    is_infinite = isinstance(args[1], float) and math.isinf(args[1])
    return not _EQUALITIES[func] if is_infinite else None


def _has_fakes(call: DispatchedCall) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in call.tensors)


def _make_real(fake: Tensor) -> Tensor:
    made = torch.empty_strided(tuple(fake.shape), fake.stride(), dtype=fake.dtype)
    return made.fill_(1)
