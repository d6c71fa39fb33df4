"""Analyses: every number of one step, as pure data."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fxmem.errors import UsageError
from fxmem.finding import Finding, find_findings
from fxmem.gpus import CONTEXT_BYTES, NCCL_BYTES, GpuModel
from fxmem.graph import Category, MemoryGraph, Node, Phase, SavedTensor, SourceLocation
from fxmem.memory.allocation import (
    Allocation,
    DeviceRun,
    Exhaustion,
    allocate_graph,
    find_first_operation,
    find_warmup_peak,
    run_on_device,
)
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.memory.labels import label_storages
from fxmem.memory.liveness import MemoryProfile, Peak, build_profile, list_category_bytes
from fxmem.memory.module_tree import Module, build_modules
from fxmem.memory.timeline import Timeline, build_timeline
from fxmem.report.blocks import Block
from fxmem.report.document import build_document
from fxmem.report.formats import (
    GRAPH,
    TIMELINE,
    RenderOptions,
    draw_picture,
    encode,
    render,
    render_as,
)
from fxmem.report.json_report import (
    list_values,
    parse_report,
    read_graph,
    read_record,
    refuse_damage,
)
from fxmem.report.result import Result
from fxmem.report.text import list_modules, list_step_blocks
from fxmem.setup import Setup

if TYPE_CHECKING:
    import graphviz
    import networkx

    from fxmem.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The most of the first step, in which the optimizer's state is made.

    From the model's move to the device on, as ``torch.cuda.max_memory_allocated()`` returns
    after one step.
    """

    peak_bytes: int
    reserved_bytes: int
    requested_bytes: int
    phase: Phase
    node: str | None  # the node that runs at the peak, or whose backward does
    source: SourceLocation | None


@dataclass(frozen=True)
class Analysis(Result):
    """The memory of a step in bytes: how much, when it peaks and what is alive there.

    Attributes:
        setup: The analysed step, as text.
        graph: The memory graph that everything else is computed from, in requested bytes.
        settings: Settings of the caching allocator; None where there is none, as on the CPU.
        gpu: The target GPU; None for any.
        fx_graph: The ``torch.fx.Graph`` of the model, with the nodes of the memory graph.
        blueprint: The parts of the step, on fake inputs; for :attr:`graph_module`.
    """

    setup: Setup
    graph: MemoryGraph
    settings: AllocatorSettings | None = None
    gpu: GpuModel | None = None
    fx_graph: Any = field(default=None, repr=False, compare=False)
    blueprint: Any = field(default=None, repr=False, compare=False)

    @cached_property
    def allocation(self) -> Allocation | None:
        """The step as the caching allocator serves it; None where there is none."""
        return None if self.settings is None else allocate_graph(self.graph, self.settings)

    @property
    def allocated_graph(self) -> MemoryGraph:
        """The memory graph in bytes as the allocator hands them out."""
        return self.allocation.graph if self.allocation else self.graph

    @cached_property
    def timeline(self) -> Timeline:
        """Allocations and frees of the step, in order."""
        return build_timeline(self.allocated_graph)

    @cached_property
    def profile(self) -> MemoryProfile:
        """Live bytes of each operation, and the peak."""
        return build_profile(self.allocated_graph, self.timeline)

    @property
    def peak(self) -> Peak:
        """The moment of the peak: its step, phase, node, source line and live set."""
        return self.profile.peak

    @property
    def peak_bytes(self) -> int:
        """Most bytes allocated at any moment, everything included."""
        return self.peak.nbytes

    @property
    def reserved_bytes(self) -> int:
        """Most bytes the allocator holds; the CPU's caches nothing, so the peak itself.

        On the target GPU, if the step fits it, else in unlimited memory.
        """
        if self.allocation is None:
            return self.peak_bytes
        run = self.device_run
        if run is not None and (run.exhaustion is None or not run.exhaustion.is_certain):
            return run.reserved_bytes
        return max(self.allocation.reserved_bytes, default=self.allocation.start_reserved_bytes)

    @property
    def requested_bytes(self) -> int:
        """Most requested bytes in use, before the allocator rounds them."""
        return self.peak_bytes if self.allocation is None else max(self.allocation.requested_bytes)

    @cached_property
    def first_step(self) -> FirstStep | None:
        """The peak of the first step, where all other figures are the second step's.

        None in a saved report, for a step of a script, and for a generation, which is one alone.
        """
        graph = self.graph
        if self.setup.window or self.setup.mode == "generate":
            return None
        warmup = find_warmup_peak(graph) if self.allocation is None else self.allocation.warmup
        if warmup is None:
            return None
        first = find_first_operation(graph, warmup.event)
        twin = None if first is None or first.twin is None else graph.operations[first.twin]
        node = None if twin is None or twin.node is None else graph.nodes[twin.node]
        return FirstStep(
            peak_bytes=warmup.allocated_bytes,
            reserved_bytes=warmup.reserved_bytes,
            requested_bytes=warmup.requested_bytes,
            phase=Phase.FORWARD if first is None else first.phase,
            node=None if node is None else node.name,
            source=None if node is None else node.source,
        )

    @property
    def fragmentation_bytes(self) -> int:
        """Bytes that the allocator holds at the peak beyond the allocated ones."""
        if self.allocation is None:
            return 0
        live = self.timeline.live_bytes()
        return self.allocation.reserved_bytes[live.index(max(live))] - max(live)

    @property
    def library_peak_bytes(self) -> int:
        """The peak if every library took the most that it may: cuDNN's convolutions."""
        operations = zip(self.profile.live_bytes, self.graph.operations, strict=True)
        return max(live + operation.library_bytes for live, operation in operations)

    @cached_property
    def context_bytes(self) -> tuple[int, int]:
        """Least and most bytes outside of the allocator: CUDA's context and NCCL's buffers.

        Zero on the CPU. NCCL has a communicator for each group of ranks that communicates.
        """
        if self.settings is None:
            return 0, 0
        groups = {operation.group for operation in self.graph.operations if operation.group}
        least, most = zip(CONTEXT_BYTES, NCCL_BYTES, strict=True)
        return least[0] + len(groups) * least[1], most[0] + len(groups) * most[1]

    @cached_property
    def device_run(self) -> DeviceRun | None:
        """The step in the memory of the target GPU; None without one.

        The CUDA context, with NCCL's buffers, takes the most memory that was ever seen. A step
        that does not fit beside it runs beside the least instead; where it fits then, its
        exhaustion is not certain.
        """
        if self.settings is None or self.gpu is None:
            return None
        capacity_bytes, (least, most) = self.gpu.capacity_bytes, self.context_bytes
        run = run_on_device(self.graph, self.settings, capacity_bytes, most)
        if run.exhaustion is None:
            return run
        other = run_on_device(self.graph, self.settings, capacity_bytes, least)
        if other.exhaustion is not None:
            return other
        return replace(other, exhaustion=replace(run.exhaustion, is_certain=False))

    @property
    def exhaustion(self) -> Exhaustion | None:
        """Where the step runs out of the GPU's memory; None where it fits, or without a GPU."""
        return None if self.device_run is None else self.device_run.exhaustion

    @property
    def fits(self) -> bool | None:
        """True if the step fits the GPU's memory; None where that is unknown, or without a GPU.

        Unknown is what the size of the CUDA context decides, and whether code that compiles fits
        where eager mode does not.
        """
        if self.device_run is None or self.exhaustion is None:
            return None if self.device_run is None else True
        is_eager = self.setup.compile == "left out"
        return False if self.exhaustion.is_certain and not is_eager else None

    @property
    def process_bytes(self) -> tuple[int, int] | None:
        """Bytes that ``nvidia-smi`` shows for the process, least and most; None on the CPU.

        The sum of :attr:`reserved_bytes` and :attr:`context_bytes`, without cuDNN's workspaces
        for convolutions.
        """
        if self.settings is None:
            return None
        least, most = (self.reserved_bytes + nbytes for nbytes in self.context_bytes)
        if self.gpu is not None and least <= self.gpu.capacity_bytes:
            most = min(most, self.gpu.capacity_bytes)
        return least, most

    @property
    def breakdown(self) -> Mapping[Category, int]:
        """Bytes by category at the peak; they sum to :attr:`peak_bytes`."""
        return self.profile.breakdown

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        """Storages that autograd saves for backward, each once."""
        return self.graph.saved

    @property
    def saved_bytes(self) -> int:
        """Activations saved for backward; parameters, buffers and inputs are not counted."""
        return sum(s.nbytes for s in self.saved if s.category is Category.ACTIVATION)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """A name for each storage, by its index (:func:`fxmem.memory.labels.label_storages`)."""
        return label_storages(self.graph)

    @cached_property
    def modules(self) -> Module:
        """The model as the root of the tree of its modules; ``walk()`` lists them all."""
        return build_modules(self.allocated_graph, self.peak)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the traced model, with their bytes and FLOPs."""
        return self.graph.nodes

    @property
    def frontend(self) -> str:
        """``fx`` or ``record``: which tracer served."""
        return self.setup.frontend

    def _measure_kept(self, category: Category) -> int:
        # A gradient or state that the step replaces is in the graph twice, old and new: only
        # storages that outlive the step are kept.
        storages = (s for s in self.graph.storages if s.category is category and s.died is None)
        return sum(storage.nbytes for storage in storages)

    @property
    def parameter_bytes(self) -> int:
        """All parameters, shared ones once."""
        return self._measure_kept(Category.PARAMETER)

    @property
    def buffer_bytes(self) -> int:
        """All buffers, and other tensors that the model keeps from step to step."""
        return self._measure_kept(Category.BUFFER)

    @property
    def input_bytes(self) -> int:
        """The step's inputs."""
        return sum(s.nbytes for s in self.graph.storages if s.category is Category.INPUT)

    @property
    def gradient_bytes(self) -> int:
        """The ``.grad`` of parameters and inputs that the step leaves."""
        return self._measure_kept(Category.GRADIENT)

    @property
    def optimizer_state_bytes(self) -> int:
        """Tensors that the optimizer keeps from step to step."""
        return self._measure_kept(Category.OPTIMIZER_STATE)

    @property
    def kv_cache_bytes(self) -> int:
        """The most that caches of keys and values take together."""
        return max(list_category_bytes(self.allocated_graph)[Category.KV_CACHE])

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of forward and loss; a multiply-add is 2."""
        return sum(node.forward_flops for node in self.nodes)

    @property
    def backward_flops(self) -> int:
        """Floating-point operations of backward, recomputation included."""
        return sum(node.backward_flops for node in self.nodes)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The findings that the report lists; a saved report has none."""
        return find_findings(self)

    def list_blocks(
        self, top: int = 10, nodes: bool = False, depth: int | None = None
    ) -> list[Block]:
        """Lists the blocks of the report.

        Args:
            top: Storages to list at the peak.
            nodes: Add a table of all nodes.
            depth: Add a table of the modules, of so many levels.
        """
        modules = [list_modules(self.modules, self.setup.model, depth)] if depth else []
        return list_step_blocks(build_document(self), top, nodes, modules)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain dicts, lists, strings and integers: what :meth:`to_json` writes."""
        return list_values(self)

    @classmethod
    def from_json(cls, text: str) -> Analysis:
        """Reads a saved report, which serves for drawing alone.

        Sizes are as the allocator handed them out. A report lacks the reserved bytes, and all that
        a plan is made from.

        Raises:
            UsageError: The text is no report, one of another version, or damaged.
        """
        report = parse_report(text)
        with refuse_damage():
            return cls(read_record(Setup, report), read_graph(report))

    @property
    def pictured(self) -> Analysis:
        """The step itself."""
        return self

    def draw(self, views: Iterable[str], **options: Any) -> Iterator[tuple[str, bytes]]:
        """Draws views of the step as SVG, as far as the programs are installed."""
        for view in views:
            with contextlib.suppress(UsageError):
                yield view, encode(render_as(self, "svg", RenderOptions(view, **options)))

    def draw_pictures(self) -> Iterator[tuple[str, bytes]]:
        return self.draw([TIMELINE, GRAPH])

    def render(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Draws a picture of the step: :func:`fxmem.render`, with its arguments."""
        render(self, path, **options)

    def to_graphviz(
        self, *, depth: int | None = None, expand: bool = False, plan: Plan | None = None
    ) -> graphviz.Digraph:
        """Draws the graph of the step as a ``graphviz.Digraph``, which a notebook shows.

        The arguments are as for :meth:`render`. ``pipe()`` and ``render()`` of the result draw
        with the system's Graphviz, or without one with graphviz-pure.
        """
        return draw_picture(self, RenderOptions(GRAPH, depth, expand, plan))

    def to_networkx(self) -> networkx.DiGraph[str]:
        """Builds the graph of the traced nodes, annotated with their memory, for networkx.

        Returns:
            Nodes are the names of :attr:`nodes`, in order of execution, with ``fqn``, ``op``,
            ``target``, ``phase``, ``shape``, ``dtype``, ``source``, ``output_bytes``,
            ``saved_bytes``, ``transient_bytes``, ``live_at_peak_bytes``, ``is_peak``,
            ``forward_flops`` and ``backward_flops``. Edges lead to the nodes that take a result,
            with ``storages``, the bytes of its storages by index, and their sum ``nbytes``.
            The graph has ``model``, ``peak_bytes`` and ``phase``, that of the peak.
        """
        from fxmem.report.graph.view import build_digraph

        return build_digraph(build_document(self))

    def __repr__(self) -> str:
        setup = self.setup
        return (
            f"Analysis(model={setup.model!r}, inputs={setup.inputs!r}, mode={setup.mode!r}, "
            f"device={setup.device!r}, peak_bytes={self.peak_bytes})"
        )

    @cached_property
    def graph_module(self) -> Any:
        """The traced forward as a ``torch.fx.GraphModule`` that runs, its nodes annotated.

        See :func:`fxmem.training.annotation.make_graph_module`. None where the frontend is
        ``"record"``, for the reason in ``setup.frontend_reason``, and in a saved report.
        """
        return None if self.blueprint is None else self.blueprint.make_graph_module(self)
