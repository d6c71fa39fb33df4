"""Plans as pure data: the segments to recompute, operations in place, and values to delete."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from fxmem.errors import UsageError
from fxmem.graph import MemoryGraph, Phase, SourceLocation
from fxmem.report.blocks import Block
from fxmem.report.formats import TIMELINE, TRADEOFF
from fxmem.report.result import Result

if TYPE_CHECKING:
    from fxmem.analysis import Analysis
    from fxmem.planning.outcome import PlannedStep

PLAN_VERSION = 3
_HALF = 8
"""Digits of a fingerprint that are of the nodes; as many follow, of their shapes."""
GRAPH, MODULES = STYLES = ("graph", "modules")
"""Styles of applying a plan: the model's graph is rewritten, or its modules are checkpointed."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive nodes that forward runs without saving and backward recomputes.

    Attributes:
        first: Name of the first node.
        last: Name of the last node.
        nodes: The number of nodes.
        fqn: The module whose call they are; empty where they are no module's.
        source: The user's line of the first node.
        saving_bytes: The rise of the plan's peak without the segment.
        recompute_s: Seconds that it adds: by the roofline, and for running again at all.
        recompute_flops: FLOPs of the recomputation.
        random: Whether it may draw random numbers, whose generator's state is then kept.
        runs_whole: Whether backward runs the whole segment again, not only up to the last save.
        norms: Modules of its batch normalisations, which the recomputation must not update.
        states: Names of other buffers that it changes, such as the vectors of spectral
            normalisation: the recomputation must begin with their former values.
        children: Segments within, recomputed once more when backward needs what they hold.
    """

    first: str
    last: str
    nodes: int
    fqn: str = ""
    source: SourceLocation | None = None
    saving_bytes: int = 0
    recompute_s: float = 0.0
    recompute_flops: int = 0
    random: bool = True
    runs_whole: bool = False
    norms: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    children: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class InplaceChange:
    """An operation that can overwrite its input.

    Attributes:
        node: Its name.
        call: The call in its place, e.g. ``relu_``.
        source: The user's line.
        saving_bytes: The fall of the step's peak with this change alone in your code.
        overwrites: Name of the node whose result it overwrites: for ``add_`` and ``mul_``, the
            one of the two that the method is called on.
    """

    node: str
    call: str
    source: SourceLocation | None = None
    saving_bytes: int = 0
    overwrites: str = ""


@dataclass(frozen=True, slots=True)
class DelPoint:
    """A value that the user's code keeps longer than it uses the value.

    Attributes:
        value: Name of the node that made it.
        variable: The variable to delete; empty where none can be named.
        after: Name of the node after which nothing uses the value.
        source: The user's line of that node, after which ``del`` takes effect.
        saving_bytes: The fall of the step's peak with this change alone in your code.
    """

    value: str
    variable: str
    after: str
    source: SourceLocation | None = None
    saving_bytes: int = 0


class LimitKind(str, Enum):
    """The use of a node, or of a module, that plans have to do without."""

    RECOMPUTE = "RECOMPUTE"  # the node is not recomputed; so no segment begins with it either
    BEGIN = "BEGIN"  # no segment begins with the node
    MODULE = "MODULE"  # the module of that name is not recomputed


@dataclass(frozen=True, slots=True)
class Limit:
    """A node or module that plans must not recompute, or not start at."""

    node: str  # its name
    kind: LimitKind
    reason: str  # the words that follow the name
    fqn: str = ""  # the module that it is or lies in; empty for the model itself
    source: SourceLocation | None = None


@dataclass(frozen=True, slots=True)
class Plan(Result):
    """A way to run a step in less memory.

    Attributes:
        fingerprint: Of the graph that the plan was made for.
        baseline_peak_bytes: The peak without the plan.
        peak_bytes: The peak with the plan.
        reserved_bytes: The caching allocator's share of the device then; the peak on the CPU.
        overhead: Added time, as a share of the step's by the roofline of the target.
        overhead_flops: Added FLOPs, as a share of the step's.
        segments: The nodes that are recomputed.
        inplace: Operations that can run in place: under :func:`fxmem.apply` in inference, as part
            of ``peak_bytes``; in training, changes to the user's own code.
        dels: Values that the user's code holds longer than it uses them, where that raises the
            step's peak. The code that :func:`fxmem.apply` runs frees these and all others after
            their last use; part of ``peak_bytes``.
        lower_bound_overhead: No recomputation adds less for that peak; None where no bound was
            worked out, as in :func:`fxmem.pareto`.
        limits: The nodes that no plan recomputes, or begins a segment with, and why; of a
            plan of modules, the modules.
        mode: Of the step, ``"train"`` or ``"infer"``: the calls of a model that it is for.
        style: How it is applied: ``"graph"`` rewrites the model's graph; with ``"modules"`` each
            segment is all of a module's call, and its ``fqn`` says whose.
        size_hint: What was assumed of sizes that depend on data; None for nothing.
        fx_graph: The ``torch.fx.Graph`` of the model, where the plan was made in this process.
        analysis: The analysis that the plan was made from, if in this process; of one rank of many
            processes, the analysis of the step with the plan.
    """

    fingerprint: str
    baseline_peak_bytes: int
    peak_bytes: int
    reserved_bytes: int = 0
    overhead: float = 0.0
    overhead_flops: float = 0.0
    segments: tuple[Segment, ...] = ()
    inplace: tuple[InplaceChange, ...] = ()
    dels: tuple[DelPoint, ...] = ()
    lower_bound_overhead: float | None = None
    limits: tuple[Limit, ...] = ()
    mode: str = "train"
    style: str = GRAPH
    size_hint: int | Mapping[str, int] | None = None
    fx_graph: Any = field(default=None, repr=False, compare=False)
    analysis: Analysis | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies go without the analysis: it holds a model, and functions that cannot be pickled.
        return Plan, tuple(getattr(self, each.name) for each in fields(self)[:-1])

    def __repr__(self) -> str:
        return (
            f"Plan(baseline_peak_bytes={self.baseline_peak_bytes}, peak_bytes={self.peak_bytes}, "
            f"overhead={self.overhead:.3g}, mode={self.mode!r}, style={self.style!r}, "
            f"segments=<{len(self.segments)}>, inplace=<{len(self.inplace)}>, "
            f"dels=<{len(self.dels)}>)"
        )

    @property
    def applied_inplace(self) -> tuple[InplaceChange, ...]:
        """Those of ``inplace`` that :func:`fxmem.apply` makes."""
        return self.inplace if self.mode == "infer" else ()

    @property
    def gap(self) -> float | None:
        """The most overhead that a better plan could avoid; None where no bound is known."""
        if self.lower_bound_overhead is None:
            return None
        return max(0.0, self.overhead - self.lower_bound_overhead)

    def check(self, graph: MemoryGraph, command: str = "fxmem plan -o") -> None:
        """Checks that the plan was made for a step, and names the command that makes another.

        Raises:
            UsageError: The plan was made for another model, other inputs, or other sizes of either.
        """
        found = fingerprint_graph(graph)
        if found == self.fingerprint:
            return
        if found[:_HALF] == self.fingerprint[:_HALF]:
            cause = "the plan was made for other sizes, of the inputs or of the model's layers"
        else:
            cause = "the plan was made for another model or other inputs"
        raise UsageError(cause, hint=f"make a new one with {command}")

    def trace(self, analysis: Analysis) -> PlannedStep | None:
        """Traces the step that the plan makes; None where its peak is not what the plan says."""
        from fxmem.planning.outcome import trace_plan

        return trace_plan(analysis, self)

    def find_step(self, analysis: Analysis) -> Analysis | None:
        """Finds the analysis of the step with the plan; None as :meth:`trace`.

        Plans of a rank hold what was recorded.
        """
        if analysis.setup.mesh is not None:
            return self.analysis
        step = self.trace(analysis)
        return None if step is None else step.analysis

    def list_blocks(self) -> list[Block]:
        from fxmem.planning.plan_blocks import list_plan_blocks

        return list_plan_blocks(self)

    def list_bars(self) -> Mapping[str, int | None]:
        return {"without the plan": self.baseline_peak_bytes, "with the plan": self.peak_bytes}

    def draw_pictures(self) -> Iterator[tuple[str, bytes]]:
        if self.analysis is not None:
            plan = None if self.analysis.setup.mesh else self
            yield from self.analysis.draw([TIMELINE], plan=plan)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(strip_plan(self))
        del values["fx_graph"], values["analysis"]
        return {"plan_version": PLAN_VERSION, **values}

    def to_json(self, indent: int | None = 2) -> str:
        """Writes the plan as JSON, which :meth:`from_json` reads."""
        return Result.to_json(self, indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads a plan from a JSON text.

        Raises:
            UsageError: The text is not a plan, or of a version that this fxmem does not know.

        >>> plan = Plan("0123", 200, 100, 100, 0.25, segments=(Segment("a", "b", 2),))
        >>> Plan.from_json(plan.to_json()) == plan
        True
        """
        try:
            fields = json.loads(text)
            version = fields.pop("plan_version")
        except (ValueError, AttributeError, KeyError, TypeError):
            raise UsageError("this is not an fxmem plan", hint="fxmem plan -o writes one") from None
        if version != PLAN_VERSION:
            raise UsageError(
                f"a plan of version {version!r}; this fxmem reads {PLAN_VERSION}",
                hint="make a new plan",
            )
        parts = {"segments": Segment, "inplace": InplaceChange, "dels": DelPoint, "limits": Limit}
        try:
            for name, part in parts.items():
                fields[name] = tuple(_read(part, entry) for entry in fields[name])
            return cls(**fields)
        except (TypeError, KeyError, ValueError) as error:
            raise UsageError(f"the plan is damaged: {error}", hint="make a new one") from None


def strip_plan(plan: Plan) -> Plan:
    """Leaves out of a plan all that is not in its JSON: the traced model, and its analysis."""
    return replace(plan, fx_graph=None, analysis=None)


@dataclass(frozen=True, slots=True)
class CheckpointPrice:
    """A step with the checkpoints of a library; added time and FLOPs as shares of the step's."""

    call: str  # of the model, which turns them on
    peak_bytes: int
    overhead: float
    overhead_flops: float


class Front(Result, tuple[Plan, ...]):
    """The trade-offs of a step, cheapest first: a tuple of plans that shows itself as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        ends = " ... ".join(str(plan.peak_bytes) for plan in self[:: max(len(self) - 1, 1)])
        return f"Front(<{len(self)} plans>, peak_bytes=<{ends}>)"

    def list_blocks(self) -> list[Block]:
        from fxmem.planning.plan_blocks import list_front_blocks

        return list_front_blocks(self)

    def draw_pictures(self) -> Iterator[tuple[str, bytes]]:
        if self[0].analysis is not None:
            yield from self[0].analysis.draw([TRADEOFF], front=tuple(self))

    def to_json(self, indent: int | None = 2) -> str:
        """Writes the plans as a list."""
        return json.dumps([plan.to_dict() for plan in self], indent=indent)


_Part = TypeVar("_Part", Segment, InplaceChange, DelPoint, Limit)


def _read(part: type[_Part], entry: Mapping[str, Any]) -> _Part:
    source = entry["source"]
    read = {**entry, "source": None if source is None else SourceLocation(**source)}
    if part is Segment:
        read |= {name: tuple(entry[name]) for name in ("norms", "states")}
        read["children"] = tuple(_read(Segment, child) for child in entry["children"])
    elif part is Limit:
        read["kind"] = LimitKind(entry["kind"])
    return part(**read)


def fingerprint_graph(graph: MemoryGraph) -> str:
    """Digests the nodes of a model (the first half) and their shapes (the second).

    The loss does not count, nor do dtypes, which autocast decides.
    """
    nodes = [node for node in graph.nodes if node.phase is Phase.FORWARD]
    described = [(node.name, node.target, node.inputs) for node in nodes]
    parts = (described, [node.shape for node in nodes])
    return "".join(hashlib.sha256(repr(part).encode()).hexdigest()[:_HALF] for part in parts)
