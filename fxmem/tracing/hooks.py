"""What hangs on a tensor - hooks, attributes, a gradient - carried over to its fake copy."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxmem.errors import FxmemWarning, summarize_error
from fxmem.tracing.deepcopy import Memo, find_accumulator, undo_failed
from fxmem.tracing.reach import HOOKS, find_attributes, reaches_state

CALLED_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The tables that a module has its hooks in."""
HOOK_TABLES = (
    *CALLED_HOOKS,
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Those, and the tables of what each hook takes."""
GLOBAL_HOOKS: tuple[dict[int, Callable[..., Any]], ...] = tuple(
    getattr(torch.nn.modules.module, f"_global{name}") for name in CALLED_HOOKS
)
"""The tables of hooks that are called for all modules."""

_RESULT_HOOKS = tuple(key for key in CALLED_HOOKS if key != "_forward_pre_hooks")

_Function = Callable[..., Any]


def sees_arguments(module: nn.Module) -> bool:
    """Whether hooks of a module may keep what it is given."""
    return any(getattr(module, key) for key in CALLED_HOOKS)


def sees_result(module: nn.Module) -> bool:
    """Whether hooks of a module may keep what it makes.

    One that runs before ``forward``, as those that normalise weights do, does not see it, unless
    the module returns what it is given: ``Identity`` does, and nothing that computes with weights.
    """
    return any(getattr(module, key) for key in _RESULT_HOOKS) or (
        bool(module._forward_pre_hooks) and not module._parameters
    )


def carry_over(tensor: Tensor, fake: Tensor, name: str, memo: Memo) -> list[Any]:
    """Gives a fake copy what hangs on the original: its hooks act on the copies.

    A hook that cannot be copied is left out, with a warning: run as it is, it would act on the
    user's own tensors and optimizers.

    Args:
        tensor: The original.
        fake: Its copy, in the memo.
        name: What the user calls it.
        memo: The copies so far, as ``copy.deepcopy`` keeps them.

    Returns:
        What must be kept as long as the copy is used: nothing else holds hooks of its node.
    """
    for attribute, value in find_attributes(tensor).items():
        if attribute not in vars(fake):
            vars(fake)[attribute] = _copy_attribute(value, memo)
    if not (tensor.requires_grad and fake.requires_grad):
        return []
    for attribute in HOOKS:
        hooks = getattr(tensor, attribute)
        if hooks:
            setattr(fake, attribute, _copy_hooks(hooks, name, memo))
    if not tensor.is_leaf:
        return []
    if tensor.grad is not None:
        fake.grad = copy.deepcopy(tensor.grad, memo)
    return _carry_over_node(tensor, fake, name, memo)


def _copy_attribute(value: object, memo: Memo) -> Any:
    try:
        with undo_failed(memo):
            return copy.deepcopy(value, memo)
    except Exception:
        if reaches_state(value):
            raise
        return value


def _copy_hooks(hooks: Mapping[int, _Function], name: str, memo: Memo) -> dict[int, _Function]:
    if id(hooks) in memo:  # the model keeps the handle of a hook, which refers to them
        known: dict[int, _Function] = memo[id(hooks)]
        return known
    copied: dict[int, _Function] = OrderedDict()
    memo[id(hooks)] = copied
    for number, hook in hooks.items():
        try:
            with undo_failed(memo):
                copied[number] = copy.deepcopy(hook, memo)
        except Exception as error:
            warnings.warn(
                f"the hook {_name_function(hook)} of {name!r} is not run, as it cannot be "
                f"copied: {summarize_error(error)}",
                FxmemWarning,
                stacklevel=2,
            )
    return copied


def _carry_over_node(tensor: Tensor, fake: Tensor, name: str, memo: Memo) -> list[Any]:
    """Hooks on the node that accumulates a leaf's gradient.

    ``torch.distributed.optim._apply_optimizer_in_backward`` and what was written before
    ``register_post_accumulate_grad_hook`` put them there.
    """
    node, kept = find_accumulator(tensor), []
    for register in ("register_hook", "register_prehook"):
        handle = getattr(node, register)(_name_function)  # only to see what else is there
        hooks = dict(handle.hooks_dict_ref())
        handle.remove()
        del hooks[handle.id]
        if hooks:
            fake_node: Any = find_accumulator(fake)
            for hook in _copy_hooks(hooks, name, memo).values():
                getattr(fake_node, register)(hook)
            kept.append(fake_node)
    return kept


def _name_function(function: _Function) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
