"""The search for the largest size that fits: few analyses, and memory graphs computed between.

The memory graphs of two sizes determine all others, as far as the same operators run
(:mod:`fxmem.memory.interpolation`). So the allocator is simulated on computed graphs until the
answer is known, and the step is analysed at the answer and at the next size to confirm both.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze
from fxmem.batching.largest import MaxBatch
from fxmem.errors import TraceError, UsageError
from fxmem.gpus import find_gpu
from fxmem.loading.importing import read_files_once
from fxmem.loading.inputs import find_axis, resize_inputs
from fxmem.memory.interpolation import describe_structure, interpolate_graph
from fxmem.planning.outcome import find_shortage
from fxmem.planning.plan import Plan
from fxmem.planning.planner import find_plan, resolve_limit, transfer_plan
from fxmem.planning.strategies.problem import Goal, Strategy
from fxmem.training.options import load_choice
from fxmem.units import format_bytes, resolve_bytes

MOST_ANALYSES = 6  # twice as many where the model refuses sizes that would fit
_MOST_SIZE = 2**31

Judge = Callable[..., str]
"""Says why the step of an analysis, with a plan if any, does not fit; empty where it does."""


@read_files_once()
def max_batch(
    model: nn.Module | str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory: str | float | None = None,
    gpu: str | None = None,
    axis: str | int | None = None,
    multiple_of: int | None = None,
    margin: str | float = 0.02,
    max_overhead: float | None = None,
    time_limit_s: float | None = None,
    strategy: str | Strategy | None = None,
    **options: Any,
) -> MaxBatch:
    """Finds the largest batch, or other size of the inputs, whose step fits a memory.

    The step is analysed with a few sizes, at most six (twelve where the model refuses larger
    ones); what others take is computed from those. Both the answer and the next size are analysed.

    Args:
        model: As for :func:`fxmem.analyze`.
        args: Positional inputs, of a size that the model takes.
        kwargs: Keyword inputs.
        memory: The memory of the device, in bytes or as ``"24GiB"``. None for that of the GPU.
        gpu: The target GPU, as for :func:`fxmem.analyze`.
        axis: The dimension that has the size: 1 for dimension 1 of the first input and of all
            others of that size there, ``"2,3"`` for two of them that are equal, ``"ids:1"`` for
            one input alone. None for dimension 0, the batch.
        multiple_of: Look among multiples of this number. None for all sizes that the model
            takes.
        margin: Memory that is kept free besides CUDA's context: a share such as 0.02, or a size
            such as ``"1GiB"``.
        max_overhead: Also find the largest size with a plan that adds no more than this share of
            time.
        time_limit_s: As for :func:`fxmem.plan`.
        strategy: As for :func:`fxmem.plan`.
        options: Other arguments of :func:`fxmem.analyze`: ``optimizer``, ``device``, ...

    Raises:
        UsageError: An argument is not understood, or there is neither a memory nor a GPU.
        LoadError: The TARGET cannot be loaded.
        TraceError: The step cannot be run on fake tensors with the inputs given.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(256, 256), nn.ReLU())
    >>> found = max_batch(net, "8x256", memory="16MiB", device="cpu")
    >>> found.batch, found.next_batch, found.analyses
    (5180, 5181, 4)
    """
    if memory is None and gpu is None:
        raise UsageError(
            "the largest batch for which memory?", hint="gpu='rtx4090' or memory='24GiB'"
        )
    if max_overhead is not None and options.get("mode") == "infer":
        raise UsageError("inference recomputes nothing", hint="leave max_overhead out")
    if max_overhead is not None and options.get("mesh") is not None:
        raise UsageError(
            "the batch of a rank is not searched with plans",
            hint="leave max_overhead out, then plan at the batch that you want",
        )
    if multiple_of is not None and multiple_of < 1:
        raise UsageError(f"a size cannot be a multiple of {multiple_of}", hint="1 or more")
    if memory is None:
        kept_bytes = resolve_bytes(options.get("reserve") or 0)
        memory_bytes = max(find_gpu(gpu or "").capacity_bytes - kept_bytes, 0)
    else:
        memory_bytes = resolve_bytes(memory)
    margin_bytes = resolve_margin(margin, memory_bytes)
    found = find_axis(args, kwargs, axis)

    def analyze_size(size: int) -> Analysis:
        return analyze(model, *resize_inputs(args, kwargs, found, size), gpu=gpu, **options)

    unit = multiple_of or 1
    sizes = Sizes(analyze_size, -(-found.size // unit) * unit, unit, multiple_of is not None)
    first = sizes.analyze(sizes.start)
    context_bytes = max(first.context_bytes)
    kept_bytes = context_bytes + margin_bytes
    if kept_bytes >= memory_bytes:
        raise UsageError(
            f"a memory of {format_bytes(memory_bytes)} is less than the {format_bytes(kept_bytes)}"
            " kept for CUDA's context and the margin",
            hint="the whole memory of a device, such as 24GiB",
        )

    def judge(analysis: Analysis, plan: Plan | None = None) -> str:
        return find_shortage(analysis, plan, memory_bytes, kept_bytes)

    lo, hi = find_largest(sizes, judge, judge)
    common = {
        "axis": found.label,
        "memory_bytes": memory_bytes,
        "context_bytes": context_bytes,
        "margin_bytes": margin_bytes,
        "setup": first.setup,
    }
    alone = _describe(sizes, judge, lo, hi, {}, common)
    if max_overhead is None:
        return alone
    limit = resolve_limit(None, max_overhead, None)
    search = {"time_limit_s": time_limit_s, "strategy": load_choice(strategy)}
    size, beyond, plans = _find_planned(sizes, judge, lo, hi, limit, search)
    return replace(alone, planned=_describe(sizes, judge, size, beyond, plans, common))


def _find_planned(
    sizes: Sizes, judge: Judge, lo: int, hi: int | None, limit: Goal, search: dict[str, Any]
) -> tuple[int, int | None, dict[int, Plan]]:
    """Finds the largest size that fits with a plan, like :func:`find_largest`, and the plans."""
    pool: list[Plan] = []
    plans: dict[int, Plan] = {}
    max_overhead = limit.overhead or 0.0

    def search_plan(analysis: Analysis) -> Plan:
        pool.append(find_plan(analysis, limit, **search))
        return pool[-1]

    def judge_planned(analysis: Analysis) -> str:
        size = next(s for s, each in sizes.analyses.items() if each is analysis)
        for known in reversed(pool):
            moved = transfer_plan(analysis, known)
            if moved is not None and moved.overhead <= max_overhead and not judge(analysis, moved):
                plans[size] = moved
                return ""
        plans[size] = search_plan(analysis)
        return judge(analysis, plans[size])

    # The plan for the batch that just fails is a good one for those near it.
    search_plan(sizes.analyses.get(hi or 0) or sizes.analyses.get(lo, sizes.analyses[sizes.start]))
    planned = find_largest(sizes, judge_planned, lambda guess: judge(guess, pool[-1]), lo)
    return *planned, plans


def _describe(
    sizes: Sizes,
    judge: Judge,
    size: int,
    beyond: int | None,
    plans: Mapping[int, Plan],
    common: Mapping[str, Any],
) -> MaxBatch:
    """Describes the answer and the next size."""
    fitting, failing = (sizes.analyses.get(each or 0) for each in (size, beyond))
    plan, other = (plans.get(each or 0) for each in (size, beyond))
    is_fit = fitting is not None and size > 0
    cause = sizes.refused.get(beyond or 0, "")
    return MaxBatch(
        batch=size if is_fit else 0,
        peak_bytes=(plan or fitting).peak_bytes if fitting and is_fit else None,
        next_batch=beyond,
        next_peak_bytes=(other or failing).peak_bytes if failing else None,
        next_cause=judge(failing, other) if failing else cause,
        multiple_of=sizes.unit,
        analyses=len(sizes.analyses),
        plan=plan,
        **common,
    )


def resolve_margin(margin: str | float, memory_bytes: int) -> int:
    """Resolves a margin in bytes, from a share (``0.05``, ``"5%"``) or a size (``"1GiB"``).

    Raises:
        UsageError: The margin is neither, or takes all of the memory.

    >>> resolve_margin(0.25, 1000), resolve_margin("5%", 1000), resolve_margin("1KiB", 4096)
    (250, 50, 1024)
    """
    share = margin if isinstance(margin, float) and margin < 1 else None
    if isinstance(margin, str) and margin.strip().endswith("%"):
        try:
            share = float(margin.strip()[:-1]) / 100
        except ValueError:
            raise UsageError(f"{margin!r} is not a margin", hint="5% or 1GiB") from None
    nbytes = resolve_bytes(margin) if share is None else int(share * memory_bytes)
    if not 0 <= nbytes < memory_bytes:
        raise UsageError(
            f"a margin of {format_bytes(nbytes)} leaves nothing of {format_bytes(memory_bytes)}",
            hint="a share such as 5%, or a size such as 1GiB",
        )
    return nbytes


@dataclass
class Sizes:
    """The sizes along an axis that were analysed, and the ones that the model refuses."""

    make: Callable[[int], Analysis]  # analyses the step of a size
    start: int  # the size of the inputs that were given
    unit: int  # the distance of sizes that the model takes, as far as that is known
    is_unit_known: bool
    analyses: dict[int, Analysis] = field(default_factory=dict)  # by size
    refused: dict[int, str] = field(default_factory=dict)  # why the model cannot run, by size

    def analyze(self, size: int) -> Analysis:
        """Analyses a size; the user hears what there is to say about the step once."""
        with warnings.catch_warnings():
            if self.analyses:
                warnings.simplefilter("ignore")
            self.analyses[size] = self.make(size)
        return self.analyses[size]

    def accepts(self, size: int) -> bool:
        """Returns whether the model takes a size, which is then analysed."""
        if size not in self.analyses and size not in self.refused:
            try:
                self.analyze(size)
            except TraceError as error:
                self.refused[size] = error.cause
        return size in self.analyses

    def find_unit(self) -> None:
        """Finds the distance of sizes that the model takes, which divides the one it was given."""
        self.is_unit_known = True
        divisors = [d for d in range(1, self.start + 1) if self.start % d == 0]
        steps = [*divisors, *(-d for d in divisors[:-1])]
        self.unit = abs(next((d for d in steps if self.accepts(self.start + d)), 1))

    def interpolate(self, size: int) -> Analysis | None:
        """Computes the analysis of a size from analyses of others, where they are alike."""
        alike: dict[Any, dict[int, Analysis]] = {}
        for at, analysis in self.analyses.items():
            alike.setdefault(describe_structure(analysis.graph), {})[at] = analysis
        group = max(alike.values(), key=len)
        if len(group) < 2:
            return None
        graphs = {at: analysis.graph for at, analysis in group.items()}
        return replace(next(iter(group.values())), graph=interpolate_graph(graphs, size))


def find_largest(sizes: Sizes, judge: Judge, guess: Judge, lo: int = 0) -> tuple[int, int | None]:
    """Finds the largest size that fits, and the smallest above it that does not.

    Args:
        sizes: The sizes that are known.
        judge: Says why the step of an analysed size does not fit.
        guess: The same for a computed analysis.
        lo: A size that fits; 0 for none.

    Returns:
        The size, or 0 where none fits; and None where memory does not grow with it.
    """
    hi: int | None = None
    surprises = 0  # sizes in a row that fit, and were not expected to: longer strides follow
    before = len(sizes.analyses) - (lo == 0)
    while hi is None or hi - lo > sizes.unit:
        stride = 1 << max(surprises - 1, 0)
        size = _choose_next(sizes, guess, lo, hi, stride)
        is_new = size not in sizes.analyses and size not in sizes.refused
        most = MOST_ANALYSES * (2 if hi in sizes.refused else 1)
        if size > _MOST_SIZE or (is_new and len(sizes.analyses) - before >= most):
            break
        if not sizes.accepts(size):
            if not sizes.is_unit_known:
                sizes.find_unit()
            refused = [each for each in sizes.refused if each % sizes.unit == 0]
            lo = max([lo, *(each for each in refused if each < min(sizes.analyses))])
            beyond = [each for each in refused if each > max(lo, min(sizes.analyses))]
            hi = min([*beyond, *([] if hi is None else [hi])], default=hi)
        elif judge(sizes.analyses[size]):
            hi, surprises = size, 0
        else:
            surprises = surprises + 1 if size == lo + stride * sizes.unit else 0
            lo = size
    return lo, hi


def _choose_next(sizes: Sizes, guess: Judge, lo: int, hi: int | None, stride: int) -> int:
    """Chooses the size to try next: the largest that seems to fit, or one not far above ``lo``."""
    unit = sizes.unit
    if lo == 0 and hi is None:
        return sizes.start
    most = math.inf if hi is None else hi - unit

    def fits(size: int) -> bool:
        analysis = sizes.interpolate(size)
        return analysis is not None and not guess(analysis)

    halfway = 2 * lo if hi is None else (lo + hi) // 2
    if sizes.interpolate(unit) is None:  # nothing is known of other sizes
        size = halfway
    else:
        size, top = lo, max(2 * lo, unit)
        while top <= most and top <= _MOST_SIZE and fits(top):
            size, top = top, 2 * top
        steps = range(size, int(min(top, most + unit)), unit)
        size = steps[bisect_left(steps, True, lo=1, key=lambda each: not fits(each)) - 1]
        if hi in sizes.refused and size >= most:  # for reasons other than memory
            size = halfway
    return int(min(max(size // unit * unit, lo + stride * unit), most))
