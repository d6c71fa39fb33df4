"""Recording of one rank of a pipeline: PyTorch's own stages and schedule, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.pipelining.stage import PipelineStage

from fxmem.errors import TraceError
from fxmem.graph import Category, MemoryGraph, Operation, Phase
from fxmem.kernels.registry import Backend
from fxmem.parallelism.process_group import run_outside_modes
from fxmem.pipelines.pipeline import Actions, StageAction, Work
from fxmem.pipelines.schedules import build_schedule
from fxmem.recording.assemble import assemble_graph
from fxmem.recording.recorder import Recorder
from fxmem.recording.size_hints import SizeHints
from fxmem.tracing.tracer import Tracer
from fxmem.training.residents import NamedInputs, label_gradients
from fxmem.training.step import lay_out, note_assumptions, watch_step
from fxmem.training.training import Step, Training

Metas = tuple[Tensor, ...]
"""Tensors that a stage takes or returns, without memory: on the device ``meta``."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank in its pipeline."""

    schedule: str
    microbatches: int  # of a step
    return_outputs: bool  # whether the last stage's results are merged and returned
    metas: tuple[Metas, ...]  # what each stage takes of a micro-batch, and what the last returns
    own: tuple[int, ...]  # the stages of the rank
    peers: tuple[int, ...]  # the processes of the pipeline, this one among them

    @property
    def stages(self) -> int:
        """Number of stages in the pipeline."""
        return len(self.metas) - 1


def name_stage(index: int) -> str:
    """Names a stage among the modules of its rank."""
    return f"stage{index}"


def find_outputs(
    step: Step,
    target: Backend,
    hints: SizeHints | None,
    received: Metas | None,
    microbatches: int,
    sender: str,
) -> tuple[Metas, Metas]:
    """Runs a stage on one micro-batch; to be called with the fake mode active.

    Args:
        step: Its module, with the inputs of all micro-batches.
        target: The device whose kernels run it.
        hints: How many elements ``nonzero`` and the like find; None to refuse them.
        received: What the stage before returns; None for the first.
        microbatches: Micro-batches of a step.
        sender: What to call the stage if another follows; else empty.

    Returns:
        What the stage takes by position, and what it returns.

    Raises:
        TraceError: It returns something that cannot be sent to the stage that follows.
    """
    recorder = Recorder(target, hints, step.mesh)
    with watch_step(recorder, target):
        step = lay_out(step, recorder)
        given, kwargs = _split_first(step, microbatches)
        if received is not None:
            given = _make_like(received, target.device)
        output = step.model(*given, **kwargs)
    values = output if isinstance(output, tuple | list) else (output,)
    other = [type(value).__name__ for value in values if not isinstance(value, Tensor)]
    if sender and other:
        raise TraceError(
            f"{sender} returns {' and '.join(other)}, which cannot be sent",
            hint="a stage that another follows returns a tensor or a tuple of tensors",
        )
    with run_outside_modes():
        return _make_like(given, "meta"), _make_like(values, "meta")


def _split_first(step: Step, microbatches: int) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Splits the inputs as a schedule does, and returns those of the first micro-batch."""
    if not step.args and not step.kwargs:
        return (), {}
    args, kwargs = split_args_kwargs_into_chunks(step.args, dict(step.kwargs), microbatches)
    return args[0], kwargs[0]


def _make_like(values: Iterable[Any], device: torch.device | str) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_strided(
            tuple(t.shape), t.stride(), dtype=t.dtype, device=device
        ).requires_grad_(t.requires_grad)
        for t in values
        if isinstance(t, Tensor)
    )


def record_rank(
    place: RankPlace, step: Step, *, target: Backend, hints: SizeHints | None
) -> tuple[MemoryGraph, Actions, tuple[str, ...]]:
    """Runs two steps of a rank and records the second, the steady state.

    To be called with the step's fake mode active, in the process group of all ranks.

    Args:
        place: Its place in the pipeline.
        step: Its stages, by their names, the inputs of all micro-batches, the loss and the
            optimizer.
        target: The device whose kernels run it.
        hints: How many elements ``nonzero`` and the like find; None to refuse them.

    Returns:
        The memory graph, what the rank does, and notes on how the step was run.
    """
    recorder = Recorder(target, hints, step.mesh)
    with watch_step(recorder, target) as notes:
        run_steps: Any = _RankTraining.run_steps
        step = replace(lay_out(step, recorder), loop=run_steps)
        tracer = Tracer(step.model, recorder)
        training = _RankTraining(step, target, recorder, tracer, place)
        training.run_loop()
        graph = assemble_graph(recorder, tracer.nodes, tracer.calls)
        return graph, tuple(training.actions), (*note_assumptions(recorder), *notes)


class _Stage(PipelineStage):
    """PyTorch's stage, which tells what it runs."""

    training: _RankTraining

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.training.begin(Work.FORWARD, self.stage_index, fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.training.recorder.label(output, Category.OUTPUT)
        return output

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self.training.trace(Phase.FORWARD):
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        is_full = kwargs.get("full_backward", True)
        work = Work.BACKWARD if is_full else Work.BACKWARD_INPUT
        self.training.begin(work, self.stage_index, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.training.recorder.label(self.bwd_cache.get(bwd_chunk_id), Category.GRADIENT)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.training.begin(Work.BACKWARD_WEIGHT, self.stage_index, bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        label_gradients(self.training.recorder, self.submod, ())  # whole, where shards are reduced
        super().perform_reduce_grad(grad_scale_factor)

    # Later releases have stages vote on whether all were told what they take and return.

    def _warmup_forward_vote(self, *_: Any, **__: Any) -> Tensor:
        return torch.tensor([1])

    def _warmup_backward_result(self, *_: Any, **__: Any) -> Tensor:
        return torch.tensor([1])


class _RankTraining(Training):
    """The training of a rank: steps of its schedule.

    Attributes:
        actions: What the rank does, from which operation on.
    """

    def __init__(
        self, step: Step, target: Backend, recorder: Recorder, tracer: Tracer, place: RankPlace
    ) -> None:
        super().__init__(replace(step, make_optimizer=None), target, recorder, tracer)
        self.actions: list[tuple[int, StageAction | None]] = []
        self.recorder = recorder
        self._place = place
        self._targets: list[Tensor | None] = []  # of each micro-batch
        self._losses = 0  # how many of the step were computed
        modules: Mapping[str, Any] = dict(step.model.named_children())
        with run_outside_modes():
            group = dist.new_group([*place.peers])
        self._stages = [
            _Stage(
                modules[name_stage(index)],
                index,
                place.stages,
                target.device,
                input_args=place.metas[index],
                output_args=place.metas[index + 1],
                group=group,
            )
            for index in place.own
        ]
        for stage in self._stages:
            stage.training = self
        self._schedule = build_schedule(
            place.schedule, self._stages, place.microbatches, self._compute_loss
        )
        self._merge = self._schedule._merge_outputs
        self._schedule._merge_outputs = self._merge_outputs
        make = step.make_optimizer
        self._optimizers = [make([*m.parameters()]) for m in modules.values()] if make else []

    def run_steps(self) -> None:
        """Runs all steps."""
        place, step = self._place, self._step
        is_first, is_last = 0 in place.own, place.stages - 1 in place.own
        settings = {} if place.return_outputs else {"return_outputs": False}
        for _ in self.batches():
            output = target = None
            losses: list[Tensor] | None = None
            self.optimizer.zero_grad()
            self._losses = 0
            losses = [] if is_last else None
            # What the loss is compared with is made beside the outputs.
            target = torch.empty(place.microbatches, 0) if is_last else None
            output = self._schedule.step(
                *(step.args if is_first else ()),
                target=target,
                losses=losses,
                **settings,
                **step.kwargs,
            )
            self.hold("output", output)
            label_gradients(self.recorder, self.model, ())
            self._mark(None, Phase.OPTIMIZER)
            for optimizer in self._optimizers:
                optimizer.step()

    def begin(self, work: Work, stage: int, microbatch: int) -> None:
        """Begins what a stage does."""
        phase = Phase.FORWARD if work is Work.FORWARD else Phase.BACKWARD
        self._mark(StageAction(work, stage, microbatch), phase)

    def _mark(self, action: StageAction | None, phase: Phase) -> None:
        recorder = self.recorder
        if recorder.before_first is not None:
            recorder.before_first()
        recorder.set_phase(phase)
        if recorder.ledger.recording:
            index = recorder.ledger.operation = len(recorder.operations)
            recorder.operations.append(Operation(index, "pipeline.action", phase))
            self.actions.append((index, action))

    @contextmanager
    def trace(self, phase: Phase) -> Iterator[None]:
        """Traces the module of a stage, or the loss."""
        self._set_phase(phase)
        try:
            yield
        finally:
            self._tracer.set_phase(None)

    def _compute_loss(self, output: Any, _target: Any, **_: Any) -> Tensor:
        loss, at = self._step.loss, self._losses
        self._losses += 1
        if at == len(self._targets):
            make_target = loss.make_target
            self._targets.append(None if make_target is None else make_target(output))
        with self.trace(Phase.LOSS):
            return self.hold("loss", loss.compute(output, self._targets[at]))

    def _merge_outputs(self, chunks: Sequence[Any]) -> Any:
        self._mark(None, Phase.OPTIMIZER)
        return self._merge(chunks)

    def _begin_backward(self, losses: Any) -> None:
        pass  # a stage says that it begins

    def _run_engine(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def _named_inputs(self) -> NamedInputs:
        return [("input", (self._step.args, self._step.kwargs))]

    def _label_residents(self) -> None:
        super()._label_residents()
        self.recorder.label(self._targets, Category.INPUT, "target")
        for stage in self._stages:
            for received, category in (
                (stage.args_recv_info, Category.INPUT),
                (stage.grad_recv_info, Category.GRADIENT),
            ):
                for info in (info for infos in received.values() for info in infos):
                    name = f"{name_stage(stage.stage_index)}: received"
                    self.recorder.label(getattr(info, "buffer", None), category, name)
