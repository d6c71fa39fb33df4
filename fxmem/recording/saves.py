"""Hooks on the tensors that autograd saves while a step is recorded."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fxmem.fakes.containers import iterate_stored
from fxmem.fakes.devices import translate_inside_operator
from fxmem.fakes.values import keep_value
from fxmem.graph import RESIDENT
from fxmem.patching import count_left, patch
from fxmem.recording.autograd import is_own_output
from fxmem.recording.ledger import NO_STORAGE
from fxmem.recording.recorder import Recorder
from fxmem.versions.fallbacks import find_saving_hooks, tells_saving_hooks
from fxmem.versions.operators import aten

_saving: Any = torch._C._autograd


@contextmanager
def watch_saved(recorder: Recorder) -> Iterator[None]:
    """Records what autograd saves for backward while active."""
    disable = torch.autograd.graph.disable_saved_tensors_hooks

    @contextmanager
    def disable_hooks(message: str) -> Iterator[None]:
        """Lets transforms of ``torch.func`` run, which refuse hooks: they see no saves."""
        is_outermost = _saving._saved_tensors_hooks_is_enabled()
        if is_outermost:
            _saving._pop_saved_tensors_default_hooks()
        try:
            with disable(message):
                yield
        finally:
            if is_outermost:
                _saving._push_saved_tensors_default_hooks(
                    functools.partial(_pack, recorder, count_left()), _unpack
                )

    replaced = {
        torch.autograd.graph: {"disable_saved_tensors_hooks": disable_hooks},
        saved_tensors_hooks: {"__enter__": _replace_enter(saved_tensors_hooks.__enter__)},
    }
    with hook_saves(recorder), patch(replaced):
        yield


def _replace_enter(enter: Any) -> Any:
    """Lets hooks of the code, which an operator calls, run as the code beside them does.

    Those of ``torch.utils.checkpoint`` do without.
    """

    def enter_hooks(hooks: Any) -> None:
        given = hooks.pack_hook

        def pack(tensor: Tensor) -> Any:
            with translate_inside_operator():
                return given(tensor)

        if type(hooks).__module__ == torch.utils.checkpoint.__name__:
            enter(hooks)
            return
        hooks.pack_hook = pack
        try:
            enter(hooks)
        finally:
            hooks.pack_hook = given

    return enter_hooks


@contextmanager
def take_hooks_off() -> Iterator[None]:
    """Takes the recording's hooks off within: transforms that Dynamo traces refuse any.

    Where PyTorch does not tell whose hooks are on, they stay, and nothing refuses them.
    """
    if not tells_saving_hooks():
        with patch({_saving: {"_saved_tensors_hooks_disable": lambda _message: None}}):
            yield
        return
    own = []
    while (hooks := find_saving_hooks()) and hooks[1] is _unpack:
        own.append(hooks)
        _saving._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(own):
            _saving._push_saved_tensors_default_hooks(*hooks)


def hook_saves(recorder: Recorder) -> Any:
    """Makes a context in which what autograd saves is recorded, for this thread."""
    pack: Any = functools.partial(_pack, recorder, count_left())
    # Selective checkpoints warn of hooks of the user's (from 2.14 on), which these are not.
    pack._checkpoint_internal, pack._user_hooks = True, None
    return saved_tensors_hooks(pack, _unpack)


def _pack(recorder: Recorder, left: int, tensor: Tensor) -> Tensor:
    """Records a tensor that autograd saves, and returns the tensor that it is to keep."""
    if count_left() > left:  # of an analysis within the recorded code
        return tensor.detach() if is_own_output(tensor.grad_fn) else tensor
    with torch._C.DisableTorchFunction():
        maker, node = tensor.grad_fn, recorder.ledger.node
        is_recomputed = recorder.may_recompute(torch._C._current_autograd_node())
        for part in iterate_stored(tensor):
            index = recorder.track(part, RESIDENT)  # before the operator that reads it
            if index == NO_STORAGE or is_recomputed:
                continue
            storage = recorder.ledger.storages[index]
            saver = storage.node if node is None else node  # compiled code saves after its nodes
            recorder.autograd.add_save(index, part, maker, saver, len(recorder.operations))
            if saver is not None and saver not in storage.saved_by:
                storage.saved_by.append(saver)
        if not (is_own_output(maker) or recorder.user_references.includes(tensor)):
            return tensor
        # The saving operator's own output would hold its graph, and the graph the output; and the
        # user's release of a tensor is seen only where autograd holds another tensor on the
        # storage. ``SavedVariable::unpack`` gives an unpacked tensor its function back.
        recorder.is_packing = True
        try:
            detached: Tensor = aten.detach.default(tensor)
            keep_value(tensor, detached)
            return detached
        finally:
            recorder.is_packing = False


def _unpack(tensor: Tensor) -> Tensor:
    return tensor
