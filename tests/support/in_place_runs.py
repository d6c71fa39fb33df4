"""Runs a model's FX graph with one operation in place, on real tensors."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from benchmarks.step import default_loss
from fxmem.planning.plan import InplaceChange


def edit_model(model: nn.Module, fx_graph: fx.Graph, changes: list[InplaceChange]) -> nn.Module:
    """The model with these operations in place; a copy, without changes too."""
    edited = copy.deepcopy(fx_graph)
    module = _Interpreted(copy.deepcopy(model), edited)
    by_name = {node.meta["fxmem_node"]: node for node in edited.nodes if "fxmem_node" in node.meta}
    for change in changes:
        _edit_node(module.model, by_name[change.node], change.call, change.overwrites)
    return module


class _Interpreted(nn.Module):
    """Node by node: not every graph can be written as code."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__()
        self.model = model
        self._graph = graph

    def forward(self, *args: Any) -> Any:
        return fx.Interpreter(self.model, graph=self._graph).run(*args)


def _edit_node(model: nn.Module, node: fx.Node, call: str, overwritten: str) -> None:
    if node.op == "call_module" and call.startswith("torch."):
        node.op, node.target = "call_function", getattr(torch, call.removeprefix("torch."))
    elif node.op == "call_module":
        changed = copy.copy(model.get_submodule(node.target))
        assert call == f"{type(changed).__name__}(inplace=True)"
        changed.inplace = True
        node.target = f"{node.name}_in_place"
        model.add_module(node.target, changed)
    elif call.startswith("F."):
        assert node.target in (
            getattr(F, call.removeprefix("F.").removesuffix("(inplace=True)")),
            getattr(torch, call.removeprefix("F.").removesuffix("(inplace=True)"), None),
        )
        node.target = getattr(F, call.removeprefix("F.").removesuffix("(inplace=True)"))
        node.kwargs = {**node.kwargs, "inplace": True}
    else:
        node.op, node.target = "call_method", call
        kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
        args = [*node.args, *([kwargs.pop("other")] if "other" in kwargs else [])]
        if call in ("add_", "mul_") and _find_node(args[0]) != overwritten:
            args.reverse()
        node.args, node.kwargs = tuple(args), kwargs
        assert _find_node(node.args[0]) == overwritten


def _find_node(argument: Any) -> str | None:
    while isinstance(argument, fx.Node) and argument.target is operator.getitem:
        argument = argument.args[0]
    return argument.meta.get("fxmem_node") if isinstance(argument, fx.Node) else None


def take_step(model: nn.Module, args: tuple[Any, ...], *, train: bool = True) -> list[Any]:
    """The output, and in training the gradients of parameters and of inputs."""
    args = copy.deepcopy(args)
    torch.manual_seed(1)
    with torch.set_grad_enabled(train):
        output = model.train(train)(*args)
    if not train:
        return [output]
    default_loss(output).backward()
    return [output, [p.grad for p in model.parameters()], [x.grad for x in args]]
