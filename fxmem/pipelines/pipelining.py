"""Simulation of a pipeline: its stages recorded, and its schedule replayed on every rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxmem.analysis import Setup
from fxmem.analyzing import find_settings, isolate_analysis
from fxmem.errors import UsageError
from fxmem.gpus import CONTEXT_BYTES, NCCL_BYTES
from fxmem.loading.inputs import check_inputs, check_model, gather_inputs
from fxmem.loading.target import load_target
from fxmem.pipelines.orders import list_actions
from fxmem.pipelines.pipeline import Pipeline, measure_rank
from fxmem.pipelines.rank_replay import RecordedStage
from fxmem.pipelines.stage_recorder import StagePlace, TensorMeta, record_stage
from fxmem.recording.blueprint import Blueprint
from fxmem.recording.losses import resolve_loss
from fxmem.recording.optimizers import resolve_optimizer
from fxmem.recording.options import (
    LossChoice,
    OptimizerChoice,
    check_choices,
    load_choice,
    name_choice,
    resolve_options,
)
from fxmem.tracing.devices import replace_devices
from fxmem.tracing.fakes import describe_inputs, make_fake_mode
from fxmem.tracing.state import save_random_states
from fxmem.tracing.swapping import restore_user_state
from fxmem.versions.release import check_release, is_release

Stages = Sequence[nn.Module] | nn.Module | str


def simulate_pipeline(
    stages: Stages,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    schedule: str = "1F1B",
    microbatches: int = 8,
    ranks: int | None = None,
    optimizer: OptimizerChoice = None,
    loss: LossChoice = None,
    return_outputs: bool = True,
    alloc_conf: str | None = None,
    **options: Any,
) -> Pipeline:
    """Records the stages and replays the schedule: :func:`fxmem.pipeline`, with its arguments."""
    check_release()
    chosen = resolve_options(**options)
    target, settings = chosen.target, find_settings(chosen.target.name, alloc_conf)
    check_choices(loss, optimizer)
    if not is_release((2, 10)) and (chosen.layout is not None or not return_outputs):
        raise UsageError(
            "stages on a mesh and return_outputs=False need torch 2.10",
            hint="leave them out, or install a later torch",
        )
    args, kwargs = gather_inputs(args, kwargs)
    fake_mode, named = make_fake_mode(), set[str]()
    layout = chosen.layout
    choices = (stages, loss, optimizer, layout and layout.parallelize)
    with isolate_analysis(*choices, target=target, layout=layout):
        with replace_devices(named):
            modules = _list_stages(stages, fake_mode)
            make_optimizer = resolve_optimizer(load_choice(optimizer))
            step_loss = resolve_loss(load_choice(loss))
        driver, order = list_actions(schedule, len(modules), microbatches, ranks)
        works = frozenset(action.work for actions in order for action in actions)
        recorded: list[RecordedStage] = []
        specs: tuple[str, ...] = ()
        received: tuple[TensorMeta, ...] = ()
        for index, module in enumerate(modules):
            check_model(module)
            blueprint = Blueprint(
                module,
                () if index else args,
                kwargs,
                step_loss,
                make_optimizer,
                chosen,
                fake_mode,
                named,
            )
            if not index:
                given = blueprint.make_inputs()
                specs = describe_inputs(*given)
                check_inputs(module, *given)
                _check_batch(given, microbatches)
            place = StagePlace(index, len(modules), received, microbatches, works, return_outputs)
            users = [*{type(part) for part in module.modules()}, step_loss, make_optimizer]
            with contextlib.ExitStack() as after, restore_user_state(users), fake_mode:
                after.callback(save_random_states())
                record = functools.partial(record_stage, place, target, hints=chosen.hints)
                stage, received = blueprint.run(record, specs)
            recorded.append(stage)
    setup = Setup(
        model=stages if isinstance(stages, str) else type(modules[0]).__name__,
        inputs=specs,
        mode="train",
        device=target.name,
        gpu=chosen.gpu.name if chosen.gpu else None,
        optimizer=name_choice(optimizer),
        loss=name_choice(loss),
        frontend="record",
        mesh=None if layout is None else dict(layout.mesh),
        parallelize=None if layout is None else name_choice(layout.parallelize),
    )
    groups = 1 + (0 if layout is None else len(layout.mesh))  # each with buffers of NCCL
    context_bytes = CONTEXT_BYTES[1] + groups * NCCL_BYTES[1]
    measured = []
    for rank, actions in enumerate(order):
        own = {index: recorded[index] for index in sorted({action.stage for action in actions})}
        limits = settings, chosen.gpu, context_bytes
        measured.append(measure_rank(rank, actions, own, driver, microbatches, *limits))
    return Pipeline(setup, schedule, microbatches, tuple(measured))


def _list_stages(stages: Stages, fake_mode: Any) -> list[nn.Module]:
    found = load_target(stages, fake_mode) if isinstance(stages, str) else stages
    if isinstance(found, (nn.Sequential, nn.ModuleList, list, tuple)) and len(found) > 1:
        return [*found]
    raise UsageError(
        f"stages must be a list of two modules or more, got {type(found).__name__}",
        hint="[first, ..., last], each taking what the one before returns",
    )


def _check_batch(given: Any, microbatches: int) -> None:
    for tensor in tree_leaves(given):
        if isinstance(tensor, torch.Tensor) and (
            not tensor.ndim or tensor.shape[0] % microbatches or not tensor.shape[0]
        ):
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            raise UsageError(
                f"an input of {shape} does not split into {microbatches} micro-batches",
                hint="inputs are those of all micro-batches together, split along dimension 0",
            )
