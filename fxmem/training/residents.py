"""Tensors that are there before a step: the model's, the inputs, the optimizer's, the user's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fxmem.fakes.containers import iterate_tensors
from fxmem.fakes.reach import find_grad, iterate_reached
from fxmem.graph import Category
from fxmem.recording.recorder import Recorder

NamedInputs = Iterable[tuple[str, Any]]


def allocate_model(recorder: Recorder, model: nn.Module) -> None:
    """Tracks a model's tensors in the order of ``model.to(device)``: children first."""
    for child in model.children():
        allocate_model(recorder, child)
    for tensor in (*model._parameters.values(), *model._buffers.values()):
        if tensor is not None:
            recorder.track(tensor)


def label_residents(
    recorder: Recorder,
    model: nn.Module,
    inputs: NamedInputs,
    *,
    target: Any,
    loss: object,
    optimizer: torch.optim.Optimizer | None,
    scaler_state: Any,
) -> None:
    """Labels the tensors that are there before the step, most specific category first.

    Tensors of the user's loss function are labelled if the step has met them.
    """
    label, inputs = recorder.label, [*inputs]
    for name, parameter in model.named_parameters():
        label(parameter, Category.PARAMETER, name)
    for name, buffer in model.named_buffers():
        label(buffer, Category.BUFFER, name)
    for name, tensor in iterate_unsharded(model):
        label(tensor, Category.PARAMETER, f"{name} (unsharded)")
    for name, value in inputs:
        label(value, Category.INPUT, name)
    label(target, Category.INPUT, "target")
    for value in iterate_reached(loss):
        if isinstance(value, torch.Tensor) and recorder.find_storages(value):
            label(value, Category.INPUT, "held by the loss")
    inner = getattr(optimizer, "optim", None)  # ZeroRedundancyOptimizer's, of this rank's shard
    reached = [*iterate_held(model), ("", optimizer), ("", inner)]
    for _, holder in reached:
        if isinstance(holder, torch.optim.Optimizer):
            label_states(recorder, model, holder)
    label(scaler_state, Category.OPTIMIZER_STATE, "gradient scaler")
    label_gradients(recorder, model, inputs)
    for name, value in reached:
        if isinstance(value, torch.Tensor):
            label(find_grad(value), Category.GRADIENT, f"{name}.grad")
            label(value, Category.BUFFER, name)


def iterate_unsharded(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters that ``fully_shard`` gathers, with the names of their shards.

    Source: ``FSDPParam`` in ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    modules: Iterator[Any] = model.modules()
    for module in modules:
        state: Any = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        groups = getattr(state, "_fsdp_param_groups", None) or [
            getattr(state, "_fsdp_param_group", None)
        ]
        for group in groups:
            for parameter in group.fsdp_params if group is not None else ():
                for tensor in parameter.all_gather_outputs:
                    yield names.get(parameter.sharded_param, ""), tensor


def label_states(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Labels the states of an optimizer by the names of the parameters."""
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    for owner, values in optimizer.state.items():
        for key, value in values.items():
            recorder.label(value, Category.OPTIMIZER_STATE, f"{names.get(owner, '')}.{key}")


def label_gradients(recorder: Recorder, model: nn.Module, inputs: NamedInputs) -> None:
    """Labels the gradients of parameters and inputs."""
    for name, value in (*model.named_parameters(), *inputs):
        for tensor in iterate_tensors(value):
            if tensor.is_leaf:
                recorder.label(tensor.grad, Category.GRADIENT, f"{name}.grad")


def iterate_held(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yields what the model's code reaches beyond parameters and buffers, with a name of each."""
    seen: dict[int, object] = {}
    for prefix, module in model.named_modules():
        for name, attribute in vars(module).items():
            holders = attribute if name in ("_parameters", "_buffers") else {name: attribute}
            for holder, held in holders.items() if name != "_modules" else ():
                held_by = f"{prefix}.{holder}".strip(".")
                for value in iterate_reached(held, seen):
                    yield held_by if value is held else f"held by {held_by}", value
