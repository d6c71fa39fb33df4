"""Files, data sets and loaders of a script, which stay real beside its fake tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fxmem.fakes.fake_mode import holds_fakes
from fxmem.fakes.files import HEAD, FakeFiles, read_shapes
from fxmem.fakes.pickling import dump_fakes, reduce_fake, restore_by
from fxmem.parallelism.process_group import run_outside_modes
from fxmem.patching import patch
from fxmem.scripts.apart import Apart
from fxmem.scripts.batches import FullestBatches
from fxmem.scripts.reads import find_lines
from fxmem.scripts.script_recorder import ScriptRecorder
from fxmem.scripts.windows import Windows
from fxmem.tracing.compiled import patch_when_imported

_READERS = ("safetensors", "safetensors.torch", "transformers.modeling_utils")
"""Modules with the function that opens a file of safetensors by its name."""


@dataclass(frozen=True)
class _Unwritten:
    """Fake tensors on their way to a file."""

    tensors: Any


class RealData:
    """Replaces the functions that read and write what a script trains on.

    Args:
        recorder: Records the operators, and notes what was not written.
        windows: Are told that an epoch is over.
        batches: Chooses the batches of the steps; None for the loader's own.
        apart: Is told of saving.
    """

    def __init__(
        self,
        recorder: ScriptRecorder,
        windows: Windows,
        batches: FullestBatches | None,
        apart: Apart,
    ) -> None:
        self._recorder = recorder
        self._windows = windows
        self._batches = batches
        self._apart = apart
        self._files = FakeFiles()

    def list_replacements(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Lists owners, names, and functions that make a replacement of the function there."""
        replacements: list[tuple[Any, str, Callable[..., Any]]] = [
            (torch, "save", self._save),
            (torch, "load", self._load),
            (DataLoader, "__init__", self._see_loader),
            (torch.UntypedStorage, "data_ptr", _find_storage_address),
            (torch.Tensor, "data_ptr", _find_address),
            (FakeTensor, "__reduce_ex__", _reduce),
        ]
        if self._recorder.makes_fakes or self._windows.until == "epoch":
            replacements.append((_BaseDataLoaderIter, "__next__", self._load_batch))
        if self._recorder.makes_fakes or self._batches is not None:
            replacements.append((DataLoader, "__iter__", self._iterate))
        return replacements

    def _iterate(self, iterate: Callable[..., Any]) -> Callable[..., Any]:
        run = _run_real(iterate) if self._recorder.makes_fakes else iterate
        return run if self._batches is None else self._batches.replace_iteration(run)

    @contextlib.contextmanager
    def watch_writers(self) -> Iterator[None]:
        """Keeps fake tensors out of files of safetensors and of distributed checkpoints, within."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._files.watch())
            stack.enter_context(self._restore_in())
            for name, make_patch in (
                ("torch.distributed.checkpoint", self._replace_savers),
                ("safetensors.torch", self._replace_writers),
                *((name, self._replace_reader) for name in _READERS),
            ):
                stack.enter_context(patch_when_imported(name, make_patch))
            yield

    def _replace_savers(self, module: ModuleType) -> contextlib.AbstractContextManager[None]:
        """Replaces what would gather the plans of ranks that are not there."""
        done: Future[None] = Future()
        done.set_result(None)
        results = {"save": None, "async_save": done}
        replaced = {
            name: self._save(getattr(module, name), f"{module.__name__}.{name}", result)
            for name, result in results.items()
        }
        replaced["load"] = self._leave(module.load, f"{module.__name__}.load")
        return patch({module: replaced})

    def _leave(self, load: Callable[..., Any], name: str) -> Callable[..., Any]:
        def load_into(state: Any, *args: Any, **kwargs: Any) -> Any:
            if not holds_fakes(state):
                return load(state, *args, **kwargs)
            self._note(name, "read nothing")
            return None

        return load_into

    def _replace_writers(self, module: ModuleType) -> contextlib.AbstractContextManager[None]:
        """Replaces the functions that are given the tensors, and those that write their bytes."""
        package: Any = module
        flatten = next(name for name in ("_flatten_as_ptr", "_flatten") if hasattr(module, name))
        types = {dtype: name for name, dtype in package._TYPES.items()}
        replaced = {flatten: _flatten_real(getattr(module, flatten))}
        for name in ("serialize", "serialize_file"):
            replaced[name] = self._keep_flat(getattr(module, name), types)
        return patch({module: replaced})

    def _keep_flat(
        self, write: Callable[..., Any], types: Mapping[torch.dtype, str]
    ) -> Callable[..., Any]:
        def write_or_keep(flat: Any, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            if not isinstance(flat, _Unwritten):
                return write(flat, *args, metadata=metadata, **kwargs)
            self._apart.see_saving()
            self._note("safetensors")
            head, nbytes = _make_head(flat.tensors, types, metadata)
            path = args[0] if args else kwargs.get("filename")
            if path is None:
                return head + bytes(nbytes)
            self._files.write(path, head, nbytes)
            return None

        return write_or_keep

    def _replace_reader(self, module: ModuleType) -> contextlib.AbstractContextManager[None]:
        if not hasattr(module, "safe_open"):
            return contextlib.nullcontext()
        open_file: Any = module.safe_open

        def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
            return open_file(self._files.find(filename) or filename, *args, **kwargs)

        return patch({module: {"safe_open": safe_open}})

    def _see_loader(self, init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)  # Lightning reads the names of the arguments to make it again
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            init(loader, *args, **kwargs)
            loader.pin_memory = False  # which makes a copy faster that is not made

        return __init__

    def _load_batch(self, load: Callable[..., Any]) -> Callable[..., Any]:
        # No loader makes fakes, with its samplers.
        run, batches = _run_real(load) if self._recorder.makes_fakes else load, self._batches

        def load_batch(iterator: Any) -> Any:
            try:
                batch = run(iterator)
            except StopIteration:
                if torch.is_grad_enabled():
                    self._windows.end_epoch()
                raise
            is_reading = batches is not None and batches.is_reading
            return batch if is_reading else self._recorder.hold(batch)

        return load_batch

    def _save(
        self, save: Callable[..., Any], name: str = "torch.save", result: Any = None
    ) -> Callable[..., Any]:
        def save_real(saved: Any, *args: Any, **kwargs: Any) -> Any:
            file = args[0] if args else kwargs.get("f")
            if not holds_fakes(saved):
                self._files.forget(file)
                return save(saved, *args, **kwargs)
            self._apart.see_saving()
            self._note(name)
            self._keep(saved, file)
            return result

        return save_real

    def _keep(self, saved: Any, file: Any) -> None:
        """Keeps what was saved, as shapes, for code that loads or moves the file."""
        try:
            data = HEAD + dump_fakes(saved)
        except Exception:  # of the objects' own classes; a script that only saves goes on
            return
        if hasattr(file, "write"):
            file.write(data)
        elif isinstance(file, str | os.PathLike):
            self._files.write(file, data)

    def _restore_in(self, map_location: Any = None) -> contextlib.AbstractContextManager[None]:
        """Restores shapes where they were, or where ``map_location`` says."""

        def make_storage(length: int, dtype: torch.dtype, is_on_host: bool) -> torch.Tensor:
            place = _find_device(map_location, "cpu" if is_on_host else "cuda:0")
            if self._recorder.makes_fakes or place != "cpu":
                return torch.empty(length, dtype=dtype, device=place)
            shape = torch.empty(length, dtype=dtype, device="meta")
            mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
            return FakeTensor(mode, shape, torch.device("cpu"))

        return restore_by(make_storage)

    def _note(self, function: str, what: str = "wrote nothing") -> None:
        lines = find_lines(sys._getframe(1))
        at = f" at {lines[0]}" if lines else ""
        note = f"{function}{at} {what}: its tensors have no values."
        self._recorder.notes[note] = None

    def _load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_to_gpu(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            if (data := _find_shapes(file)) is not None:
                with self._restore_in(map_location):
                    return self._recorder.hold(pickle.loads(data), is_loaded=True)
            on_gpu: dict[int, Any] = {}  # storages, which live on in what was loaded

            def see_place(storage: Any, place: str) -> Any:
                if _find_device(map_location, place).startswith("cuda"):
                    on_gpu[storage._cdata] = None
                return storage

            with run_outside_modes():
                loaded = load(file, see_place, *args, **kwargs)
            if not on_gpu:
                return self._recorder.hold(loaded, is_loaded=not kwargs.get("mmap"))
            return tree_map_only(torch.Tensor, functools.partial(_move, on_gpu), loaded)

        return load_to_gpu


def _find_shapes(file: Any) -> bytes | None:
    """Reads the shapes that were saved to a path or an open file; None for values."""
    if not hasattr(file, "read"):
        return read_shapes(file)
    at = file.tell()
    if file.read(len(HEAD)) == HEAD:
        return file.read()  # type: ignore[no-any-return]
    file.seek(at)
    return None


def _make_head(
    tensors: Mapping[str, torch.Tensor], types: Mapping[torch.dtype, str], metadata: Any
) -> tuple[bytes, int]:
    """Makes the head of a file of safetensors; returns it and the number of bytes to follow."""
    head: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    with torch._C.DisableTorchFunction():
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            shape, dtype = list(tensor.shape), types[tensor.dtype]
            head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text, end


def _reduce(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_or_share(tensor: torch.Tensor, protocol: Any) -> Any:
        is_copy = sys._getframe(1).f_code is copy.copy.__code__  # which shares the storage
        return reduce(tensor, protocol) if is_copy else reduce_fake(tensor)

    return reduce_or_share


def _flatten_real(flatten: Callable[..., Any]) -> Callable[..., Any]:
    def flatten_or_leave(tensors: Any, *args: Any) -> Any:
        return _Unwritten(tensors) if holds_fakes(tensors) else flatten(tensors, *args)

    return flatten_or_leave


def _find_storage_address(read: Callable[..., int]) -> Callable[..., int]:
    """Gives storages without memory an address each, by which others find shared weights."""
    return lambda storage: storage._cdata if storage.device.type == "meta" else read(storage)


def _find_address(read: Callable[..., int]) -> Callable[..., int]:
    def find_address(tensor: torch.Tensor) -> int:
        if not isinstance(tensor, FakeTensor):
            return read(tensor)
        with torch._C.DisableTorchFunction():
            offset = int(tensor.storage_offset()) * tensor.element_size()
            return int(tensor.untyped_storage()._cdata) + offset

    return find_address


def _find_device(map_location: Any, place: str) -> str:
    """Finds the device that ``torch.load`` puts a storage on; a function's is the host."""
    if isinstance(map_location, dict):
        return str(map_location.get(place, place))
    return "cpu" if callable(map_location) else str(map_location or place)


def _move(moved: dict[int, Any], tensor: torch.Tensor) -> torch.Tensor:
    """Moves a tensor with its storage, which others may share, if that is on the GPU."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return tensor.cuda()
    storage = tensor.untyped_storage()
    if storage._cdata not in moved:
        return tensor
    with torch.no_grad():
        if moved[storage._cdata] is None:
            with run_outside_modes():
                whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
            moved[storage._cdata] = whole.cuda()
        made = moved[storage._cdata].as_strided(
            tensor.size(), tensor.stride(), tensor.storage_offset()
        )
    return torch.nn.Parameter(made) if isinstance(tensor, torch.nn.Parameter) else made


def _run_real(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_real(*args: Any, **kwargs: Any) -> Any:
        with run_outside_modes():
            return run(*args, **kwargs)

    return run_real
