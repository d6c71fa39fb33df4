"""Recording of a pipeline: each of its ranks, in PyTorch's own schedule."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxmem.analyzing import describe_setup
from fxmem.errors import UsageError
from fxmem.fakes.devices import translate_devices
from fxmem.fakes.fake_mode import describe_inputs, make_fake_mode
from fxmem.loading.inputs import check_inputs, check_model, gather_inputs
from fxmem.loading.target import load_target
from fxmem.parallelism.layout import Layout, ParallelizeChoice, resolve_layout
from fxmem.parallelism.wrapping import parallelize_model
from fxmem.pipelines.pipeline import Pipeline, RankMemory
from fxmem.pipelines.rank_recorder import Metas, RankPlace, find_outputs, name_stage, record_rank
from fxmem.pipelines.schedules import deal_stages
from fxmem.recording.size_hints import SizeHint
from fxmem.setup import Setup
from fxmem.training.blueprint import Blueprint
from fxmem.training.isolation import isolate_analysis
from fxmem.training.losses import resolve_loss
from fxmem.training.optimizers import resolve_optimizer
from fxmem.training.options import (
    DtypeChoice,
    LossChoice,
    OptimizerChoice,
    check_choices,
    load_choice,
    name_choice,
    resolve_device,
    resolve_dtype,
)
from fxmem.versions.release import check_release, is_release

Stages = Sequence[nn.Module] | nn.Module | str
_DIMENSION = "pp"
"""The pipeline's own dimension of the mesh of all processes, the outermost."""


def pipeline(
    stages: Stages,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    schedule: str = "1F1B",
    microbatches: int = 8,
    ranks: int | None = None,
    device: str | torch.device = "cuda",
    gpu: str | None = None,
    reserve: str | int | None = None,
    attention: str | None = None,
    dtype: DtypeChoice = None,
    optimizer: OptimizerChoice = None,
    loss: LossChoice = None,
    return_outputs: bool = True,
    alloc_conf: str | None = None,
    size_hint: SizeHint = None,
    mesh: Mapping[str, int] | None = None,
    parallelize: ParallelizeChoice = None,
) -> Pipeline:
    """Measures the memory of each rank of a pipeline of ``torch.distributed.pipelining``.

    PyTorch's own stages and schedule run on each rank in turn, in a process group whose other ranks
    are not there. Recorded is a steady step of each rank::

        optimizer.zero_grad()  # an optimizer for each stage
        output = schedule.step(*args, target=target, losses=losses, **kwargs)
        optimizer.step()

    Args:
        stages: The modules, each taking what the one before returns: a list, a ``ModuleList`` or
            ``Sequential``, or a TARGET of one, such as a function that returns the list.
        args: Positional inputs of the first stage, of all micro-batches together: PyTorch splits
            them along dimension 0.
        kwargs: Keyword inputs, which every stage takes.
        schedule: A name that ``torch.distributed.pipelining.schedules.get_schedule_class`` takes.
        microbatches: Micro-batches of a step.
        ranks: The ranks that the stages are dealt to. None for as many as stages, and half as many
            for a schedule of several stages a rank.
        device: As for :func:`analyze`.
        gpu: As for :func:`analyze`.
        reserve: As for :func:`analyze`.
        attention: As for :func:`analyze`.
        dtype: As for :func:`analyze`.
        optimizer: As for :func:`analyze`; each stage has one.
        loss: As for :func:`analyze`, of the last stage's output.
        return_outputs: As for ``schedule.step``: whether the last rank merges and returns results.
        alloc_conf: As for :func:`analyze`.
        size_hint: As for :func:`analyze`.
        mesh: The processes that share each stage, as for :func:`analyze`: the mesh without the
            dimension of the pipeline.
        parallelize: As for :func:`analyze`, for a stage.

    Raises:
        UsageError: An argument is not understood, or the schedule does not take these numbers.
        LoadError: The TARGET cannot be loaded.
        TraceError: A stage cannot be run on fake tensors.

    >>> from torch import nn
    >>> found = pipeline([nn.Linear(64, 64) for _ in range(4)], "32x64", device="cpu")
    >>> [rank.stages[0].most_in_flight for rank in found.ranks]
    [4, 3, 2, 1]
    """
    check_release()
    layout = resolve_layout(mesh, parallelize, 0)
    chosen = resolve_device(device, gpu, attention, alloc_conf, size_hint, reserve)
    chosen = replace(chosen, dtype=resolve_dtype(dtype), layout=layout)
    check_choices(loss, optimizer)
    _check_layout(layout, return_outputs)
    inputs = gather_inputs(args, kwargs)
    fake_mode, named = make_fake_mode(), set[str]()
    choices = (stages, loss, optimizer, parallelize)
    isolate = functools.partial(isolate_analysis, *choices, options=chosen)
    with isolate(layout=layout):
        with translate_devices(named=named):
            modules = _list_stages(stages, fake_mode)
            make_optimizer = resolve_optimizer(load_choice(optimizer))
            step_loss = resolve_loss(load_choice(loss))
        dealt = deal_stages(schedule, len(modules), microbatches, ranks)
        blueprint = Blueprint(
            modules[0], *inputs, step_loss, make_optimizer, chosen, fake_mode, named
        )
        check_model(modules[0])
        given = blueprint.make_inputs()
        specs = describe_inputs(*given)
        check_inputs(modules[0], *given)
        _check_batch(given, microbatches)
        metas = _find_metas(blueprint, modules, microbatches, specs)
    whole_mesh = ((_DIMENSION, len(dealt)), *(() if layout is None else layout.mesh))
    setup = describe_setup(
        stages if isinstance(stages, str) else type(modules[0]).__name__,
        specs,
        chosen,
        optimizer,
        loss,
        frontend="record",
        mesh=dict(whole_mesh),
        parallelize=name_choice(parallelize),
        schedule=f"{schedule} of {microbatches} micro-batches",
    )
    shared = 1 if layout is None else layout.world_size
    peers = tuple(range(0, len(dealt) * shared, shared))
    measured = []
    for rank, own in enumerate(dealt):
        place = RankPlace(schedule, microbatches, return_outputs, metas, own, peers)
        whole = Layout(whole_mesh, functools.partial(_lay_out_stages, layout), peers[rank])
        drawn = _draw_rank(blueprint, modules, own, None if layout is None else whole)
        with isolate(layout=whole):
            measured.append(_measure_rank(rank, drawn, place, replace(setup, rank=peers[rank])))
    return Pipeline(schedule, microbatches, tuple(measured))


def _measure_rank(rank: int, blueprint: Blueprint, place: RankPlace, setup: Setup) -> RankMemory:
    options = blueprint.options
    with blueprint.prepare_step(setup.inputs) as step:
        graph, actions, notes = record_rank(place, step, target=options.target, hints=options.hints)
    notes += tuple(options.list_notes(operation.name for operation in graph.operations))
    setup = replace(setup, notes=notes)
    return RankMemory(setup, graph, options.settings, options.gpu, rank=rank, actions=actions)


def _draw_rank(
    blueprint: Blueprint, modules: Sequence[nn.Module], own: Sequence[int], layout: Layout | None
) -> Blueprint:
    return replace(
        blueprint,
        model=nn.ModuleDict({name_stage(index): modules[index] for index in own}),
        args=blueprint.args if 0 in own else (),
        options=replace(blueprint.options, layout=layout),
    )


def _check_layout(layout: Layout | None, return_outputs: bool) -> None:
    if layout is not None and _DIMENSION in dict(layout.mesh):
        raise UsageError(
            f"{_DIMENSION} is the pipeline's own dimension of the mesh",
            hint="the mesh of the processes that share a stage, and ranks",
        )
    if not is_release((2, 10)) and (layout is not None or not return_outputs):
        raise UsageError(
            "stages on a mesh and return_outputs=False need torch 2.10",
            hint="leave them out, or install a later torch",
        )


def _find_metas(
    blueprint: Blueprint, modules: Sequence[nn.Module], microbatches: int, specs: tuple[str, ...]
) -> tuple[Metas, ...]:
    """Finds what each stage takes of a micro-batch, and what the last one returns."""
    metas: list[Metas] = []
    received: Metas | None = None
    options = blueprint.options
    for index, module in enumerate(modules):
        check_model(module)
        args = () if index else blueprint.args
        with replace(blueprint, model=module, args=args).prepare_step(specs) as step:
            taken, received = find_outputs(
                step,
                target=options.target,
                hints=options.hints,
                received=received,
                microbatches=microbatches,
                sender=f"stage {index}" if index + 1 < len(modules) else "",
            )
        metas.append(taken)
    return *metas, received or ()


def _lay_out_stages(layout: Layout | None, model: nn.Module, mesh: Any) -> None:
    """Lays each stage of a rank out on the part of the mesh that shares it."""
    assert layout is not None
    part = mesh[tuple(name for name, _ in layout.mesh)]
    for name, stage in model.named_children():
        laid_out = parallelize_model(stage, load_choice(layout.parallelize), part, layout.knobs)
        model.add_module(name, laid_out)


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
