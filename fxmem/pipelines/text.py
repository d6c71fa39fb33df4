"""The blocks of the report on a pipeline: its ranks, and what the fullest holds at its peak."""

from __future__ import annotations

from fxmem.graph import Category
from fxmem.pipelines.pipeline import Pipeline, RankMemory, Work
from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.tables import Bytes, Table
from fxmem.report.text import list_shares, write_mesh, write_source
from fxmem.units import format_bytes

_WORDS = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.BACKWARD_INPUT: "backward of the input",
    Work.BACKWARD_WEIGHT: "backward of the weights",
}
_NOTE = (
    "For each stage: the most micro-batches in flight, from forward to the end of backward, and "
    "what each keeps until then."
)
_NUMBERS = ("rank", "stages", "peak", "reserved", "in flight", "each keeps")


def list_pipeline_blocks(pipeline: Pipeline) -> list[Block]:
    """Lists the blocks of the report on a pipeline."""
    setup, fullest = pipeline.setup, pipeline.fullest
    on = f" of {len(pipeline.ranks)}" if len(pipeline.ranks) > 1 else ""
    headline = f"Peak {format_bytes(fullest.peak_bytes)} on rank {fullest.rank}{on}, the fullest"
    subject = [
        setup.model,
        ", ".join(setup.inputs) or "no inputs",
        f"{pipeline.schedule} of {pipeline.microbatches} micro-batches",
        setup.gpu or setup.device,
        f"optimizer {setup.optimizer or 'none'}",
        f"loss {setup.loss or 'default'}",
    ]
    if setup.parallelize:
        subject.append(f"{write_mesh(setup.mesh or {})} by {setup.parallelize}")
    rows = [
        (
            rank.rank,
            ", ".join(str(stage.index) for stage in rank.stages),
            Bytes(rank.peak_bytes),
            "" if setup.device == "cpu" else Bytes(rank.reserved_bytes),
            ", ".join(str(stage.most_in_flight) for stage in rank.stages),
            ", ".join(format_bytes(stage.kept_bytes) for stage in rank.stages),
            _write_action(rank),
            write_source(rank.peak.source),
            "" if rank.fits is None else "yes" if rank.fits else "no",
        )
        for rank in pipeline.ranks
    ]
    headers = [*_NUMBERS, "peak in", "line", "fits"]
    held = {category: fullest.breakdown[category] for category in Category}
    return [
        Heading(headline, ["; ".join(subject)]),
        Table(headers, rows, right=_NUMBERS, names=("peak in", "each keeps", "line")),
        Paragraph([_NOTE]),
        list_shares(f"rank {fullest.rank}", held, fullest.peak_bytes),
    ]


def _write_action(rank: RankMemory) -> str:
    action = rank.action
    if action is None:
        return "after the schedule"
    of = f" of stage {action.stage}" if len(rank.stages) > 1 else ""
    return f"{_WORDS[action.work]} {action.microbatch}{of}"
