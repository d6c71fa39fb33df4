"""Wrapper code of inductor, run on fake tensors: it allocates and frees as on the GPU.

A wrapper is a Python function that allocates buffers, launches kernels on them, calls libraries and
deletes its names. Here kernels compute nothing, and the rest are operators of the recording.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import math
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode_temporarily

from fxmem.compiling.places import Direction, Place, PlaceLog
from fxmem.patching import is_own_mode

_POINTER = re.compile(r"\b(?:in_out_ptr|in_ptr|out_ptr)\d+\b")
_BEFORE, _AFTER = "_before_buffer", "_after_buffer"
"""Names of the functions that are called around the making of a buffer."""
_FOR_KERNELS = (
    *("assert_size_stride", "assert_alignment", "get_raw_stream"),
    *("assert_size_stride_grouped", "assert_tensor_metadata"),  # 2.15
    *("grid", "split_scan_grid", "grid_combo_kernels", "cooperative_reduction_grid"),  # 2.6
)
"""Functions whose results only kernels take."""
_STATE_BYTES, _GPU_STATE_BYTES = 5056, 16
"""Of a random generator of the CPU (mt19937), and of a GPU's (seed and offset)."""
_STREAMS = ("torch._dynamo.graph_bytecode_inputs", "torch._dynamo.variables.streams")
"""Modules that keep the streams that the code names."""


def make_program(
    source: str,
    device: torch.device,
    places: Mapping[str, Place],
    log: PlaceLog,
    way: Direction,
) -> Callable[[list[Any]], Any]:
    """Makes the function that a wrapper defines.

    Args:
        source: The wrapper's code.
        device: Of the fakes that stand for tensors of the GPU.
        places: The origins of buffers, by name.
        log: Is told which buffer is made.
        way: The direction of the graph.

    Returns:
        A function that takes its inputs in a list, which it empties.
    """
    tree = ast.parse(source)
    kernels = [each for each in tree.body if _is_kernel(each)]
    tree.body = [each for each in tree.body if _is_wrapper(each)]
    _Watched(places).visit(tree)
    names = _list_names(device)
    for kernel in kernels:
        name = kernel.targets[0].id  # type: ignore[attr-defined]
        names[name] = _Kernel(name, ast.unparse(kernel), log.see_kernel)
    exec(compile(ast.fix_missing_locations(tree), "<inductor>", "exec"), names)
    call = names["Runner"]([]).call if "Runner" in names else names["call"]

    def run(inputs: list[Any]) -> Any:
        watched = log.follow(places, inputs, way)
        with (
            torch.no_grad(),
            torch._C.DisableTorchFunction(),  # the operators are the device's own
            watched as (names[_BEFORE], names[_AFTER], end),
        ):
            return end(call(inputs))

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd gives up its references
    return run


class _Watched(ast.NodeTransformer):
    """Calls functions around each statement that makes a buffer of a known place."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places

    def visit_Assign(self, statement: ast.Assign) -> Any:
        target = statement.targets[0]
        if not isinstance(target, ast.Name) or target.id not in self._places:
            return statement
        before, after = (
            ast.parse(text).body[0]
            for text in (f"{_BEFORE}({target.id!r})", f"{_AFTER}({target.id!r}, {target.id})")
        )
        return [before, statement, after]


def _is_kernel(statement: ast.stmt) -> bool:
    """Returns whether a statement compiles a kernel: ``name = async_compile.triton(...)``."""
    call = statement.value if isinstance(statement, ast.Assign) else None
    function = call.func if isinstance(call, ast.Call) else None
    return isinstance(function, ast.Attribute) and ast.unparse(function.value) == "async_compile"


def _is_wrapper(statement: ast.stmt) -> bool:
    """Returns whether a statement belongs to the wrapper, or names a constant of the graph."""
    literals = ast.Constant, ast.Dict  # a dict has the sizes of a kernel's blocks, up to 2.6
    is_constant = isinstance(statement, ast.Assign) and isinstance(statement.value, literals)
    is_call = isinstance(statement, ast.FunctionDef) and statement.name == "call"
    finds_streams = isinstance(statement, ast.ImportFrom) and statement.module in _STREAMS
    return is_constant or is_call or finds_streams or isinstance(statement, ast.ClassDef)


def _list_names(device: torch.device) -> dict[str, Any]:
    """Lists what the head of a wrapper imports, as the recording has it."""
    algorithms: Any = importlib.import_module("torch._inductor.select_algorithm")
    cuda = SimpleNamespace(
        _DeviceGuard=contextlib.nullcontext,
        set_device=lambda _index: None,
        current_stream=lambda *device: torch.cuda.current_stream(*device),
    )
    return {
        "torch": _Other(torch, cuda=cuda, ops=_list_operators(device)),
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "math": math,
        "extern_kernels": algorithms.extern_kernels,
        "empty_strided_cuda": functools.partial(_allocate, device),
        "empty_strided_cpu": functools.partial(_allocate, torch.device("cpu")),
        "reinterpret_tensor": _reinterpret,
        **dict.fromkeys(_FOR_KERNELS, lambda *_arguments: None),
        **dict.fromkeys(("copy_if_misaligned", "copy_misaligned"), lambda tensor: tensor),
        "__builtins__": builtins,
    }


def _hide(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Hides operators from the code's own dispatch modes, as C++ does: selective checkpoints'."""

    def run_hidden(*arguments: Any) -> Tensor:
        modes: Any = _get_current_dispatch_mode_stack()
        with contextlib.ExitStack() as stack:
            while modes and not is_own_mode(modes.pop()):
                stack.enter_context(_pop_mode_temporarily())
            return run(*arguments)

    return run_hidden


@_hide
def _allocate(
    device: torch.device, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@_hide
def _reinterpret(
    tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


class _Other:
    """A module of torch with other attributes in the place of some."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _list_operators(device: torch.device) -> Any:
    """Lists ``torch.ops`` with those that keep random states for checkpoints, run on fakes.

    A state lies on the host. Source: ``torch/_prims/rng_prims.py``.
    """
    host = torch.device("cpu")
    nbytes = _STATE_BYTES if device == host else _GPU_STATE_BYTES

    def save_and_run(operator: Any, *args: Any, **kwargs: Any) -> Any:
        state = _allocate(host, (nbytes,), (1,), torch.uint8)
        return state, operator(*args, **kwargs)

    def run(_state: Tensor, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    names = {"run_and_save_rng_state": save_and_run, "run_with_rng_state": run}
    return _Other(torch.ops, higher_order=_Other(torch.ops.higher_order, **names))


class _Kernel:
    """A kernel that is launched on nothing, and seen.

    Args:
        name: Of the kernel.
        source: Its code, by whose names of arguments the written ones are told.
        see: Is given the name, the tensors that are read, and those that are written.
    """

    def __init__(self, name: str, source: str, see: Callable[..., None]) -> None:
        self._name, self._see = name, see
        pointers = dict.fromkeys(_POINTER.findall(source))
        self._is_written = [not pointer.startswith("in_ptr") for pointer in pointers]

    def run(self, *arguments: Any, **_options: Any) -> None:
        """Takes tensors first, in the order of the code, and sizes."""
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        pairs = [*zip(tensors, self._is_written, strict=False)]
        read = [tensor for tensor, _ in pairs]
        self._see(self._name, read, [tensor for tensor, is_written in pairs if is_written])

    __call__ = run
