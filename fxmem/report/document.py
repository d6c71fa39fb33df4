"""What a report says, before it is known how: every format is rendered from a Document."""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.graph import Category, Phase, SourceLocation
from fxmem.memory.allocation import Exhaustion


@dataclass(frozen=True, slots=True)
class Headline:
    """The answer: how much, and where.

    Attributes:
        peak_bytes: Most bytes allocated at any moment.
        phase: The part of the step in which the peak lies.
        node: Name of the node there, or None where the operator belongs to none.
        source: The user's own line, or None.
        optimizer: Name of the optimizer, or None.
        parameters: In the optimizer, the parameters whose update is under way.
    """

    peak_bytes: int
    phase: Phase
    node: str | None
    source: SourceLocation | None
    optimizer: str | None
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Subject:
    """What was analysed, and how.

    Attributes:
        model: The TARGET, or the class of the module.
        inputs: One spec for each input.
        mode: ``train`` or ``infer``.
        device: Target device.
        gpu: The GPU that is meant, or None.
        autocast: What forward and loss are autocast to, or None.
        optimizer: Name of the optimizer, or None.
        loss: Name of the loss, or None for the default.
        context: What turns gradients off in inference, where memory may depend on it.
        loop: The training loop; empty where that does not matter.
    """

    model: str
    inputs: tuple[str, ...]
    mode: str
    device: str
    gpu: str | None
    autocast: str | None
    optimizer: str | None
    loss: str | None
    context: str = ""
    loop: str = ""


@dataclass(frozen=True, slots=True)
class Total:
    """One number of the whole step, in bytes."""

    label: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A number that a user compares with one of the device's.

    Attributes:
        label: What it is.
        least_bytes: The number, or the least of a range.
        most_bytes: The most of it; the same where it is one number.
        compare_with: What says it on the device.
    """

    label: str
    least_bytes: int
    most_bytes: int
    compare_with: str


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether the step fits the GPU that is meant.

    Attributes:
        gpu: Its name.
        capacity_bytes: All its memory.
        exhaustion: Where its memory runs out; None where the step fits.
        retries: How often the allocator gives back its cache to make room.
    """

    gpu: str
    capacity_bytes: int
    exhaustion: Exhaustion | None = None
    retries: int = 0


@dataclass(frozen=True, slots=True)
class BreakdownRow:
    """What one category takes at the peak.

    Attributes:
        category: The category.
        nbytes: Its bytes there.
        share: Its part of the peak, from 0 to 1.
    """

    category: Category
    nbytes: int
    share: float


@dataclass(frozen=True, slots=True)
class LiveRow:
    """A storage that is alive at the peak, or the workspace of the kernel that runs there.

    Attributes:
        nbytes: Its size.
        category: What it is for.
        label: The name of the parameter, the input, or the node that made it; what a temporary
            of backward or of the optimizer is; or the operator whose workspace it is.
        shape: Of the first tensor on it; None for a workspace.
        dtype: Of that tensor; empty for a workspace.
        saved_by: Names of the nodes that saved it for backward.
        source: The user's line that made it, or None.
    """

    nbytes: int
    category: Category
    label: str
    shape: tuple[int, ...] | None
    dtype: str
    saved_by: tuple[str, ...]
    source: SourceLocation | None


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node of the traced model.

    The attributes are those of ``fxmem.graph.Node``, and ``live_bytes``: what of it is alive at
    the peak, be it its result, what its backward makes, or the workspace of its kernel there.
    """

    name: str
    target: str
    shape: tuple[int, ...] | None
    dtype: str | None
    output_bytes: int
    saved_bytes: int
    transient_bytes: int
    forward_flops: int
    backward_flops: int
    source: SourceLocation | None
    fqn: str = ""
    op: str = "call_module"
    phase: Phase = Phase.FORWARD
    inputs: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    live_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Document:
    """Everything that a report of one analysis says.

    Attributes:
        headline: The answer.
        subject: What was analysed.
        device: Numbers to compare with the device's; none on the CPU.
        fit: Whether the step fits; None where no GPU is meant.
        totals: Parameters, saved activations and the like, over the whole step.
        forward_flops: Floating-point operations of forward and loss.
        backward_flops: Those of backward.
        breakdown: Largest first; sums to the peak; no zero rows.
        live: What is alive at the peak, largest first; sums to the peak.
        nodes: In order of execution.
        notes: What the reader should know about the numbers, a sentence each.
        storage_bytes: The size of each storage, by its index: what ``NodeRow.results`` are.
        first_step: The peak of the first step, where it differs from that of the headline, of
            the second step, by more than 1 %; else None.
    """

    headline: Headline
    subject: Subject
    device: tuple[DeviceRow, ...]
    fit: Fit | None
    totals: tuple[Total, ...]
    forward_flops: int
    backward_flops: int
    breakdown: tuple[BreakdownRow, ...]
    live: tuple[LiveRow, ...]
    nodes: tuple[NodeRow, ...]
    notes: tuple[str, ...]
    storage_bytes: tuple[int, ...] = ()
    first_step: Headline | None = None
