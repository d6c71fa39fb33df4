"""Recorder of a script, in which fake tensors and real ones live side by side.

An operator on fake tensors is recorded and computes nothing; one on real tensors runs as ever: data
sets, loaders and metrics stay real. Tensors become fake where the script puts them on the GPU; on
the CPU as the target, where it makes them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from fxmem.graph import Category, Effect
from fxmem.kernels.registry import Backend
from fxmem.parallelism.foreach import run_on_locals
from fxmem.recording.constants import is_index, list_tensors
from fxmem.recording.ledger import KEPT, NO_STORAGE, is_own
from fxmem.recording.operators import find_effect
from fxmem.recording.recorder import Recorder, prim_device, refuse_sparse
from fxmem.recording.size_hints import SizeHints
from fxmem.scripts.reads import ReadLog
from fxmem.tracing.fakes import is_wrapper
from fxmem.tracing.values import find_known, remember_constant
from fxmem.versions.operators import aten

_to_copy = aten._to_copy.default
_copy = aten.copy_.default
_scalar = aten._local_scalar_dense.default
_HOST = torch.device("cpu")
LOAD = "host.load"
"""Name of the operation in which real tensors begin to count."""
_WHOLE = frozenset({"aten::randint", "aten::randint.low", "aten::randperm"})
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class ScriptRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Records the operators on fake tensors while it is active, above the mode of the fakes.

    Attributes:
        reads: The lines that read values.
        makes_fakes: Tensors that are made of nothing are fake, whatever their device.
        in_model: A module runs: its routing of tokens to experts is assumed, and no read.
    """

    def __init__(self, target: Backend, hints: SizeHints) -> None:
        super().__init__(target, hints)
        self.reads = ReadLog()
        self.makes_fakes = self.ledger.counts_own = target.device == _HOST
        self.in_model = False
        self._device = target.device

    def begin_step(self) -> None:
        super().begin_step()
        self.reads.begin_step(self.operations)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is prim_device and type(args[0]) is FakeTensor:  # two of three calls
            return super().__torch_dispatch__(func, types, args, kwargs)
        args, kwargs = self.turn_devices(args, kwargs or {})
        if any(map(is_wrapper, types)):
            with self:
                return run_on_locals(func, args, kwargs)
        tensors = list_tensors((args, kwargs))
        has_fakes = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not has_fakes and not self._makes_fake(func, tensors, kwargs):
            with no_dispatch():
                return self.hold(func(*args, **kwargs))
        with self.ledger.lock:
            return self._run_on_fakes(func, types, args, kwargs, tensors)

    def _run_on_fakes(
        self, func: Any, types: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        has_fakes = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if func is _to_copy and not has_fakes:
            return self._move(args[0], kwargs)
        if func is _copy and not isinstance(args[0], FakeTensor):
            self.reads.note("left as it was")
            return args[0]
        if func is _to_copy and kwargs.get("device") == _HOST != self._device:
            real = self.reads.copy_to_host(args[0])
            if real is not None:
                with no_dispatch():
                    return real.to(kwargs.get("dtype") or real.dtype)
        if func is _scalar and not self.in_model:
            value = find_known(args[0])
            if value is not None and value.assumed:
                return self.reads.answer_scalar(args[0])
        self.runner.is_routed = self.in_model
        if find_effect(func, args, kwargs) in (Effect.RANDOM, Effect.GENERATOR):
            return self._draw(func, types, args, kwargs)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            if func in (aten.equal.default, aten.allclose.default):
                return self.reads.answer_truth(sys._getframe(1))
            if func is not _scalar:
                raise
            return self.reads.answer_scalar(args[0])
        except DynamicOutputShapeException:
            # As many as there may be: the most memory.
            self.reads.note("as many as there are elements")
            masks = [t for t in tensors if t.dtype in (torch.bool, torch.uint8)] or tensors
            hints = self.runner.hints
            most = max(mask.numel() for mask in masks)
            if func is aten.bincount.default and args[2:] > (0,):
                most = 0  # classes are counted, of which there are as many as was said
            self.runner.hints = replace(hints, default=most)
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self.runner.hints = hints

    def _makes_fake(self, func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
        """Tells whether an operator of no fake tensor makes one, as factories and moves do."""
        if not self.makes_fakes:
            return bool(kwargs.get("device") == self._device)
        # Whole numbers stay real: scripts index their data with them.
        if func is aten.lift_fresh.default:
            return bool(tensors[0].is_floating_point()) and is_own(tensors[0].untyped_storage())
        is_whole = func.name() in _WHOLE or kwargs.get("dtype") in _INTEGERS
        is_factory = not tensors and any(each.name == "device" for each in func._schema.arguments)
        return is_factory and not is_whole

    def _draw(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a random operator, which draws from the host's generator what a real one draws.

        On a GPU that is nothing. Other draws, such as the order of the data, are then a real run's.
        """
        generator = kwargs.get("generator") or torch.default_generator
        with torch._C.DisableTorchFunction(), no_dispatch():
            state = generator.get_state()
        result = super().__torch_dispatch__(func, types, args, kwargs)
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
        for tensor in tree_leaves(value) if self.makes_fakes else ():
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
            self.track(fake)
            return fake

    def _move(self, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Copies a real tensor to the GPU: a fake there, with the value of a small one."""
        refuse_sparse([tensor])
        dtype = kwargs.get("dtype") or tensor.dtype
        with no_dispatch():
            strides = torch.empty_like(tensor, device="meta").stride()
        options = {"dtype": dtype, "device": self._device}
        made: Tensor = super().__torch_dispatch__(
            aten.empty_strided.default, (), (tuple(tensor.shape), strides), options
        )
        if tensor.numel() == 1 or is_index(tensor):
            with no_dispatch():
                value = tensor.to(dtype)
            remember_constant(made, value)
        return made

    def label_input(self, tensor: Tensor, name: str = "") -> None:
        """Labels a storage as an input, unless it is known as something else."""
        index = self.track(tensor)
        if index == NO_STORAGE:
            return
        storage = self.ledger.storages[index]
        is_unnamed = storage.category is Category.INPUT and not storage.name
        if is_unnamed or storage.category is Category.TEMPORARY or storage.name == KEPT:
            storage.category, storage.name = Category.INPUT, name


def _make_real(fake: Tensor) -> Tensor:
    made = torch.empty_strided(tuple(fake.shape), fake.stride(), dtype=fake.dtype)
    return made.fill_(1)
