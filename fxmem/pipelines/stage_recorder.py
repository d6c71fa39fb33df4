"""Recording of a pipeline's stage: each work on one micro-batch, twice."""

from __future__ import annotations

import bisect
import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.pipelining.stage import PipelineStage

from fxmem.errors import TraceError
from fxmem.graph import RESIDENT, Category, MemoryGraph, Operation, Phase
from fxmem.kernels.registry import Target
from fxmem.memory.timeline import Action, build_timeline
from fxmem.pipelines.rank_replay import Change, RecordedStage, RecordedWork, Slot, Work
from fxmem.recording.assemble import assemble_graph
from fxmem.recording.recorder import Recorder
from fxmem.recording.residents import allocate_model, label_gradients, label_residents
from fxmem.recording.size_hints import SizeHints
from fxmem.recording.step import Step, imitate_target, lay_out
from fxmem.tracing.fxgraph import iterate_tensors

_BUFFER = "pipeline buffer"


class TensorMeta(NamedTuple):
    """A tensor that one stage sends to the next."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class StagePlace:
    """A stage in its pipeline."""

    index: int
    stages: int  # how many there are
    received: tuple[TensorMeta, ...]  # what the stage before sends; empty for the first
    microbatches: int  # of a step
    works: frozenset[Work]  # of the schedule
    return_outputs: bool  # whether the last stage keeps its results for the caller


def record_stage(
    place: StagePlace, target: Target, step: Step, *, hints: SizeHints | None = None
) -> tuple[RecordedStage, tuple[TensorMeta, ...]]:
    """Records a stage; to be called with the fake mode of the step's model active.

    Args:
        place: Its place in the pipeline.
        target: The device whose kernels run it.
        step: Its module, the inputs of all micro-batches, the loss and the optimizer.
        hints: How many elements ``nonzero`` and the like find; None to refuse them.

    Returns:
        The recorded stage, and what it sends to the next one.
    """
    recorder = Recorder(target, hints)
    with imitate_target(recorder, target):
        runner = _StageRunner(step, target, recorder, place)
        with recorder:
            runner.run()
    return runner.describe(), runner.sent


class _Stage(PipelineStage):
    """PyTorch's stage without a process group: what it would receive is there."""

    def __init__(self, module: nn.Module, place: StagePlace) -> None:
        self.submod, self.stage_index, self.num_stages = module, place.index, place.stages
        self.dw_builder, self.log_prefix, self.has_backward = None, "", True
        self.fwd_cache, self.bwd_cache, self.output_chunks = {}, {}, []
        self.backward_state, self.dw_runner, self.args_recv_info = {}, {}, {}
        self._runtime_validate = False
        self._stage_meta: Any = SimpleNamespace(inputs=place.received)
        self.received: dict[int, tuple[Tensor, ...]] = {}  # buffers, by micro-batch
        self.gradients: dict[int, tuple[Tensor | None, ...]] = {}

    def _check_chunk_id(self, chunk_id: int) -> None: ...

    def _validate_fwd_input(self, *values: object) -> None: ...  # up to torch 2.11

    def _validate_fwd_outputs(self, *values: object) -> None: ...

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        return self.received[fwd_chunk_id]

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        return self.gradients[bwd_chunk_id]


class _Span(NamedTuple):
    """A run of recorded operations."""

    start: int  # index of its first operation; it ends where the next one begins
    microbatch: int
    work: Work | None  # None for what ends a step
    is_after: bool  # whether it follows what the work returned


class _StageRunner:
    """Runs the works of a stage, and describes them."""

    def __init__(self, step: Step, target: Target, recorder: Recorder, place: StagePlace) -> None:
        step = lay_out(step, recorder)
        if isinstance(step.model, nn.parallel.DistributedDataParallel):
            raise TraceError(
                "a pipeline's stages under DistributedDataParallel are not supported",
                hint="fully_shard, or the stages alone: the gradients' buckets come on top",
            )
        self.sent: tuple[TensorMeta, ...] = ()
        self._step, self._recorder, self._place = step, recorder, place
        self._device = target.device
        self._is_last = place.index == place.stages - 1
        self._stage = _Stage(step.model, place)
        parameters = [*step.model.parameters()]
        self._optimizer = step.make_optimizer(parameters) if step.make_optimizer else None
        self._chunks: tuple[list[Any], list[Any]] = ([], [])
        self._target: Any = None
        self._losses: dict[int, Tensor] = {}
        self._merged: tuple[int, ...] = ()
        self._spans: list[_Span] = []
        self._returned: dict[tuple[int, Work], tuple[int, ...]] = {}  # storages

    def run(self) -> None:
        """Runs each work unseen, and then recorded: on a first micro-batch and on a later one."""
        recorder, place = self._recorder, self._place
        allocate_model(recorder, self._step.model)
        self._label_residents()
        self._chunks = split_args_kwargs_into_chunks(
            self._step.args, dict(self._step.kwargs), place.microbatches
        )
        families = [[Work.BACKWARD], [Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT]]
        families = [family for family in families if place.works.issuperset(family)]
        for family in families:
            self._run_microbatch(0, family)
            self._end_schedule()
        self._run_optimizer()
        self._end_step()
        gc.collect(0)  # as between steps (fxmem.recording.step)
        for microbatch in range(2 * len(families)):
            self._make_buffers(microbatch)
        self._label_residents()
        recorder.begin_step()
        for at, family in enumerate(families):
            self._run_microbatch(2 * at, family)
            self._run_microbatch(2 * at + 1, family)
            self._end_schedule()
            if at == 0:
                self._run_optimizer()
            self._end_step()
        recorder.end_step()

    def _run_microbatch(self, microbatch: int, family: Sequence[Work]) -> None:
        self._make_buffers(microbatch)
        self._run_forward(microbatch)
        self._make_buffers(microbatch)  # whose number is known from here on
        stage, label = self._stage, self._recorder.label
        for work in family:
            self._mark(microbatch, work, Phase.BACKWARD)
            if work is Work.BACKWARD_WEIGHT:
                stage.backward_weight_one_chunk(microbatch)
            else:
                is_full = work is Work.BACKWARD
                loss = self._losses.get(microbatch)
                stage.backward_one_chunk(microbatch, loss=loss, full_backward=is_full)
            label_gradients(self._recorder, self._step.model, ())
            label(gradients := stage.bwd_cache.pop(microbatch, None), Category.GRADIENT)
            self._returned[microbatch, work] = self._recorder.find_storages(gradients)
            self._mark(microbatch, work, Phase.BACKWARD, is_after=True)
            del gradients

    def _run_forward(self, microbatch: int) -> None:
        place, recorder = self._place, self._recorder
        self._mark(microbatch, Work.FORWARD, Phase.FORWARD)
        args, kwargs = (chunks[microbatch % place.microbatches] for chunks in self._chunks)
        kept = {} if place.return_outputs else {"save_forward_output": False}
        output = self._stage.forward_one_chunk(microbatch, args, kwargs, **kept)
        recorder.label(output, Category.OUTPUT)
        self._returned[microbatch, Work.FORWARD] = recorder.find_storages(output)
        self._mark(microbatch, Work.FORWARD, Phase.LOSS, is_after=True)
        tensors = [*iterate_tensors(output)]
        if not self._is_last:
            given = output if isinstance(output, tuple | list) else [output]
            if other := [type(value).__name__ for value in given if not isinstance(value, Tensor)]:
                raise TraceError(
                    f"stage {place.index} returns {' and '.join(other)}, which cannot be sent",
                    hint="a stage that another follows returns a tensor or a tuple of tensors",
                )
            self.sent = tuple(
                TensorMeta(tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors
            )
            return
        if place.return_outputs:
            self._merged = tuple(place.microbatches * t.numel() * t.itemsize for t in tensors)
        if self._target is None and self._step.loss.make_target is not None:
            self._target = self._step.loss.make_target(output)
        loss = self._losses[microbatch] = self._step.loss.compute(output, self._target)
        recorder.label(loss, Category.OUTPUT, "loss")

    def _end_schedule(self) -> None:
        self._mark(-1, Work.REDUCE_GRAD, Phase.BACKWARD)
        if hasattr(self._stage, "perform_reduce_grad"):  # before 2.10, none is to be reduced
            self._stage.perform_reduce_grad(self._place.microbatches)
            label_gradients(self._recorder, self._step.model, ())

    def _run_optimizer(self) -> None:
        self._mark(-1, Work.OPTIMIZER, Phase.OPTIMIZER)
        if self._optimizer is not None:
            self._optimizer.step()

    def _end_step(self) -> None:
        """Frees what the next step frees before its first forward."""
        self._mark(-1, None, Phase.OPTIMIZER)
        self._losses.clear()
        self._stage.clear_runtime_states()
        for buffer in (buffer for made in self._stage.received.values() for buffer in made):
            buffer.grad = None
        self._step.model.zero_grad()

    def _make_buffers(self, microbatch: int) -> None:
        """Makes the buffers of a micro-batch, as far as their number is known."""
        for metas, buffers, category in (
            (self._place.received, self._stage.received, Category.INPUT),
            (self.sent, self._stage.gradients, Category.GRADIENT),
        ):
            is_input, made = category is Category.INPUT, list[Any]()
            for meta in metas if microbatch not in buffers else ():
                is_made = is_input or meta.requires_grad
                buffer = torch.empty_strided(*meta[:2], dtype=meta.dtype) if is_made else None
                if isinstance(buffer, FakeTensor):
                    buffer.fake_device = self._device
                    buffer.requires_grad_(is_input and meta.requires_grad)
                self._recorder.label(buffer, category, _BUFFER)
                made.append(buffer)
            if made:
                buffers[microbatch] = tuple(made)

    def _label_residents(self) -> None:
        step = self._step
        label_residents(
            self._recorder,
            step.model,
            [("input", (step.args, step.kwargs))],
            target=self._target,
            loss=step.loss.function,
            optimizer=self._optimizer,
            scaler_state=None,
        )

    def _mark(
        self, microbatch: int, work: Work | None, phase: Phase, *, is_after: bool = False
    ) -> None:
        """Begins a run of operations, by one of its own: what is freed next belongs to it."""
        recorder = self._recorder
        recorder.set_phase(phase)
        if recorder.ledger.recording:
            index = recorder.ledger.operation = len(recorder.operations)
            recorder.operations.append(Operation(index, "pipeline.work", phase))
            self._spans.append(_Span(index, microbatch, work, is_after))

    # -- what was recorded ---------------------------------------------------------------------

    def describe(self) -> RecordedStage:
        """Describes the stage by its changes of memory."""
        place, graph = self._place, assemble_graph(self._recorder, ())
        resident: list[tuple[str, Category, int]] = []
        for storage in graph.storages:
            if storage.born == RESIDENT and storage.name != _BUFFER:
                times = place.microbatches if storage.name == "target" else 1
                resident += [(storage.name, storage.category, storage.nbytes)] * times
        first, later = self._describe_works(graph)
        return RecordedStage(
            is_last=self._is_last,
            resident=tuple(resident),
            first=first,
            later=later,
            input_buffers=_measure(self._stage.received.get(0, ())),
            gradient_buffers=_measure(self._stage.gradients.get(0, ())),
            merged=self._merged,
        )

    def _describe_works(
        self, graph: MemoryGraph
    ) -> tuple[dict[Work, RecordedWork], dict[Work, RecordedWork]]:
        """Describes the works on a first micro-batch, and those on later ones."""
        starts = [span.start for span in self._spans]
        changes: dict[_Span, list[Change]] = {span: [] for span in self._spans}
        slots: dict[int, tuple[int, Slot]] = {}  # by storage; -1 for all micro-batches
        counts: Counter[tuple[int, Work, bool]] = Counter()

        def find_span(operation: int | None) -> _Span:
            at = 0 if operation is None else bisect.bisect_right(starts, operation)
            return self._spans[at - 1]  # for None the last one, which ends the step

        def add_slot(index: int, born: _Span, work: Work, died: _Span) -> None:
            # What a micro-batch keeps has the same numbers in all of them.
            is_kept = born[1:3] != died[1:3]
            is_shared = is_kept and died.microbatch == -1 and died.work is not None
            key = born.microbatch, work, is_kept and not is_shared
            number = counts[key] if key[2] else ~counts[key]
            counts[key] += 1
            slots[index] = -1 if is_shared else born.microbatch, (work, number)

        for event in build_timeline(graph).events:
            span, slot, category = find_span(event.step), None, Category.WORKSPACE
            if event.step < starts[0] or span.work is None:
                continue
            is_shared = False
            if event.storage is not None:
                storage = graph.storages[event.storage]
                category, death = storage.category, find_span(storage.died)
                if event.action is Action.ALLOC:
                    add_slot(event.storage, span, span.work, death)
                maker, slot = slots.get(event.storage, (None, (span.work, 0)))
                is_shared = maker == -1
                if maker not in (-1, span.microbatch) or (
                    is_shared and span.microbatch % 2 and span.microbatch > 0
                ):
                    self._refuse(f"frees {storage.name!r}, which it made for another")
                if category is Category.TEMPORARY and death[1:3] != (span.microbatch, slot[0]):
                    is_sum = is_shared and span.work is not Work.FORWARD  # of whole gradients
                    category = Category.GRADIENT if is_sum else Category.ACTIVATION
            change = Change(slot, event.delta_bytes, category, event.block, event.stream, is_shared)
            changes[span].append(change)
        described: tuple[dict[Work, RecordedWork], dict[Work, RecordedWork]] = ({}, {})
        for at, span in enumerate(self._spans):
            if span.work is None or span.is_after:
                continue
            made = self._returned.get((span.microbatch, span.work), ())
            after = self._spans[at + 1]
            work = RecordedWork(
                during=tuple(changes[span]),
                after=tuple(changes[after]) if after.is_after else (),
                returned=tuple(slots[index][1] for index in made if index in slots),
            )
            described[span.microbatch % 2].setdefault(span.work, work)
            if span.work is Work.FORWARD and _list_kept(work) != _list_kept(
                described[0][span.work]
            ):
                self._refuse("keeps other tensors than for the first")
        return described

    def _refuse(self, what: str) -> NoReturn:
        raise TraceError(
            f"for its second micro-batch, stage {self._place.index} {what}",
            hint="one is recorded for all, so they must be alike; under fully_shard, with "
            "reshard_after_forward=False",
        )


def _list_kept(work: RecordedWork) -> list[tuple[Slot, int]]:
    kept = ((c.slot, c.nbytes) for c in (*work.during, *work.after) if not c.is_shared)
    return [(slot, nbytes) for slot, nbytes in kept if slot and slot[1] >= 0 and nbytes > 0]


def _measure(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    return tuple(t.untyped_storage().nbytes() for t in tensors if t is not None)
