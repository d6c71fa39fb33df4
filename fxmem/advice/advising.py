"""Findings on a step, and the same step with one thing changed, to be analysed again."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fxmem.advice.holding import find_offloads
from fxmem.analysis import Analysis
from fxmem.analyzing import analyze
from fxmem.errors import FxmemError
from fxmem.fakes.devices import keep_default_on_cpu, translate_devices
from fxmem.fakes.fake_mode import make_fake_mode, read_leaf
from fxmem.finding import Finding, choose_findings
from fxmem.graph import Category
from fxmem.loading.changes import write_changed
from fxmem.loading.inputs import find_axis, gather_inputs, resize_inputs
from fxmem.loading.parsing import is_target
from fxmem.loading.target import load_target, prepare_targets, silence_fake_kernels
from fxmem.planning.model.index import is_batch_norm
from fxmem.specs import TensorSpec
from fxmem.training.optimizers import OPTIMIZERS, parse_settings

_FOLDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
}
"""Convolutions, by their own class alone, with the batch normalisation that follows them."""
_IMPLEMENTATIONS = {
    "foreach": (
        "FX203",
        "Update one parameter at a time",
        "Slower: the optimizer runs its kernels for one parameter at a time.",
    ),
    "fused": (
        "FX204",
        "Update parameters in one kernel, without temporaries",
        "None in time; the last digits of an update may differ.",
    ),
}
"""By the option of an optimizer, the code and text of the change that it makes, and the cost."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A step with one thing changed; code and texts are as in :class:`Finding`.

    Attributes:
        options: The options of :func:`fxmem.analyze` that differ.
        inputs: Other inputs, positional and named; None for the same.
        model: The TARGET of another model; None for the same.
    """

    code: str
    change: str
    option: str
    cost: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    model: str | None = None


def list_variants(
    analysis: Analysis,
    model: nn.Module | str,
    args: Any,
    kwargs: Any,
    options: Mapping[str, Any],
) -> Iterator[Variant]:
    """Lists the changes to try, without what the user's options have already."""
    setup = analysis.setup
    if options.get("autocast") is None:
        subject = "forward and loss" if setup.mode == "train" else "the model"
        yield Variant(
            code="FX301",
            change=f'Run {subject} under torch.autocast("{setup.device}", torch.bfloat16)',
            option='autocast="bf16"',
            cost="Numerics change: products and convolutions are rounded to bfloat16's 8 bits.",
            options={"autocast": "bf16"},
        )
    if setup.mode != "train":
        return
    if not setup.loop.set_to_none:
        yield Variant(
            code="FX202",
            change="Free gradients instead of filling them with zeros",
            option="optimizer.zero_grad(set_to_none=True)",
            cost="None, as long as no code reads .grad after zero_grad; parameters that got no "
            "gradient are passed over by the optimizer.",
            options={"set_to_none": True},
        )
    optimizer = options.get("optimizer")
    if isinstance(optimizer, str) and not is_target(optimizer):
        yield from _list_optimizers(optimizer)
    if isinstance(model, str) and setup.device == "cuda":
        yield from _list_adapters(analysis, model)
    halved = halve_inputs(args, kwargs) if setup.loop.accumulate == 1 else None
    if halved is not None:
        cost = "Slower: kernels run on half as much at a time."
        cost += " Divide the loss by 2 where it is a mean."
        if any(map(is_batch_norm, analysis.graph.operations)):
            cost += " Batch normalisation takes its statistics of half the batch."
        yield Variant(
            code="FX302",
            change="Split the batch into 2 micro-batches, each moved to the device by itself, and "
            "add up their gradients",
            option="accumulate=2 with half the batch",
            cost=cost,
            options={"accumulate": 2},
            inputs=halved,
        )


def _list_optimizers(optimizer: str) -> Iterator[Variant]:
    """Lists the optimizer without lists of all parameters, and with a kernel of its own."""
    name, settings = parse_settings(optimizer)
    make = OPTIMIZERS[name]
    accepted = inspect.signature(make).parameters
    kept = {key: value for key, value in settings.items() if key not in ("foreach", "fused")}
    own_name = getattr(make, "func", make).__name__
    for key, value in (("foreach", False), ("fused", True)):
        if key in accepted and settings.get(key) is not value and settings.get("fused") is not True:
            code, change, cost = _IMPLEMENTATIONS[key]
            text = ", ".join(f"{k}={v!r}" for k, v in {**kept, key: value}.items())
            option = f"{own_name}(..., {key}={value})"
            yield Variant(code, change, option, cost, {"optimizer": f"{name}({text})"})
    if name in ("adam", "adamw") and not settings.get("amsgrad"):  # which bitsandbytes refuses
        yield Variant(
            code="FX205",
            change="Hold the states of Adam in 8 bits",
            option="bitsandbytes.optim.AdamW8bit(model.parameters(), lr=...)",
            cost="States are rounded, in blocks of 256; small tensors keep theirs in 32 bits.",
            options={"optimizer": "adam8bit"},
        )


def _list_adapters(analysis: Analysis, target: str) -> Iterator[Variant]:
    """Lists LoRA, on weights in 4 bits too, for a model of matrices that are trained."""
    weights = (s for s in analysis.graph.storages if s.category is Category.PARAMETER)
    matrix_bytes = sum(storage.nbytes for storage in weights if len(storage.shape) == 2)
    least_bytes = analysis.parameter_bytes / 2
    if min(matrix_bytes, analysis.gradient_bytes) <= least_bytes:
        return
    make = "peft.get_peft_model(model, LoraConfig(r=16, target_modules=...))"
    cost = "Another training: adapters of rank 16 learn, the model does not."
    yield Variant(
        code="FX305",
        change="Train LoRA on the linear layers, but for the last",
        option=f"model = {make}",
        cost=cost,
        model=write_changed(target, ["lora"]),
    )
    yield Variant(
        code="FX306",
        change="Train LoRA on linear layers that are packed in 4 bits, but for the last",
        option=f"BitsAndBytesConfig(load_in_4bit=True) where the model is loaded; {make}",
        cost=f"{cost} Slower: each product unpacks its weight.",
        model=write_changed(target, ["qlora"]),
    )


def halve_inputs(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Halves the first size of all input tensors; None where it is not one even number.

    >>> halve_inputs(("8x3", 0.5), {"y": "8:int64"})[0]
    (TensorSpec(shape=(4, 3), dtype='float32', requires_grad=False, memory_format=''), 0.5)
    >>> halve_inputs(("8x3", "4x3"), None) is None
    True
    """
    leaves = [read_leaf(leaf) for leaf in tree_leaves(gather_inputs(args, kwargs))]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor | TensorSpec)]
    sizes = {leaf.shape[0] if len(leaf.shape) else 0 for leaf in tensors}
    if len(sizes) != 1 or min(sizes) == 0 or min(sizes) % 2:
        return None
    if any(isinstance(leaf, Tensor) and leaf.layout is not torch.strided for leaf in tensors):
        return None
    return resize_inputs(args, kwargs, find_axis(args, kwargs), min(sizes) // 2)


@contextlib.contextmanager
def fold_norms(model: nn.Module | str, fx_graph: Any) -> Iterator[tuple[nn.Module | str, int]]:
    """Yields the model without batch normalisations after convolutions, and their number.

    At the end the model is as it was. Its inference has the ``torch.fx.Graph``.
    """
    calls = Counter(node.target for node in fx_graph.nodes if node.op == "call_module")
    pairs = [  # a call of one module right after another, of which nothing else is made
        (conv, norm)
        for norm in fx_graph.nodes
        if norm.op == "call_module" and len(norm.all_input_nodes) == 1
        for conv in norm.all_input_nodes
        if conv.op == "call_module" and len(conv.users) == 1
        if calls[conv.target] == calls[norm.target] == 1
    ]
    if pairs and isinstance(model, str):
        with (
            torch.inference_mode(False),
            prepare_targets(model),
            silence_fake_kernels(),
            keep_default_on_cpu(),
            translate_devices(),
        ):
            model = load_target(model, make_fake_mode())
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        count = 0
        for conv, norm in pairs:
            assert isinstance(model, nn.Module)
            count += _fold(model, conv.target, norm.target, before)
        yield model, count
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def _fold(
    model: nn.Module, conv_name: str, norm_name: str, before: list[tuple[nn.Module, str, Any]]
) -> bool:
    """Folds a pair as far as memory goes: weights keep their shape, and there is a bias.

    Source: ``torch/nn/utils/fusion.py``, ``fuse_conv_bn_weights``.
    """
    conv, norm = model.get_submodule(conv_name), model.get_submodule(norm_name)
    if type(norm) is not _FOLDED.get(type(conv)) or norm.running_mean is None:
        return False
    if conv.bias is None:
        before.append((conv, "bias", None))
        conv.bias = nn.Parameter(conv.weight.new_empty(conv.weight.shape[0]))
    parent_name, _, name = norm_name.rpartition(".")
    parent = model.get_submodule(parent_name)
    before.append((parent, name, norm))
    setattr(parent, name, nn.Identity())
    return True


def advise(
    model: nn.Module | str, args: Any = (), kwargs: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Finding, ...]:
    """Finds changes other than a plan that lower the peak of a step, largest saving first.

    Each has a code (``fxmem explain FX101``). The findings of the report and activations in the
    host's memory are simulated on the recorded step; the others are analysed again: autocast,
    ``zero_grad(set_to_none=True)``, the optimizer's implementation and 8-bit states, micro-batches,
    LoRA for a TARGET on a GPU, and in inference batch normalisations folded into convolutions. Left
    out are changes that the step has already, that save less than both 0.5 % and 1 MiB, or with
    which it cannot be traced.

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
    >>> [finding.code for finding in findings]
    ['FX205', 'FX204']
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
                changed = analyze(
                    variant.model or model, positional, named, **{**options, **variant.options}
                )
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

    found = [
        try_variant(variant) for variant in list_variants(analysis, model, args, kwargs, options)
    ]
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
