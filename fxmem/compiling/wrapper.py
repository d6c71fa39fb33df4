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
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_FUSED = re.compile(r"^triton_[a-z]+_fused_(.*?)_\d+$")
Name = Callable[[Tensor, str], None]
"""Names a buffer by the operators that write it."""


def make_program(source: str, device: torch.device, name: Name) -> Callable[[list[Any]], Any]:
    """Makes the function that a wrapper defines.

    Args:
        source: The wrapper's code.
        device: Of the fakes that stand for tensors of the GPU.
        name: Is told of the buffers that a kernel is given.

    Returns:
        A function that takes its inputs in a list, which it empties.
    """
    tree = ast.parse(source)
    kernels = [each.targets[0].id for each in tree.body if _is_kernel(each)]  # type: ignore[attr-defined]
    tree.body = [each for each in tree.body if _is_wrapper(each)]
    names = _list_names(device) | {kernel: _Kernel(kernel, name) for kernel in kernels}
    exec(compile(tree, "<inductor>", "exec"), names)
    call = names["Runner"]([]).call if "Runner" in names else names["call"]

    def run(inputs: list[Any]) -> Any:
        with torch.no_grad():
            return call(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd gives up its references
    return run


def _is_kernel(statement: ast.stmt) -> bool:
    """Returns whether a statement compiles a kernel: ``name = async_compile.triton(...)``."""
    call = statement.value if isinstance(statement, ast.Assign) else None
    function = call.func if isinstance(call, ast.Call) else None
    return isinstance(function, ast.Attribute) and ast.unparse(function.value) == "async_compile"


def _is_wrapper(statement: ast.stmt) -> bool:
    """Returns whether a statement belongs to the wrapper, or names a constant of the graph."""
    is_constant = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
    is_call = isinstance(statement, ast.FunctionDef) and statement.name == "call"
    return is_constant or is_call or isinstance(statement, ast.ClassDef)


def _list_names(device: torch.device) -> dict[str, Any]:
    """Lists what the head of a wrapper imports, as the recording has it."""
    algorithms: Any = importlib.import_module("torch._inductor.select_algorithm")
    cuda = SimpleNamespace(_DeviceGuard=contextlib.nullcontext, set_device=lambda _index: None)
    return {
        "torch": _TorchOf(cuda),
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "math": math,
        "extern_kernels": algorithms.extern_kernels,
        "empty_strided_cuda": functools.partial(_allocate, device),
        "empty_strided_cpu": functools.partial(_allocate, torch.device("cpu")),
        "reinterpret_tensor": _reinterpret,
        "assert_size_stride": lambda *_: None,
        "assert_alignment": lambda *_: None,
        "copy_if_misaligned": lambda tensor: tensor,
        "get_raw_stream": lambda _index: 0,
        "__builtins__": builtins,
    }


def _allocate(
    device: torch.device, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret(
    tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


class _TorchOf:
    """The module torch with another torch.cuda."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Kernel:
    """A kernel that is launched on nothing."""

    def __init__(self, name: str, name_buffer: Name) -> None:
        fused = _FUSED.match(name)
        self._operators = fused[1] if fused else name
        self._name_buffer = name_buffer

    def run(self, *arguments: Any, **_: Any) -> None:
        for argument in arguments:
            if isinstance(argument, Tensor):
                self._name_buffer(argument, self._operators)

    __call__ = run
