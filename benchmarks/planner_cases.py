"""The models of the planner's benchmark, and what people do by hand to run them in less memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases import Case, hugging_face, ids, image, vision
from benchmarks.planner_measure import Forward
from examples.planner_nets import DeepResNet, PlainGPT
from examples.unet import UNet
from fxmem.planning.strategies.chain import (
    Chain,
    Kept,
    Schedule,
    Stage,
    StageOption,
    find_least_memory,
    keep_stages,
    measure_kept,
    solve_chain,
)
from fxmem.verifying.measuring import find_peak, watch_allocations

Prepare = Callable[[nn.Module], Forward]
"""Takes a model, which it may change, and returns what to call instead of it."""

ROTOR_BUDGETS = 10


@dataclass(frozen=True)
class PlannerCase:
    """A model and what it is compared with.

    Attributes:
        case: The model and its inputs.
        baselines: By name, what people do by hand.
        chained: Whether the model is a ``stem``, ``blocks`` and a ``head``: then it is compared
            with all that is made for chains, and with PyTorch's own budget.
    """

    case: Case
    baselines: dict[str, Prepare] = field(default_factory=dict)
    chained: bool = False


def checkpoint_modules(model: nn.Module, is_block: Callable[[nn.Module], bool]) -> Forward:
    """Puts the calls of some modules under checkpoints."""
    blocks = [module for module in model.modules() if is_block(module)]
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no such blocks")
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def checkpoint_types(*names: str) -> Prepare:
    """Puts each module of some types under a checkpoint."""
    return lambda model: checkpoint_modules(model, lambda m: type(m).__name__ in names)


def save_memory_in_dense_layers(model: nn.Module) -> Forward:
    """Sets ``memory_efficient`` as torchvision's DenseNet does."""
    for module in model.modules():
        if hasattr(module, "memory_efficient"):
            module.memory_efficient = True
    return model


def enable_gradient_checkpointing(model: Any) -> Forward:
    """The switch of transformers."""
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


# -- chains -------------------------------------------------------------------------------------


def list_stages(model: Any) -> list[nn.Module]:
    """The stem, the blocks and the head of a chain."""
    return [model.stem, *model.blocks, model.head]


def run_stages(stages: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Some modules one after the other."""
    for stage in stages:
        x = stage(x)
    return x


def checkpoint_segments(size: int | None) -> Prepare:
    """Puts each run of ``size`` blocks under a checkpoint; None for all of them under one."""

    def prepare(model: Any) -> Forward:
        blocks = [*model.blocks]
        step = size or len(blocks)

        def forward(x: Tensor) -> Tensor:
            x = model.stem(x)
            for start in range(0, len(blocks), step):
                segment = partial(run_stages, blocks[start : start + step])
                x = checkpoint(segment, x, use_reentrant=False)
            return model.head(x)

        return forward

    return prepare


def checkpoint_by_root(model: Any) -> Forward:
    """As many segments as the root of the number of blocks; the last one keeps everything."""
    segments = round(math.sqrt(len(model.blocks)))

    def forward(x: Tensor) -> Tensor:
        blocks = nn.Sequential(*model.blocks)
        x = checkpoint_sequential(blocks, segments, model.stem(x), use_reentrant=False)
        return model.head(x)

    return forward


CHAINED: dict[str, Prepare] = {
    "every block": checkpoint_segments(1),
    "segments of two": checkpoint_segments(2),
    "segments of four": checkpoint_segments(4),
    "one region": checkpoint_segments(None),
    "sqrt(n)": checkpoint_by_root,
}


@dataclass(frozen=True)
class _StageSizes:
    """The cost of one module: bytes, and FLOPs of its forward."""

    input_bytes: int
    output_bytes: int
    saved_bytes: int
    saved_peak_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    parameter_bytes: int
    flops: int


def _measure_stage(stage: nn.Module, x: Tensor) -> tuple[_StageSizes, Tensor]:
    """Runs a module alone, three times, and reads its sizes off the allocator's events."""
    inputs = x.detach().requires_grad_(x.is_floating_point())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        output = stage(inputs)
    gradient = torch.ones_like(output)
    stage.zero_grad(set_to_none=True)
    inputs.grad = None
    with watch_allocations() as seen:
        with record_function("span free"), torch.no_grad():
            stage(inputs)
        with record_function("span forward"):
            saved = stage(inputs)
        edge = torch.autograd.graph.get_gradient_edge(saved)
        with record_function("span backward"):
            del saved  # the stage after it is done with it by then
            torch.autograd.backward((edge,), (gradient,))
        stage.zero_grad(set_to_none=True)  # here, where the profiler sees it
        inputs.grad = None
    has_gradient = inputs.requires_grad
    sizes = _StageSizes(
        input_bytes=inputs.nbytes,
        output_bytes=output.nbytes,
        saved_bytes=sum(seen["span forward"]),
        saved_peak_bytes=find_peak(seen["span forward"]),
        forward_peak_bytes=find_peak(seen["span free"]),
        backward_peak_bytes=find_peak(seen["span backward"]) - inputs.nbytes * has_gradient,
        parameter_bytes=sum(p.nbytes for p in stage.parameters()),
        flops=int(counter.get_total_flops()),
    )
    return sizes, output


def build_chain(model: Any, x: Tensor) -> Chain:
    """The chain of a model's stages, as measured: each keeps everything or only its input."""
    measured: list[_StageSizes] = []
    for stage in list_stages(model):
        sizes, x = _measure_stage(stage, x)
        measured.append(sizes)
    held, stages = 0, []
    for index, sizes in reversed([*enumerate(measured)]):
        option = StageOption(
            sizes.saved_bytes,
            forward_peak_bytes=sizes.saved_peak_bytes - sizes.saved_bytes,
            backward_peak_bytes=sizes.backward_peak_bytes,
        )
        stage = Stage(
            sizes.input_bytes,
            sizes.input_bytes if index else 0,
            float(sizes.flops),
            (option,),
            max(0, sizes.forward_peak_bytes - sizes.output_bytes),
            held,
        )
        stages.append(stage)
        held += sizes.parameter_bytes
    return Chain(tuple(reversed(stages)), measured[-1].output_bytes, measured[-1].output_bytes)


def run_schedule(stages: Sequence[nn.Module], schedule: Schedule, x: Tensor) -> Tensor:
    """Runs stages by a schedule: what it computes again is under checkpoints, nested."""
    for entry in schedule:
        if isinstance(entry, Kept):
            x = stages[entry.stage](x)
        else:
            body = partial(run_schedule, stages, entry.body)
            x = checkpoint(body, x, use_reentrant=False)
    return x


def find_rotor_schedules(chain: Chain) -> list[Schedule]:
    """The best schedules of a chain for some budgets, each once, dearest last."""
    least, kept = find_least_memory(chain), keep_stages(chain)
    most = measure_kept(chain)
    steps = range(ROTOR_BUDGETS)
    budgets = [int(most * (least / most) ** (i / (ROTOR_BUDGETS - 1))) for i in steps]
    budgets[-1] = least
    found = dict.fromkeys(solve_chain(chain, budgets))
    return [schedule for schedule in found if schedule != kept]


def list_rotor(model: Any, x: Tensor) -> Iterator[tuple[str, Prepare]]:
    """Rotor's schedules over the blocks of a model, by name."""

    def prepare(schedule: Schedule, other: Any) -> Forward:
        return partial(run_schedule, list_stages(other), schedule)

    for number, schedule in enumerate(find_rotor_schedules(build_chain(model, x)), 1):
        yield f"rotor {number}", partial(prepare, schedule)


# -- the models ---------------------------------------------------------------------------------

GPT2 = {
    "n_layer": 8,
    "n_embd": 256,
    "n_head": 8,
    "vocab_size": 1000,
    "attn_implementation": "eager",
}

CASES = (
    PlannerCase(Case("resnet", DeepResNet, (image(32, 3, 32, 32),)), CHAINED, chained=True),
    PlannerCase(Case("gpt", PlainGPT, (ids(8, 256),)), CHAINED, chained=True),
    PlannerCase(
        Case("resnet50", vision("resnet50"), (image(4, 3, 224, 224),)),
        {"every block": checkpoint_types("Bottleneck")},
    ),
    PlannerCase(
        Case("densenet121", vision("densenet121"), (image(2, 3, 224, 224),)),
        {
            "memory_efficient=True": save_memory_in_dense_layers,
            "every dense block": checkpoint_types("_DenseBlock"),
        },
    ),
    PlannerCase(
        Case(
            "gpt2",
            hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT2),
            (),
            {"input_ids": ids(2, 256, high=1000), "use_cache": False},
        ),
        {"activation_checkpointing_enable()": enable_gradient_checkpointing},
    ),
    PlannerCase(
        Case("swin_t", vision("swin_t"), (image(2, 3, 224, 224),)),
        {"every block": checkpoint_types("SwinTransformerBlock")},
    ),
    PlannerCase(
        Case("unet", UNet, (image(2, 3, 128, 128),)),
        {"every block": checkpoint_types("DoubleConvolution")},
    ),
    PlannerCase(
        Case("convnext_tiny", vision("convnext_tiny"), (image(2, 3, 224, 224),)),
        {"every block": checkpoint_types("CNBlock")},
    ),
)
