"""Advice on a step: what else lowers its peak, with numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fxmem.advice.estimates import estimate_loss_chunks, estimate_offloads
from fxmem.advice.folding import fold_norms
from fxmem.advice.record import Advice, choose_advice
from fxmem.advice.variants import Variant, list_variants
from fxmem.analysis import Analysis
from fxmem.analyzing import analyze_model
from fxmem.errors import FxmemError


def advise(
    model: nn.Module | str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Advice, ...]:
    """Lists changes that lower the peak of a step: :func:`fxmem.advise`."""
    analysis = analyze_model(model, args, kwargs, **options)
    return find_advice(analysis, model, args, kwargs, options)


def find_advice(
    analysis: Analysis, model: nn.Module | str, args: Any, kwargs: Any, options: Mapping[str, Any]
) -> tuple[Advice, ...]:
    """What :func:`advise` returns, for a step that is analysed already.

    Args:
        analysis: Of that step.
        model: As it was given to :func:`fxmem.analyze`.
        args: Likewise.
        kwargs: Likewise.
        options: Likewise.
    """
    variants = list_variants(analysis, args, kwargs, options)
    found = [
        *(_try_variant(analysis, model, args, kwargs, options, variant) for variant in variants),
        _try_folding(analysis, model, args, kwargs, options),
        *_estimate(analysis),
    ]
    return choose_advice(filter(None, found), analysis.peak_bytes)


def _try_variant(
    analysis: Analysis,
    model: nn.Module | str,
    args: Any,
    kwargs: Any,
    options: Mapping[str, Any],
    variant: Variant,
) -> Advice | None:
    """The step analysed with a change; None where it cannot be."""
    positional, named = variant.inputs or (args, kwargs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the step as it is has told them
            changed = analyze_model(model, positional, named, **{**options, **variant.options})
    except FxmemError:
        return None  # as where a loss holds labels of the whole batch
    return Advice(
        change=variant.change,
        option=variant.option,
        peak_bytes=changed.peak_bytes,
        saving_bytes=analysis.peak_bytes - changed.peak_bytes,
        cost=variant.cost,
    )


def _try_folding(
    analysis: Analysis, model: nn.Module | str, args: Any, kwargs: Any, options: Mapping[str, Any]
) -> Advice | None:
    if analysis.setup.mode != "infer" or analysis.frontend != "fx":
        return None
    try:
        with fold_norms(model, analysis.fx_graph) as folded:
            if folded is None:
                return None
            without, count = folded
            plural = "s" if count > 1 else ""
            variant = Variant(
                change=f"Fold {count} batch normalisation{plural} into the "
                f"convolution{plural} before",
                option="torch.nn.utils.fusion.fuse_conv_bn_eval(conv, norm)",
                cost="For inference alone; the last digits differ. It is faster too.",
            )
            return _try_variant(analysis, without, args, kwargs, options, variant)
    except FxmemError:
        return None


def _estimate(analysis: Analysis) -> Iterator[Advice]:
    if analysis.setup.mode == "train":
        yield from estimate_offloads(analysis)
        yield from estimate_loss_chunks(analysis)
