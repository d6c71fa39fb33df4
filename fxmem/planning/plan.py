"""A plan: the segments to recompute, operations in place, and values to delete. Pure data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from fxmem.errors import UsageError
from fxmem.graph import SourceLocation

PLAN_VERSION = 3
GRAPH, MODULES = STYLES = ("graph", "modules")
"""How a plan is applied: the model's graph is rewritten, or modules of it run under checkpoints."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive nodes that forward runs without saving and backward runs again.

    Attributes:
        first: Name of its first node.
        last: Name of its last.
        nodes: How many they are.
        fqn: The module whose call they are; empty where they are no module's.
        source: The user's line of the first.
        saving_bytes: By how much the plan's peak would rise without it.
        recompute_s: Seconds that it takes to compute again, by the roofline.
        recompute_flops: FLOPs of that.
        random: Whether it draws random numbers, whose generator's state is then kept.
        norms: Its batch normalisations by their modules: what runs again must not update them.
        states: What else it changes, by name, as spectral normalisation's vectors: what runs
            again must begin with what they were.
        children: Segments within, run once more when backward needs what they hold.
    """

    first: str
    last: str
    nodes: int
    fqn: str = ""
    source: SourceLocation | None = None
    saving_bytes: int = 0
    recompute_s: float = 0.0
    recompute_flops: int = 0
    random: bool = False
    norms: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    children: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class InplaceChange:
    """An operation that can overwrite its input.

    Attributes:
        node: Its name.
        call: What to call instead, e.g. ``relu_``.
        source: The user's line.
        saving_bytes: How much lower the step's peak is with this change alone in your code.
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
    """A value that the user's code keeps longer than it uses it.

    Attributes:
        value: Name of the node that made it.
        variable: The variable to delete; empty where none can be named.
        after: Name of the node after which nothing uses it.
        source: The user's line of that node, after which ``del`` takes effect.
        saving_bytes: How much lower the step's peak is with this change alone in your code.
    """

    value: str
    variable: str
    after: str
    source: SourceLocation | None = None
    saving_bytes: int = 0


class LimitKind(str, Enum):
    """What plans may not do with a node."""

    RECOMPUTE = "RECOMPUTE"
    """Compute it again; so no segment begins with it either."""
    BEGIN = "BEGIN"
    """Begin a segment with it."""
    MODULE = "MODULE"
    """Compute the module of that name again."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A node, or a module, with which plans may not do all that they do with others.

    Attributes:
        node: Its name.
        kind: What they may not.
        reason: Why, as what follows the node's name.
        fqn: The module that it is or lies in; empty for the model itself.
        source: The user's line.
    """

    node: str
    kind: LimitKind
    reason: str
    fqn: str = ""
    source: SourceLocation | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a step takes less memory.

    Attributes:
        fingerprint: Of the graph that it was made for.
        baseline_peak_bytes: The peak without it.
        peak_bytes: The peak with it.
        reserved_bytes: What the caching allocator holds of the device then; the peak on the CPU.
        overhead: Seconds it adds, over those of the step, by the roofline of the target.
        overhead_flops: FLOPs it adds, over those of the step.
        segments: What is computed again.
        inplace: What is computed in place. :func:`fxmem.apply` does it; part of ``peak_bytes``.
        dels: What the user's code holds longer than it uses it, where that raises the step's peak.
            The code that :func:`fxmem.apply` runs lets go of these and all others after their
            last use; part of ``peak_bytes``.
        lower_bound_overhead: No plan that computes again adds less for that peak; None where
            that was not worked out, as in :func:`fxmem.pareto`.
        limits: The nodes that no plan computes again, or begins a segment with, and why; of a
            plan of modules, the modules.
        mode: Of the step, ``"train"`` or ``"infer"``: the calls of a model that it is for.
        style: How it is applied: ``"graph"`` rewrites the model's graph; with ``"modules"`` each
            segment is all of a module's call, and its ``fqn`` says whose.
        size_hint: What was assumed of sizes that depend on data; None for nothing.
        fx_graph: The ``torch.fx.Graph`` of the model, where the plan was made in this process.
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
    size_hint: int | None = None
    fx_graph: Any = field(default=None, repr=False, compare=False)

    @property
    def gap(self) -> float | None:
        """How much more than any plan must it may add, over the step; None where unknown."""
        if self.lower_bound_overhead is None:
            return None
        return max(0.0, self.overhead - self.lower_bound_overhead)

    def to_json(self, indent: int | None = 2) -> str:
        """The plan as JSON, which :meth:`from_json` reads."""
        fields = asdict(replace(self, fx_graph=None))
        del fields["fx_graph"]
        return json.dumps({"plan_version": PLAN_VERSION, **fields}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan of a JSON text.

        Raises:
            UsageError: The text is no plan, or of a version that this fxmem does not know.

        >>> plan = Plan("0123", 200, 100, 100, 0.25, segments=(Segment("a", "b", 2),))
        >>> Plan.from_json(plan.to_json()) == plan
        True
        """
        try:
            fields = json.loads(text)
            version = fields.pop("plan_version")
        except (ValueError, AttributeError, KeyError, TypeError):
            raise UsageError("this is no plan of fxmem", hint="fxmem plan -o writes one") from None
        if version != PLAN_VERSION:
            raise UsageError(
                f"a plan of version {version!r}; this fxmem reads {PLAN_VERSION}",
                hint="make the plan anew",
            )
        try:
            return cls(
                **{
                    **fields,
                    "segments": tuple(map(_read_segment, fields["segments"])),
                    "inplace": tuple(InplaceChange(**_read(f)) for f in fields["inplace"]),
                    "dels": tuple(DelPoint(**_read(f)) for f in fields["dels"]),
                    "limits": tuple(map(_read_limit, fields.get("limits", ()))),
                }
            )
        except (TypeError, KeyError, ValueError) as error:
            raise UsageError(f"the plan is damaged: {error}", hint="make it anew") from None


def _read_segment(fields: Mapping[str, Any]) -> Segment:
    children = tuple(map(_read_segment, fields["children"]))
    names = {name: tuple(fields.get(name, ())) for name in ("norms", "states")}
    return Segment(**{**_read(fields), **names, "children": children})


def _read_limit(fields: Mapping[str, Any]) -> Limit:
    return Limit(**{**_read(fields), "kind": LimitKind(fields["kind"])})


def _read(fields: Mapping[str, Any]) -> dict[str, Any]:
    source = fields["source"]
    return {**fields, "source": None if source is None else SourceLocation(**source)}
