"""The public functions of fxmem.

Each one names its arguments, explains them, and hands them on, ``locals()``, to what does the
work. That is imported when it is called: torch takes more than a second to import, and ``import
fxmem`` does without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, overload

import fxmem.advice.finders  # noqa: F401 - registers the findings
from fxmem.analysis import Analysis
from fxmem.loading.parsing import is_target
from fxmem.planning.plan import Front, Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fxmem.batching.record import MaxBatch
    from fxmem.comparison.comparison import Comparison
    from fxmem.finding import Finding
    from fxmem.fitting.record import Fitting
    from fxmem.parallelism.layout import ParallelizeChoice
    from fxmem.pipelines.pipeline import Pipeline
    from fxmem.planning.strategies.problem import Strategy
    from fxmem.recording.size_hints import SizeHint
    from fxmem.scripts.recording import Recording
    from fxmem.scripts.script_run import ScriptRun
    from fxmem.training.loops import LoopChoice
    from fxmem.training.options import LossChoice, OptimizerChoice
    from fxmem.verifying.verification import Verification

_Makes = TypeVar("_Makes", bound="Callable[..., nn.Module]")


def analyze(
    model: nn.Module | str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "train",
    inference_mode: bool = False,
    device: str | torch.device = "cuda",
    gpu: str | None = None,
    attention: str | None = None,
    dtype: str | torch.dtype | None = None,
    autocast: str | torch.dtype | None = None,
    optimizer: OptimizerChoice = None,
    loss: LossChoice = None,
    loop: LoopChoice = "plain",
    accumulate: int | None = None,
    set_to_none: bool | None = None,
    hold_outputs: bool | None = None,
    alloc_conf: str | None = None,
    frontend: str | None = None,
    size_hint: SizeHint = None,
    mesh: Mapping[str, int] | None = None,
    parallelize: ParallelizeChoice = None,
    rank: int | str = 0,
) -> Analysis:
    """Measures the memory of a step of a model: its peak, and what is alive there.

    The step runs twice on fake tensors, which have no memory, and the second run is reported:
    ``zero_grad(set_to_none=True)``, forward, loss, backward, ``optimizer.step()``, in the order
    of the training loop.

    Args:
        model: A module with real, meta or fake parameters, which is left unchanged; or a TARGET
            such as ``"module:Model"``, which is built without allocating its parameters.
        args: Positional inputs, in a tuple: tensors, :class:`fxmem.TensorSpec` or
            ``"8x3x224x224:bf16"``. A single input needs no tuple.
        kwargs: Keyword inputs, of the same kinds.
        mode: ``"train"``, or ``"infer"`` for ``eval()`` under ``no_grad()``.
        inference_mode: With ``mode="infer"``, run under ``torch.inference_mode()`` instead, where
            autocast keeps no casts of weights.
        device: Target device (need not be present): ``"cuda"``, whose peak is to be compared
            with ``torch.cuda.max_memory_allocated()``, or ``"cpu"`` for training on the CPU.
        gpu: The target GPU (``"h100"``, ``"rtx4090"``): its architecture decides which kernels
            run, its capacity whether the step fits. None for an A100's architecture and
            unlimited memory.
        attention: What ``scaled_dot_product_attention`` tries first: ``"flash"``, ``"cudnn"``,
            ``"efficient"`` or ``"math"``. None for PyTorch's order on that GPU.
        dtype: The dtype that parameters and floating inputs are cast to.
        autocast: The dtype that forward and loss are autocast to: ``"bf16"``, or ``"fp16"``,
            which takes a gradient scaler on CUDA. None for no autocast.
        optimizer: None, a name (``"sgd"``, ``"adam"``, ...), a callable from parameters to an
            optimizer, or a TARGET that names one.
        loss: None for the output's ``.loss``, else the sum of its floating tensors; a name
            (``"cross_entropy"``, ``"mse"``, ...), a callable from the output to a scalar, or a
            TARGET that names one.
        loop: The training loop around the model: ``"plain"``, with output and loss held to the
            end of the step; ``"huggingface"`` for ``transformers.Trainer``; ``"lightning"`` for
            ``lightning.Trainer``; ``"fabric"`` for ``lightning.Fabric``; one of them with
            settings (``"huggingface(accumulate=4)"``); or a function of a
            :class:`fxmem.training.training.Training`, or a TARGET that names one.
        accumulate: Overrides the loop's number of micro-batches, each of the inputs given, whose
            gradients add up before the optimizer steps.
        set_to_none: Overrides whether the loop's ``optimizer.zero_grad`` frees gradients.
        hold_outputs: Overrides the loop's ``outputs``: True keeps the previous step's output and
            loss alive until reassigned (``"next step"``), False to the end of the ``"step"``.
        alloc_conf: Settings of the CUDA caching allocator, as in ``PYTORCH_ALLOC_CONF``, whose
            value is the default.
        frontend: ``"fx"`` or ``"record"`` to force a tracer; None takes the first that serves.
        size_hint: How many elements ``nonzero``, boolean masks and the like find, in all lines
            or by line, ``{"expert.py:31": 512}``; without it a model whose sizes depend on data
            is refused.
        mesh: Names and sizes of the dimensions of a ``DeviceMesh``, ``{"dp": 8, "tp": 4}``: the
            step is that of one rank of so many processes, which need not be there.
        parallelize: A function ``parallelize(model, mesh)`` that parallelizes the model
            (``fully_shard``, ``parallelize_module``, ``DistributedDataParallel``, ...) and
            returns it, or None where it changes it in place; or a TARGET that names one;
            ``"fsdp"`` for ``fully_shard`` on each repeated block and the root; ``"ddp"``.
        rank: The rank that is analysed; ``"worst"`` for the one with the highest peak.

    Returns:
        Every number of the step; sizes are integers in bytes.

    Raises:
        UsageError: An argument is not understood.
        LoadError: The TARGET cannot be loaded.
        TraceError: The step cannot be run on fake tensors.

    >>> from torch import nn
    >>> analysis = analyze(nn.Linear(4, 2), ("8x4",), loss="mse")
    >>> analysis.parameter_bytes, analysis.input_bytes
    (40, 192)
    >>> analysis.setup.device
    'cuda'
    """
    given = locals()
    from fxmem.analyzing import analyze_model

    return analyze_model(**given)


def run(
    script: str,
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    steps: int | None = None,
    device: str = "cuda",
    gpu: str | None = None,
    attention: str | None = None,
    alloc_conf: str | None = None,
    size_hint: SizeHint = None,
    world_size: int | None = None,
    rank: int = 0,
) -> ScriptRun:
    """Runs a training script as it is, and measures the memory of its steps.

    ``torch.cuda`` answers as on a machine with one GPU. What the script puts there becomes fake
    tensors, which have no memory; operators on them are recorded and compute nothing. Everything
    else is real: data sets, loaders, files. Reading a fake tensor's value, such as a loss, returns
    1; an assertion gets the answer that passes. The script ends when all of its optimizers have
    stepped so many times.

    Args:
        script: The path of a script, the name of a module, or a program that starts one, as
            ``torchrun`` does.
        arguments: Its arguments.
        is_module: Whether ``script`` names a module, as for ``python -m``.
        steps: How many steps to record; by default three, or two of more than 100,000 operators.
        device: ``"cuda"``; or ``"cpu"``, for a script that finds no GPU and trains on the CPU.
        gpu: As for :func:`analyze`.
        attention: As for :func:`analyze`.
        alloc_conf: As for :func:`analyze`.
        size_hint: How many elements ``nonzero``, boolean masks and the like find; None for all.
        world_size: The number of processes, as ``torchrun --nproc-per-node`` starts them; the
            others need not be there. None for as many as the script starts.
        rank: The one of them that runs.

    Raises:
        UsageError: There is no such script, or an argument is not understood.
        TraceError: The script fails, or ends before a step.
    """
    given = locals()
    from fxmem.scripts.script import run_script

    return run_script(**given)


def record(
    *,
    steps: int | None = None,
    device: str = "cuda",
    gpu: str | None = None,
    attention: str | None = None,
    alloc_conf: str | None = None,
    size_hint: SizeHint = None,
    world_size: int | None = None,
    rank: int = 0,
) -> AbstractContextManager[Recording]:
    """Records the steps of the code in a ``with`` statement, on fake tensors.

    The code is as for a GPU: it makes or moves models and data to ``"cuda"``. A step ends when all
    optimizers have stepped. When another begins after the last one asked for, the block is left,
    and the program goes on after it. Modules that were moved within get their own tensors back;
    other tensors that were made within have no values.

    Args:
        steps: As for :func:`fxmem.run`, like the other arguments.
        device: ``"cuda"``, or ``"cpu"`` for code that trains there.
        gpu: The target GPU.
        attention: The backend of attention that is assumed.
        alloc_conf: As ``PYTORCH_ALLOC_CONF``.
        size_hint: How many elements ``nonzero``, boolean masks and the like find; None for all.
        world_size: The number of processes, of which this is one.
        rank: Its rank.

    Raises:
        UsageError: An argument is not understood.

    >>> import torch
    >>> model = torch.nn.Linear(1024, 1024)
    >>> with record(gpu="h100", steps=1) as recording:
    ...     loss = model.cuda()(torch.ones(256, 1024, device="cuda")).sum()
    ...     with recording.phase("backward"):
    ...         loss.backward()
    >>> recording.peak.phase.value, [phase.name for phase in recording.phases]
    ('backward', ['backward'])
    >>> model.weight.device.type
    'cpu'
    """
    given = locals()
    from fxmem.scripts.recording import record_code

    return record_code(**given)


def register_workspace(operator: str, rule: Callable[..., int]) -> None:
    """States the memory that the kernel of an operator takes besides its results.

    Analyses count this memory while the operator runs, and no longer name the operator among
    those whose memory is unknown. Results and saved tensors need no rule: they come from
    ``torch.library.register_fake`` and ``register_autograd``.

    Args:
        operator: ``"mylib::splitk"``, or with an overload ``"mylib::splitk.out"``.
        rule: Takes the operator's arguments, whose tensors have shapes and no values, and returns
            bytes.

    Raises:
        UsageError: There is no such operator.
    """
    from fxmem.kernels.extensions import add_workspace

    add_workspace(operator, rule)


def register_finding(
    code: str, find: Callable[[Analysis], Iterable[Finding]], title: str, text: str = ""
) -> None:
    """Registers a finding of your own, which reports list and ``fxmem explain`` explains.

    Args:
        code: The code, such as ``"ACME1"``.
        find: Takes an analysis, whose step is not run again, and returns :class:`fxmem.Finding` of
            that code.
        title: Why the memory is taken, in a line.
        text: Markdown with what to write instead.
    """
    from fxmem.finding import add_finding

    add_finding(code, find, f"{title}\n\n{text}")


def register_format(suffix: str, renderer: Callable[[Any], str | bytes]) -> None:
    """Registers a format of reports, for ``-o`` of all commands and :func:`fxmem.render`.

    Args:
        suffix: The suffix of its files, such as ``".tex"``.
        renderer: Takes any result, whose ``list_blocks()`` and ``to_dict()`` have all that there
            is, and returns the content of a file.

    Raises:
        UsageError: The suffix is none.
    """
    from fxmem.report.formats import add_format

    add_format(suffix, renderer)


def fit(
    model: nn.Module | str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    gpu: str,
    gpus: int = 8,
    gpus_per_node: int = 8,
    parallelize: ParallelizeChoice = None,
    mesh: Mapping[str, int | None] | None = None,
    mixed_precision: str | torch.dtype | None = None,
    **options: Any,
) -> Fitting:
    """Searches device meshes and settings with which one rank's step fits the GPU.

    Without a function, ``fully_shard`` over all GPUs and over replicated parts of them is compared
    with ``DistributedDataParallel``. A mesh is tried without checkpointing first, then with more of
    it, where that does not fit; without resharding after forward, and with it; with
    ``CPUOffloadPolicy`` where nothing else fits on any mesh; under DDP also with
    ``ZeroRedundancyOptimizer``.

    Args:
        model: As for :func:`fxmem.analyze`.
        args: Positional inputs, the batch of one rank.
        kwargs: Keyword inputs.
        gpu: The GPU, as for :func:`fxmem.analyze`.
        gpus: How many there are.
        gpus_per_node: How many consecutive ranks share a node.
        parallelize: ``"fsdp"`` or ``"ddp"`` for one of them alone; or a function as for
            :func:`fxmem.analyze`, or a TARGET: checkpoints are put on its blocks, unless it has
            put ``checkpoint_wrapper`` on some.
        mesh: The function's mesh, with None for sizes that are left open, ``{"dp": None, "tp":
            None}``: the first takes what the others leave, which are powers of two within a node.
        mixed_precision: The dtype of parameters in forward and backward, ``"bf16"``:
            ``MixedPrecisionPolicy``, with gradients reduced in float32; autocast under DDP.
        options: Other arguments of :func:`fxmem.analyze`: ``optimizer``, ``loss``, ...

    Returns:
        The meshes with their knobs: the fitting ones first, cheapest communication first.

    Raises:
        UsageError: An argument is not understood.
        LoadError: The TARGET cannot be loaded.
        TraceError: The step cannot be run on fake tensors.

    >>> from torch import nn
    >>> found = fit(nn.Linear(64, 64), "8x64", gpu="t4", gpus=2, parallelize="ddp")
    >>> found.best.mesh, found.best.far_bytes, found.recordings
    ({'dp': 2}, 0, 1)
    """
    given = {**locals(), **options}
    del given["options"]
    from fxmem.fitting.search import find_fitting

    return find_fitting(**given)


def pipeline(
    stages: Sequence[nn.Module] | nn.Module | str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    schedule: str = "1F1B",
    microbatches: int = 8,
    ranks: int | None = None,
    device: str | torch.device = "cuda",
    gpu: str | None = None,
    attention: str | None = None,
    dtype: str | torch.dtype | None = None,
    optimizer: OptimizerChoice = None,
    loss: LossChoice = None,
    return_outputs: bool = True,
    alloc_conf: str | None = None,
    size_hint: SizeHint = None,
    mesh: Mapping[str, int] | None = None,
    parallelize: ParallelizeChoice = None,
) -> Pipeline:
    """Measures the memory of each rank of a pipeline of ``torch.distributed.pipelining``.

    PyTorch's own stages and schedule run on each rank in turn, in a process group whose other ranks
    are not there. Recorded is a steady step of each rank::

        optimizer.zero_grad()  # an optimizer for each stage
        output = schedule.step(*args, target=target, losses=losses, **kwargs)
        optimizer.step()

    Args:
        stages: The modules, each taking what the one before returns: a list, a ``ModuleList`` or
            ``Sequential``, or a TARGET of one, such as a function that returns the list.
        args: Positional inputs of the first stage, of all micro-batches together: PyTorch splits
            them along dimension 0.
        kwargs: Keyword inputs, which every stage takes.
        schedule: A name that ``torch.distributed.pipelining.schedules.get_schedule_class`` takes.
        microbatches: Micro-batches of a step.
        ranks: The ranks that the stages are dealt to. None for as many as stages, and half as many
            for a schedule of several stages a rank.
        device: As for :func:`analyze`.
        gpu: As for :func:`analyze`.
        attention: As for :func:`analyze`.
        dtype: As for :func:`analyze`.
        optimizer: As for :func:`analyze`; each stage has one.
        loss: As for :func:`analyze`, of the last stage's output.
        return_outputs: As for ``schedule.step``: whether the last rank merges and returns results.
        alloc_conf: As for :func:`analyze`.
        size_hint: As for :func:`analyze`.
        mesh: The processes that share each stage, as for :func:`analyze`: the mesh without the
            dimension of the pipeline.
        parallelize: As for :func:`analyze`, for a stage.

    Raises:
        UsageError: An argument is not understood, or the schedule does not take these numbers.
        LoadError: The TARGET cannot be loaded.
        TraceError: A stage cannot be run on fake tensors.

    >>> from torch import nn
    >>> found = pipeline([nn.Linear(64, 64) for _ in range(4)], "32x64", device="cpu")
    >>> [rank.stages[0].most_in_flight for rank in found.ranks]
    [4, 3, 2, 1]
    """
    given = locals()
    from fxmem.pipelines.pipelining import analyze_pipeline

    return analyze_pipeline(**given)


def plan(
    analysis: Analysis,
    *,
    budget: str | float | None = None,
    max_overhead: float | None = None,
    max_overhead_flops: float | None = None,
    time_limit_s: float | None = None,
    style: str | None = None,
    strategy: str | Strategy | None = None,
) -> Plan:
    """Finds the plan that keeps a limit.

    A plan of a training step says what to recompute in backward. In inference nothing is
    recomputed: the plan says what runs in place and what is freed early, and needs no limit.

    Args:
        analysis: Of the step.
        budget: Most memory of the step, in bytes or as ``"8GiB"``: the cheapest plan within it.
        max_overhead: Most time that a plan may add, as a share of the step's: the plan with the
            lowest peak.
        max_overhead_flops: Most FLOPs that a plan may add, as a share of the step's.
        time_limit_s: Seconds after which the search is cut short. Without it the search ends
            after so many trials, and finds the same plan on any machine.
        style: ``"graph"`` for any consecutive operations, by rewriting the model's graph;
            ``"modules"`` for all of a module's calls, by wrapping the module, which leaves the
            model's code as it is. None for the first where the ``fx`` frontend served, else the
            second.
        strategy: A :class:`fxmem.planning.strategies.problem.Strategy` of your own, a TARGET of
            one, or ``"search"`` (None too), ``"schedules"``, ``"changes"`` or ``"modules"``.

    Raises:
        InfeasibleError: No plan within the budget was found.
        UsageError: Not exactly one limit is given, or it is not understood; or there is no such
            style for the step.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(8, 64), *[nn.Tanh() for _ in range(8)], nn.Linear(64, 1))
    >>> found = plan(analyze(net, "4096x8", device="cpu"), budget="6MiB", time_limit_s=1)
    >>> found.baseline_peak_bytes > 9 * 2**20 > 6 * 2**20 >= found.peak_bytes
    True
    """
    given = {**locals(), "strategy": _load_strategy(strategy)}
    find_plan: Callable[..., Plan]
    if isinstance(analysis, Analysis) and analysis.setup.mesh is not None:
        from fxmem.applying.rank_plans import plan_rank as find_plan
    else:
        from fxmem.planning.planner import plan as find_plan

    return find_plan(**given)


def pareto(
    analysis: Analysis,
    *,
    by_flops: bool = False,
    points: int = 20,
    time_limit_s: float | None = None,
    style: str | None = None,
    strategy: str | Strategy | None = None,
) -> Front:
    """Lists the trade-offs of a step between memory and time.

    Args:
        analysis: Of a training step.
        by_flops: Count costs in FLOPs, else in time.
        points: Most plans to return, spread over the peaks.
        time_limit_s: As for :func:`fxmem.plan`.
        style: As for :func:`fxmem.plan`.
        strategy: As for :func:`fxmem.plan`.

    Returns:
        A tuple of plans, cheapest first; the first one recomputes nothing. Only :func:`fxmem.plan`
        says what each segment saves.

    Raises:
        UsageError: The step is not a training step, or there is no such style for it.
    """
    given = {**locals(), "strategy": _load_strategy(strategy)}
    list_front: Callable[..., Front]
    if isinstance(analysis, Analysis) and analysis.setup.mesh is not None:
        from fxmem.applying.rank_plans import list_front
    else:
        from fxmem.planning.planner import pareto as list_front

    return list_front(**given)


def _load_strategy(strategy: str | Strategy | None) -> str | Strategy | None:
    if not is_target(strategy):
        return strategy
    from fxmem.loading.target import load_function

    function: Strategy = load_function(strategy)
    return function


def advise(
    model: nn.Module | str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
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
    from fxmem.advice import advising

    return advising.advise(model, args, kwargs, **options)


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
    given = {**locals(), **options, "strategy": _load_strategy(strategy)}
    del given["options"]
    from fxmem.batching.search import find_max_batch

    return find_max_batch(**given)


def apply(
    model: nn.Module, plan: Plan, args: Any = None, kwargs: Mapping[str, Any] | None = None
) -> nn.Module:
    """Applies a plan: the returned model computes the same, bit for bit, in less memory.

    A plan of a training step is for calls in training, a plan of inference for calls in
    ``eval()`` without gradients; other calls run the model's own ``forward``. So do, with a
    :class:`fxmem.FxmemWarning` that names the cause, calls that differ from what the graph of a
    plan of style ``"graph"`` was traced for. Which sizes of inputs may differ is tried here: the
    forward is traced with others, once for all plans of an analysis.

    Args:
        model: The model that was analysed, or another of its class.
        plan: From :func:`fxmem.plan`.
        args: Inputs as for :func:`fxmem.analyze`, where the plan comes from a file: the model is
            traced with them again. A plan of style ``"modules"`` needs none, and is checked
            against what is traced with them.
        kwargs: Keyword inputs, of the same kinds.

    Returns:
        A module with the same parameters, buffers and names in its ``state_dict``. With style
        ``"modules"`` it is an instance of the model's own class, with the very same attributes.

    Raises:
        UsageError: The plan is not this model's, or is from a file and no inputs were given; or
            the model's graph cannot be run.
    """
    from fxmem.applying import applying

    return applying.apply(model, plan, args, kwargs)


def unapply(model: nn.Module) -> nn.Module:
    """Gives back the model that a plan was applied to, with parameters and attributes as they are.

    Args:
        model: From :func:`fxmem.apply`; or from :func:`fxmem.auto`, which then plans no more.

    Raises:
        UsageError: No plan was applied to it.
    """
    from fxmem.applying import auto as automatic

    return automatic.unapply(model)


@overload
def auto(
    model: nn.Module, args: Any = None, kwargs: Mapping[str, Any] | None = None, **options: Any
) -> nn.Module: ...
@overload
def auto(model: _Makes, **options: Any) -> _Makes: ...
@overload
def auto(**options: Any) -> Callable[[_Makes], _Makes]: ...
def auto(
    model: Any = None,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: str | float | None = None,
    max_overhead: float | None = None,
    max_overhead_flops: float | None = None,
    style: str | None = None,
    time_limit_s: float | None = None,
    strategy: str | Strategy | None = None,
    device: str = "cuda",
    gpu: str | None = None,
    **options: Any,
) -> Any:
    """Makes a model's training step keep a limit: analyses, plans and applies.

    With inputs this happens at once. Without inputs, and as a decorator of a class of modules or
    of a function that makes one, it happens at the first training step, for that step's inputs.

    Args:
        model: The model; or a class of modules or a function that makes one, whose modules then
            plan themselves. None returns a decorator.
        args: Inputs as for :func:`fxmem.analyze`; None, without keyword inputs, waits for a step.
        kwargs: Keyword inputs, of the same kinds.
        budget: Most memory of the step, as for :func:`fxmem.plan`. Without any limit it is the
            whole memory of ``gpu``, or else of this machine's CUDA device. CUDA's context, and
            memory that the allocator cannot use, come on top of the step.
        max_overhead: As for :func:`fxmem.plan`.
        max_overhead_flops: As for :func:`fxmem.plan`.
        style: As for :func:`fxmem.plan`.
        time_limit_s: As for :func:`fxmem.plan`.
        strategy: As for :func:`fxmem.plan`.
        device: As for :func:`fxmem.analyze`.
        gpu: As for :func:`fxmem.analyze`.
        options: Other arguments of :func:`fxmem.analyze` for a training step: ``optimizer``,
            ``loss``, ``autocast``, ``alloc_conf``, ...

    Returns:
        With inputs, what :func:`fxmem.apply` returns, or the model itself where its step keeps
        the budget without a plan. Without inputs, the model, which plans itself; or the class, a
        function in place of the one given, or a decorator.

    Raises:
        InfeasibleError: No plan within the budget was found. A model that plans itself raises
            this in its step, like all that :func:`fxmem.analyze` raises.
        UsageError: There is no limit, or several.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(8, 64), *[nn.Tanh() for _ in range(8)], nn.Linear(64, 1))
    >>> auto(net, "4096x8", budget="1GiB", device="cpu") is net
    True
    >>> planned = auto(net, "4096x8", budget="6MiB", device="cpu", time_limit_s=1)
    >>> planned.plan.baseline_peak_bytes > 9 * 2**20 > 6 * 2**20 >= planned.plan.peak_bytes
    True
    """
    given = {**locals(), **options, "strategy": _load_strategy(strategy)}
    del given["options"]
    from fxmem.applying import auto as automatic

    return automatic.auto(**given)


def verify(
    model: nn.Module,
    planned: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "train",
    steps: int = 3,
    seed: int = 0,
    optimizer: OptimizerChoice = None,
    loss: LossChoice = None,
    autocast: str | torch.dtype | None = None,
    mesh: Mapping[str, int] | None = None,
    parallelize: ParallelizeChoice = None,
) -> Verification:
    """Runs real steps with and without a plan, and compares them bit for bit.

    Both models take real steps from the same state, with the same inputs and random numbers, on
    the model's device. Compared after each step: output, loss, every gradient, buffer and
    parameter, the optimizer's state, inputs that were changed, and the states of all random number
    generators. Then the peak of a step of each model is measured, and the second one compared with
    the plan's, if there is one. Afterwards both models, their gradients and the random numbers are
    as they were before.

    Args:
        model: The model.
        planned: The model with a plan, from :func:`fxmem.apply`; or any other whose parameters
            and buffers have the same names. Its own values are not used.
        args: Positional inputs, as for :func:`fxmem.analyze`. Inputs without values are random:
            normal where they are floating, else 0 or 1.
        kwargs: Keyword inputs, of the same kinds.
        mode: ``"train"``, or ``"infer"`` for ``eval()`` under ``no_grad()``.
        steps: How many steps to compare.
        seed: Seed of the inputs and of the random numbers of the first step.
        optimizer: As for :func:`fxmem.analyze`; without one, parameters stay as they are.
        loss: As for :func:`fxmem.analyze`.
        autocast: ``"bf16"`` to autocast forward and loss.
        mesh: As for :func:`fxmem.analyze`: each rank, of four at most, is a process of a gloo
            group on this machine's CPU, and lays out a copy of either model. Shards of gradients
            and parameters are compared on each rank; peaks are not measured.
        parallelize: As for :func:`fxmem.analyze`; the processes must be able to import it.

    Raises:
        UsageError: An argument is not understood, or the models cannot be compared.
        TraceError: The step of the first model fails.

    >>> from torch import nn
    >>> report = verify(nn.Linear(4, 2), nn.Linear(4, 2), "8x4", optimizer="adam")
    >>> report.equal, report.steps, report.compared["gradient"]
    (True, 3, 2)
    """
    given = locals()
    from fxmem.verifying.proof import verify as verify_models

    return verify_models(**given)


def render(
    result: Any,
    path: str | os.PathLike[str],
    *,
    view: str | None = None,
    depth: int | None = None,
    expand: bool = False,
    plan: Plan | None = None,
    front: Iterable[Plan] = (),
) -> None:
    """Writes a result to a file; for an analysis also the method :meth:`fxmem.Analysis.render`.

    Args:
        result: An analysis, or any other result.
        path: The file, whose suffix chooses the format: ``.txt``, ``.md``, ``.csv``, ``.json`` or
            ``.html`` for a report; of a step also ``.svg``, ``.png``, ``.pdf`` or ``.dot`` for a
            picture, and ``.pickle`` for PyTorch's memory viewer.
        view: The view of the step; None for the format's default.
        depth: How many levels of modules to open; None for as many as can be read, and
            all levels around the peak.
        expand: Show every operation and each of the blocks that repeat.
        plan: A plan to show on the step.
        front: The trade-offs of the step, from :func:`fxmem.pareto`.

    Raises:
        UsageError: The suffix is not known, or no program that draws it is installed.
    """
    from fxmem.report.formats import RenderOptions, write_file

    write_file(result, path, RenderOptions(view, depth, expand, plan, front))


def diff(before: Analysis, after: Analysis) -> Comparison:
    """Compares two analyses: their totals, and what grew at the peak.

    Args:
        before: Of the step before a change.
        after: Of the step after it.

    Returns:
        The growth of the peak, and the storages, modules and the line that account for it;
        ``print`` of it writes a report.

    >>> from torch import nn
    >>> before, after = (analyze(nn.Linear(64, n), "8x64", device="cpu") for n in (16, 32))
    >>> comparison = diff(before, after)
    >>> comparison.growth_bytes == after.peak_bytes - before.peak_bytes
    True
    """
    from fxmem.comparison.comparison import compare
    from fxmem.comparison.footprints import read_footprint

    root = os.getcwd()
    return compare(read_footprint(before.to_dict(), root), read_footprint(after.to_dict(), root))
