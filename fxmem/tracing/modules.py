"""Modules as the tracer sees them: leaves, hooks, and descriptions by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

_CONTAINERS = (
    nn.Sequential,
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""torch.nn's own modules that only call others. torch.fx makes a leaf of all but the first, and
then a whole encoder is one node; see docs/decisions."""


def is_leaf(module: nn.Module) -> bool:
    """Returns whether a module is one node, as ``torch.fx.Tracer.is_leaf_module`` decides."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    is_own = find_class(module).__module__.startswith(("torch.nn", "torch.ao.nn"))
    return is_own and not isinstance(module, _CONTAINERS)


def find_class(module: nn.Module) -> type[nn.Module]:
    """Finds the class whose code a module runs: a parametrization puts one of its own before it."""
    kind = type(module)
    if kind.__module__ == parametrize.__name__ and parametrize.is_parametrized(module):
        return kind.__mro__[1]
    return kind


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


def find_watched(module: nn.Module) -> tuple[bool, bool]:
    """Returns whether hooks of a module may keep what it is given, and whether its result.

    One that runs before ``forward``, as those that normalise weights do, does not see a result,
    unless the module returns what it is given: ``Identity`` does, and none with weights.
    """
    called = [key for key in CALLED_HOOKS if getattr(module, key)]
    sees_result = called != ["_forward_pre_hooks"] or not module._parameters
    return bool(called), bool(called) and sees_result


def is_left_out(hooks: Mapping[int, Any]) -> bool:
    """Returns whether a graph would leave out what some hooks of a module do.

    Those with which transformers collects hidden states put them into the model's output, which
    the graph has.
    """
    return bool(hooks) and any(
        getattr(hook, "__module__", "") != "transformers.utils.output_capturing"
        for hook in hooks.values()
    )


_KEY = "fxmem_model"
PLAIN = (type(None), bool, int, float, complex, str, bytes)
"""Types of attributes that are compared by value."""
_MARKS = ("_is_torch_compile", "_output_capturing_hooks_installed")
INTERNAL = frozenset({*vars(nn.Module()), *_MARKS})
"""Attributes that every module has, and marks of ``torch.compile`` and of transformers' hooks."""
Description = dict[str, str]
"""By name, the class of a module, the shape of a tensor, the value of an attribute.

Empty for a module with lazy parameters: what it is comes with its first input.
"""


def describe_model(model: nn.Module) -> Description:
    """Describes modules by class, their tensors by shape and dtype, and plain attributes.

    >>> describe_model(nn.Linear(2, 1))["weight"]
    '(1, 2) torch.float32'
    """
    found: Description = {}
    for name, module in model.named_modules(remove_duplicate=False):
        tensors = {**module._parameters, **module._buffers}
        is_settled = not any(tensor is not None and is_lazy(tensor) for tensor in tensors.values())
        found[name or "the model"] = type(module).__name__ if is_settled else ""
        for key, value in {**tensors, **vars(module)}.items() if is_settled else ():
            if isinstance(value, torch.Tensor) and key in tensors:
                found[f"{name}.{key}".strip(".")] = f"{tuple(value.shape)} {value.dtype}"
            elif isinstance(value, PLAIN) and key not in INTERNAL and key not in tensors:
                found[f"{name}.{key}".strip(".")] = repr(value)
    return found


def remember_model(graph: fx.Graph, description: Description) -> None:
    """Keeps with a graph the description of the model that it was traced from."""
    for output in graph.find_nodes(op="output"):
        output.meta[_KEY] = description


def recall_model(graph: fx.Graph) -> Description | None:
    """Returns what :func:`remember_model` kept; None for a graph of another origin."""
    found: list[Description | None] = [o.meta.get(_KEY) for o in graph.find_nodes(op="output")]
    return found[0] if found else None


def find_difference(one: Description, other: Description) -> str:
    """Names the first difference of two models; empty where they are alike.

    >>> small, large = describe_model(nn.Linear(2, 1)), describe_model(nn.Linear(3, 1))
    >>> find_difference(small, large)
    'weight'
    """
    if "" in (*one.values(), *other.values()):
        return ""  # the nodes of the graph have the modules' names
    return next((name for name in (*one, *other) if one.get(name) != other.get(name)), "")
