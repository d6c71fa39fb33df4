"""The report on a pipeline as plain text: its ranks, and what the fullest holds at its peak."""

from __future__ import annotations

from fxmem.graph import Category
from fxmem.pipelines.pipeline import Pipeline, RankMemory, Work
from fxmem.report.tables import Table, join_blocks, wrap
from fxmem.report.text import write_mesh, write_source
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
_NUMBERS = ("rank", "stages", "peak", "reserved", "in flight", "each keeps", "share", "bytes")


def render_pipeline(pipeline: Pipeline, *, width: int | None = None) -> str:
    """Writes the fullest rank, a row for each rank, and a row for each category at the peak."""
    return join_blocks(list_pipeline_blocks(pipeline, width))


def list_pipeline_blocks(pipeline: Pipeline, width: int | None = None) -> list[str | Table]:
    """Lists the blocks of the report on a pipeline."""
    setup, fullest = pipeline.setup, pipeline.fullest
    on = f" of {len(pipeline.ranks)}" if len(pipeline.ranks) > 1 else ""
    headline = f"Peak {format_bytes(fullest.peak_bytes)} on rank {fullest.rank}{on}, the fullest"
    subject = "; ".join(
        (
            setup.model,
            ", ".join(setup.inputs) or "no inputs",
            f"{pipeline.schedule} of {pipeline.microbatches} micro-batches",
            setup.gpu or setup.device,
            f"optimizer {setup.optimizer or 'none'}",
            f"loss {setup.loss or 'default'}",
            *(
                [f"{write_mesh(setup.mesh or {})} by {setup.parallelize}"]
                if setup.parallelize
                else ()
            ),
        )
    )
    rows = []
    for rank in pipeline.ranks:
        rows.append(
            (
                str(rank.rank),
                ", ".join(str(stage.index) for stage in rank.stages),
                format_bytes(rank.peak_bytes),
                "" if setup.device == "cpu" else format_bytes(rank.reserved_bytes),
                ", ".join(str(stage.most_in_flight) for stage in rank.stages),
                ", ".join(format_bytes(stage.kept_bytes) for stage in rank.stages),
                _write_action(rank),
                write_source(rank.peak.source),
                "" if rank.fits is None else "yes" if rank.fits else "no",
            )
        )
    headers = [*_NUMBERS[:6], "peak in", "line", "fits"]
    held = [(c, fullest.breakdown[c]) for c in Category if fullest.breakdown[c]]
    shares = [
        (c.value, format_bytes(nbytes), f"{100 * nbytes / fullest.peak_bytes:.1f} %")
        for c, nbytes in held
    ]
    total = [("peak", format_bytes(fullest.peak_bytes), "100.0 %")]
    return [
        f"{headline}\n{wrap(subject, width)}",
        Table(headers, rows, right=_NUMBERS, names=("peak in", "each keeps", "line"), width=width),
        wrap(_NOTE, width),
        Table([f"rank {fullest.rank}", "bytes", "share"], [*shares, *total], right=_NUMBERS),
    ]


def _write_action(rank: RankMemory) -> str:
    action = rank.action
    if action is None:
        return "after the schedule"
    of = f" of stage {action.stage}" if len(rank.stages) > 1 else ""
    return f"{_WORDS[action.work]} {action.microbatch}{of}"
