"""The blocks of the report on a step, and the words that all reports share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from fxmem.gpus import CONTEXT_BYTES
from fxmem.graph import Category, Phase, SourceLocation
from fxmem.memory.module_tree import SUMS, Module
from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.tables import Bytes, Cell, Flops, Table
from fxmem.units import format_bytes

if TYPE_CHECKING:
    from fxmem.analysis import Analysis
    from fxmem.memory.liveness import Peak
    from fxmem.report.document import Document, Headline
    from fxmem.setup import Setup

DEPTH = 3
_HEADERS = ("module", "class", "result", "parameters", "forward", "backward", "output", "saved")
_AT_PEAK = "at the peak"


def list_step_blocks(
    document: Document, top: int = 10, nodes: bool = False, modules: Iterable[Block] = ()
) -> list[Block]:
    """Lists the blocks of the report on a step; the heading has the peak and its place.

    The ``top`` largest storages alive at the peak are listed, the rest one row; ``nodes`` adds a
    table with a row for each node, after that of the ``modules``.
    """
    about = [write_subject(document.setup), *write_first_step(document)]
    return [
        Heading(write_headline(document.headline), about),
        *_list_figures(document),
        _list_live(document, top),
        *_list_findings(document),
        *modules,
        *([_list_nodes(document)] if nodes else []),
        Paragraph(document.notes),
    ]


def write_headline(headline: Headline) -> str:
    """Writes the peak and its place in one line."""
    return f"Peak {write_peak(headline)}"


def write_first_step(document: Document) -> Iterator[str]:
    """Writes the peak of the first step in one line; none where it is that of the second."""
    first = document.first_step
    if first is not None:
        than = "lower" if first.peak_bytes < document.headline.peak_bytes else "higher"
        yield (
            f"The first step peaks {than}: {write_peak(first)}; "
            "all other figures are the second step's"
        )


def write_peak(headline: Headline) -> str:
    """Writes the bytes of a peak and its place."""
    peak, names = format_bytes(headline.peak_bytes), headline.parameters
    if headline.phase is not Phase.OPTIMIZER:
        return f"{peak} in {write_place(headline.phase, headline.node, headline.source)}"
    text = f"{peak} in the optimizer step"
    text += f" of {headline.optimizer}" if headline.optimizer else ""
    if len(names) > 1:
        return f"{text}, updating {len(names)} parameters together"
    return f"{text}, updating {names[0]}" if names else text


def write_place(phase: Phase, node: str | None, source: SourceLocation | None) -> str:
    """Writes a phase, and where in it, as far as that is known.

    >>> write_place(Phase.BACKWARD, "conv1", SourceLocation("net.py", 12))
    'backward of conv1, net.py:12'
    """
    place = ", ".join(filter(None, [node, write_source(source)]))
    return f"{phase.value}{f' of {place}' if place else ''}"


def write_peak_place(peak: Peak) -> str:
    """Writes the phase of a peak, with its node and line."""
    return write_place(peak.phase, peak.node.name if peak.node else None, peak.source)


def write_source(source: SourceLocation | None) -> str:
    """Writes a line of code as ``file.py:12``; empty for none."""
    return str(source) if source else ""


def write_mesh(mesh: Mapping[str, int]) -> str:
    """Writes a mesh as ``--mesh`` takes it: ``dp=8,tp=4``."""
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def write_subject(setup: Setup, *, has_loop: bool = True) -> str:
    """Writes the analysed step in one line, with its training loop where that matters."""
    mode = setup.mode
    attention = [f"attention {setup.attention}"] if setup.attention else []
    if setup.window:
        step = f"{setup.window} of {setup.model}"
        optimizer = f"optimizer {setup.optimizer or 'none'}"
        parts = [step, setup.gpu or setup.device, *attention, optimizer]
        return "; ".join(parts)
    if setup.inference_mode:
        mode = f"{mode} under inference_mode()"
    elif mode == "infer" and setup.autocast:  # which keeps the casts of weights alive there
        mode = f"{mode} under no_grad()"
    parts = [setup.model, ", ".join(setup.inputs) or "no inputs", mode, setup.gpu or setup.device]
    parts += attention
    if setup.mesh:
        by = f" by {setup.parallelize}" if setup.parallelize else ""
        parts.append(f"rank {setup.rank} of {write_mesh(setup.mesh)}{by}")
    if setup.schedule:
        parts.append(setup.schedule)
    if setup.autocast:
        parts.append(f"autocast {setup.autocast}")
    if setup.mode == "train":
        parts.append(f"optimizer {setup.optimizer or 'none'}")
        parts.append(f"loss {setup.loss or 'default'}")
        if has_loop and not setup.schedule:
            parts.append(f"loop {setup.loop}")
    return "; ".join(parts)


def write_fit(analysis: Analysis) -> str:
    """Writes in one sentence whether the step fits the target GPU; empty without one."""
    run = analysis.device_run
    if analysis.gpu is None or run is None:
        return ""
    gpu = f"{analysis.gpu.name} ({format_bytes(analysis.gpu.capacity_bytes)})"
    ran_out = run.exhaustion
    if ran_out is None:
        times = f"{run.retries} times" if run.retries > 1 else "once"
        cached = f", after the allocator has given back its cache {times}" if run.retries else ""
        return f"Fits {gpu}{cached}."
    step = "" if ran_out.step is not None else "the first step's "
    if ran_out.phase is None:
        where = f"moving {ran_out.storage or 'the model'} to the GPU"
    elif ran_out.phase is Phase.OPTIMIZER:
        at = f", at {ran_out.storage}" if ran_out.storage else ""
        where = f"in {step or 'the '}optimizer step{at}"
    else:
        where = f"in {step}{write_place(ran_out.phase, ran_out.node, ran_out.source)}"
    where = f"{where}: {ran_out.cause}"
    if analysis.setup.compile == "left out":
        return f"Eager would not fit {gpu}, {where}; the script compiles."
    if ran_out.is_certain:
        return f"Does not fit {gpu}, {where}."
    least, most = map(format_bytes, analysis.context_bytes)
    takes = f"takes {least}, but not if it takes {most}"
    if analysis.context_bytes != CONTEXT_BYTES:
        takes = f"and NCCL take {least}, but not if they take {most}"
    return f"Fits {gpu} if the CUDA context {takes}: {where}."


def write_range(least_bytes: int, most_bytes: int) -> str:
    """Writes one size, or a range of sizes."""
    least, most = format_bytes(least_bytes), format_bytes(most_bytes)
    return least if least == most else f"{least} to {most}"


def write_shape(shape: Sequence[int] | None) -> str:
    """Writes a shape as ``--input`` takes it; empty for none.

    >>> write_shape((8, 3, 224)), write_shape(())
    ('8x3x224', 'scalar')
    """
    return "" if shape is None else "x".join(map(str, shape)) or "scalar"


def write_count(number: int, noun: str) -> str:
    """Writes a number of things.

    >>> write_count(1, "step"), write_count(2, "step")
    ('1 step', '2 steps')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def write_share(share: float) -> str:
    """Writes a share in percent.

    >>> write_share(0.1234), write_share(0.0002), write_share(0)
    ('12.3 %', '<0.1 %', '0.0 %')
    """
    text = f"{100 * share:.1f} %"
    return "<0.1 %" if share > 0 and text == "0.0 %" else text


def list_shares(title: str, breakdown: Mapping[Category, int], peak_bytes: int) -> Table:
    """Lists categories at the peak, with their shares."""
    rows = [(category.value, nbytes) for category, nbytes in breakdown.items() if nbytes]
    rows.append(("peak", peak_bytes))
    shares = [(name, Bytes(n), f"{100 * n / (peak_bytes or 1):.1f} %") for name, n in rows]
    return Table([title, "bytes", "share"], shares, right=["bytes", "share"])


def _list_figures(document: Document) -> Iterator[Block]:
    """Lists the figures of the device, of the whole step and of the categories at the peak."""
    if document.device:
        device: list[Sequence[Cell]] = []
        for row in document.device:
            peak: Cell = Bytes(row.least_bytes)
            if row.least_bytes < row.most_bytes:
                peak = write_range(row.least_bytes, row.most_bytes)
            device.append((row.label, peak, row.compare_with))
        yield Table(["on the GPU", "peak", "compare with"], device, right=["peak"])
    if document.fit:
        yield Paragraph([document.fit])
    totals: list[Sequence[Cell]] = [(label, Bytes(n)) for label, n in document.totals.items()]
    totals.append(("forward", Flops(document.forward_flops)))
    if document.setup.mode == "train":
        totals.append(("backward", Flops(document.backward_flops)))
    yield Table(["over the step", "total"], totals, right=["total"])
    yield list_shares("at the peak", document.breakdown, document.headline.peak_bytes)


def _list_live(document: Document, top: int) -> Table:
    rows, rest = [], document.live[top:]
    for row in document.live[:top]:
        saved = row.saved_by
        savers = ", ".join(saved) if len(saved) < 3 else f"{saved[0]}, {len(saved) - 1} more"
        figures = (Bytes(row.nbytes), row.category.value, row.label, write_shape(row.shape))
        rows.append((*figures, row.dtype, savers, write_source(row.source)))
    left = f"... and {len(rest)} more, {format_bytes(sum(row.nbytes for row in rest))}"
    return Table(
        ["bytes", "category", "alive at the peak", "shape", "dtype", "saved by", "source"],
        rows,
        right=["bytes"],
        names=["alive at the peak", "saved by", "source"],
        optional=["saved by", "dtype", "shape"],
        rest=left if rest else "",
    )


def _list_findings(document: Document) -> Iterator[Table]:
    findings = document.findings
    if findings:
        yield Table(
            ["finding", "off the peak", "why the memory is taken", "source"],
            [(f.code, Bytes(f.saving_bytes), f.title, write_source(f.source)) for f in findings],
            right=["off the peak"],
            names=["why the memory is taken", "source"],
            rest=f"fxmem explain {findings[0].code} says what to write instead.",
        )


def _list_nodes(document: Document) -> Table:
    sizes, flops = ["output", "saved", "transient"], ["forward", "backward"]
    rows = []
    for row in document.nodes:
        figures: list[Cell] = [Bytes(getattr(row, f"{name}_bytes")) for name in sizes]
        figures += [Flops(getattr(row, f"{name}_flops")) for name in flops]
        tensor = (write_shape(row.shape), row.dtype or "")
        shown = [figure or "-" for figure in figures]
        rows.append((row.name, row.target, *tensor, *shown, write_source(row.source)))
    return Table(
        ["node", "target", "shape", "dtype", *sizes, *flops, "source"],
        rows,
        right=[*sizes, *flops],
        names=["node", "target", "source"],
        optional=["dtype", "backward", "forward", "target", "shape"],
    )


def list_modules(model: Module, name: str, depth: int = DEPTH) -> Table:
    """Lists the table of a model's modules down to a depth; the model's own row is the first.

    Each row includes the modules in it. Of equal modules that follow each other there is one row,
    with their sums.
    """
    rows, has_copies = [], False
    for level, label, module, copies in _list_rows([model], "", 0, depth):
        has_copies |= copies > 1
        called = f"{copies} x {module.class_name}" if copies > 1 else module.class_name
        flops = (module.forward_flops, module.backward_flops)
        sizes = (module.output_bytes, module.saved_bytes, module.live_bytes)
        figures = (
            f"{module.parameters:,}" if module.parameters else "-",
            *(Flops(n) if n else "-" for n in flops),
            *(Bytes(n) if n else "-" for n in sizes),
        )
        label = "- " * level + (label or name)
        rows.append((label, called, write_shape(module.shape), *figures))
    copies_too = ", and a row of several the sums of all" if has_copies else ""
    return Table(
        [*_HEADERS, _AT_PEAK],
        rows,
        right=[*_HEADERS[3:], _AT_PEAK],
        names=["module", "class"],
        optional=["result", "output", "backward", "class", "forward"],
        rest=f"Each row includes the modules in it{copies_too}.",
    )


def _list_rows(
    modules: Iterable[Module], around: str, level: int, depth: int, times: int = 1
) -> Iterator[tuple[int, str, Module, int]]:
    """Yields level, name, sums and number of each run of equal modules, and of those within.

    The modules are sums themselves, of so many times one.
    """
    for _, group in groupby(_skip_lists(modules), key=_sign):
        copies = [*group]
        first, last = (module.fqn.removeprefix(around) for module in (copies[0], copies[-1]))
        merged = _merge(copies)
        label = first if len(copies) == 1 else f"{first} ... {last}"
        yield level, label, merged, times * len(copies)
        if level < depth:
            inside = f"{merged.fqn}." if merged.fqn else ""
            more = _list_rows(merged.children, inside, level + 1, depth, times * len(copies))
            yield from more


def _skip_lists(modules: Iterable[Module]) -> Iterator[Module]:
    """Yields modules, and the children of lists of modules in place of the lists."""
    for module in modules:
        if module.fqn and not module.class_name and not module.nodes:
            yield from _skip_lists(module.children)
        else:
            yield module


def _sign(module: Module) -> Hashable:
    """Signs a module: alike for two that have the same classes, sizes and work within."""
    start = len(module.fqn)
    inside = tuple((child.fqn[start:], _sign(child)) for child in module.children)
    return module.class_name, module.shape, module.parameters, module.forward_flops, inside


def _merge(copies: list[Module]) -> Module:
    """Adds up equal modules, and what is in them."""
    if len(copies) == 1:
        return copies[0]
    sums = {name: sum(getattr(module, name) for module in copies) for name in SUMS}
    children = zip(*(module.children for module in copies), strict=True)
    return replace(copies[0], **sums, children=tuple(_merge([*each]) for each in children))
