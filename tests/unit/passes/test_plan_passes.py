"""Segments and in-place changes as passes, one after the other."""

from __future__ import annotations

import torch
from torch import nn

import fxmem
from fxmem.passes import CheckpointPass, InplacePass


def test_passes_follow_one_another_in_any_order() -> None:
    model = nn.Sequential(nn.Linear(8, 64), *[nn.Tanh() for _ in range(8)], nn.Linear(64, 1))
    analysis = fxmem.analyze(model, "64x8", device="cpu")
    segments = fxmem.pareto(analysis, style="graph", strategy="schedules")[-1]
    inplace = fxmem.plan(fxmem.analyze(model, "64x8", device="cpu", mode="infer"))
    assert segments.segments and inplace.inplace
    passes = [CheckpointPass(segments), InplacePass(inplace)]
    x, codes = torch.randn(64, 8), []
    for ordered in (passes, passes[::-1]):
        graph_module = analysis.graph_module
        for each in ordered:
            result = each(graph_module)
            assert result is not None and result.modified
            graph_module = result.graph_module
        codes.append(graph_module.code)
        noted = [node.meta["fxmem"] for node in graph_module.graph.nodes]
        assert sum("segment_1" in each.segments for each in noted) == segments.segments[0].nodes
        assert sum(each.is_inplace for each in noted) == len(inplace.inplace)
        with torch.no_grad():
            assert torch.equal(graph_module(x), model(x))
    assert codes[0] == codes[1]
    assert "checkpoint(segment_1" in codes[0] and "overwrite_by_module" in codes[0]
