"""Stand-ins for private functions of torch that came or changed within the supported releases."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, _prims_common
from torch._C import _autograd
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from fxmem.versions.release import is_release

Kernel = Callable[..., Any]
"""Takes the dispatcher's keys, then the operator's arguments."""


def is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor fills its memory without gaps or overlaps, in any order.

    Source: ``torch/_prims_common/__init__.py``; the function that does not ask symbolic sizes for
    their values came with 2.11.
    """
    before = getattr(_prims_common, "is_non_overlapping_and_dense", None)
    decide: Any = getattr(_prims_common, "is_non_overlapping_and_dense_or_false", before)
    return bool(decide(tensor))


def save_tensor(tensor: Tensor) -> Callable[[], Tensor]:
    """Saves a tensor as autograd does: the function returned checks its version.

    Source: ``torch/csrc/autograd/init.cpp``, ``_make_saved_tensor``, from 2.12 on; before, only a
    node of a graph saves, as ``torch/utils/checkpoint.py`` has it in ``_NoopSaveInputs``.
    """
    make = getattr(_autograd, "_make_saved_tensor", None)
    if make is not None:
        unpack: Callable[[], Tensor] = make(tensor, is_output=False).unpack
        return unpack
    saver: Any = _Saver.apply(tensor, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
    return lambda: saver.grad_fn.saved_tensors[0]  # the result keeps the node alive


class _Saver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, differentiable: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return differentiable.detach()


def find_saving_hooks() -> tuple[Any, ...]:
    """Finds the hooks of ``saved_tensors_hooks`` that are in force.

    Source: ``torch/csrc/autograd/init.cpp``, ``_top_saved_tensors_default_hooks``, from 2.8 on.
    Before, PyTorch does not tell: the result is empty.
    """
    return _autograd._top_saved_tensors_default_hooks(True) or () if tells_saving_hooks() else ()


def tells_saving_hooks() -> bool:
    """Returns whether PyTorch tells which hooks are in force."""
    return hasattr(_autograd, "_top_saved_tensors_default_hooks")


def keeps_casts_in_inference() -> bool:
    """Returns whether autocast keeps casts of weights in inference mode, as it does in no_grad.

    One made in either has no gradients later. Source: ``aten/src/ATen/autocast_mode.cpp``,
    ``cached_cast``; pull request 165068 ended both.
    """
    return is_release(before=(2, 11))


def find_flop_formula(operator: OpOverload) -> Callable[..., Any] | None:
    """Finds how torch counts an operator's FLOPs; the function takes ``out_val``, too.

    Source: ``torch/utils/flop_counter.py``. A formula serves all overloads of an operator, and need
    not take the arguments that some have beside the others', as ``addmm.dtype`` does: they are cut.
    ``sdpa_flop_count`` and ``sdpa_backward_flop_count`` take keys with fewer heads than the query
    from 2.12 on. Before, they are given as many, which is what is multiplied. Products of experts
    have none.
    """
    formula = flop_registry.get(operator._overloadpacket)
    if formula is None:
        name = operator._overloadpacket.__name__
        return _count_grouped_product if name == "_grouped_mm" else None
    taken = _count_positional(formula)
    name = operator._overloadpacket.__name__
    if is_release(since=(2, 12)) or "_scaled_dot_product" not in name:
        return lambda *args, **kwargs: formula(*args[:taken], **kwargs)
    first = 1 if name.endswith("_backward") else 0  # after the gradient

    def count(*args: Any, **kwargs: Any) -> Any:
        query, key, value = args[first : first + 3]
        heads = query.shape[1]
        wide = [(x.shape[0], heads, *x.shape[2:]) for x in (key, value)]
        return formula(*args[:first], query, *wide, *args[first + 3 :], **kwargs)

    return count


def _count_grouped_product(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Counts the products of rows with their expert's matrix, or of columns with its rows."""
    groups = left.shape[0] if left.dim() > right.dim() else 1  # each column is one group's
    return 2 * left.numel() * right.shape[-1] // groups


@functools.cache
def _count_positional(formula: Callable[..., Any]) -> int | None:
    """Counts the positional arguments of an operator that a formula takes; None for any number."""
    kinds = {name: p.kind for name, p in inspect.signature(formula).parameters.items()}
    if inspect.Parameter.VAR_POSITIONAL in kinds.values():
        return None
    named = [name for name, kind in kinds.items() if kind is not inspect.Parameter.KEYWORD_ONLY]
    return next((i for i, name in enumerate(named) if name in ("out_shape", "out_val")), len(named))


def override_kernel(
    library: torch.library.Library, operator: OpOverload, key: torch._C.DispatchKey, kernel: Kernel
) -> None:
    """Puts a kernel in the place of PyTorch's own, or of one that Python registered before.

    Source: ``torch/library.py``, ``Library.impl``, which may replace Python's in later releases.
    """
    implement: Callable[..., None] = library.impl
    name = "allow_override"
    options = {name: True} if name in inspect.signature(implement).parameters else {}
    implement(operator, kernel, key.name, with_keyset=True, **options)


def find_kernel(operator: OpOverload, key: torch._C.DispatchKey) -> Kernel:
    """Finds PyTorch's own kernel of an operator under a key, to call once another took its place.

    Source: ``torch/library.py``, ``get_kernel``, from 2.9 on. Before, the function returned runs
    the operator without the key: autocast's kernels cast no more.
    """
    get_kernel = getattr(torch.library, "get_kernel", None)
    if get_kernel is not None:
        kernel: Kernel = get_kernel(operator, key.name).call_boxed
        return kernel

    def run_below(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(keys.remove(key), *args, **kwargs)

    return run_below
