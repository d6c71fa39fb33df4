"""Findings on a step: all that lower its peak, with numbers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from fxmem.advice.holding import find_offloads
from fxmem.advice.variants import Variant, fold_norms, list_variants
from fxmem.analysis import Analysis
from fxmem.analyzing import analyze
from fxmem.errors import FxmemError
from fxmem.finding import Finding, choose_findings


def advise(
    model: nn.Module | str, args: Any = (), kwargs: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Finding, ...]:
    """Finds changes other than a plan that lower the peak of a step, largest saving first.

    Each has a code (``fxmem explain FX101``). The findings of the report and activations in the
    host's memory are simulated on the recorded step; the others are analysed again: autocast,
    ``zero_grad(set_to_none=True)``, the optimizer's implementation, micro-batches, and in
    inference batch normalisations folded into convolutions. Left out are changes that the step has
    already, that save less than both 0.5 % and 1 MiB, or with which it cannot be traced.

    Args:
        model: As for :func:`fxmem.analyze`.
        args: Positional inputs.
        kwargs: Keyword inputs.
        options: Other arguments of :func:`fxmem.analyze`: ``mode``, ``device``, ``optimizer``, ...

    Raises:
        UsageError: An argument is not understood.
        LoadError: The TARGET cannot be loaded.
        TraceError: The step cannot be run on fake tensors.

    >>> from torch import nn
    >>> findings = advise(nn.Linear(400, 400), ("8x400",), optimizer="adam")
    >>> [(finding.code, finding.option) for finding in findings]
    [('FX204', 'Adam(..., fused=True)')]
    """
    analysis = analyze(model, args, kwargs, **options)
    return find_advice(analysis, model, args, kwargs, options)


def find_advice(
    analysis: Analysis, model: nn.Module | str, args: Any, kwargs: Any, options: Mapping[str, Any]
) -> tuple[Finding, ...]:
    """Finds the advice for a step that was analysed with these arguments of ``fxmem.analyze``.

    Beside the findings of the report these are general changes, for which the step is analysed
    again, and the host's memory.
    """

    def try_variant(variant: Variant, model: nn.Module | str = model) -> Finding | None:
        positional, named = variant.inputs or (args, kwargs)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the step as it is has reported them
                changed = analyze(model, positional, named, **{**options, **variant.options})
        except FxmemError:
            return None  # as where a loss holds labels of the whole batch
        return Finding(
            code=variant.code,
            change=variant.change,
            option=variant.option,
            peak_bytes=changed.peak_bytes,
            saving_bytes=analysis.peak_bytes - changed.peak_bytes,
            cost=variant.cost,
        )

    found = [try_variant(variant) for variant in list_variants(analysis, args, kwargs, options)]
    if analysis.setup.mode == "train":
        found += find_offloads(analysis)
    elif analysis.frontend == "fx":
        with fold_norms(model, analysis.fx_graph) as (folded, count):
            plural = "s" if count > 1 else ""
            variant = Variant(
                code="FX304",
                change=f"Fold {count} batch normalisation{plural} into the "
                f"convolution{plural} before",
                option="torch.nn.utils.fusion.fuse_conv_bn_eval(conv, norm)",
                cost="For inference alone; the last digits differ. It is faster too.",
            )
            found.append(try_variant(variant, folded) if count else None)
    return choose_findings([*analysis.findings, *filter(None, found)], analysis.peak_bytes)
