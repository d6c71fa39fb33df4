"""Real steps of a model, of training or of inference, and the state that they change."""

from __future__ import annotations

import contextlib
import copy
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from fxmem.errors import FxmemError, FxmemWarning, TraceError, UsageError, summarize_error
from fxmem.fakes.fake_mode import read_leaf
from fxmem.loading.inputs import Inputs
from fxmem.parallelism.layout import ParallelizeChoice
from fxmem.source import find_raising_source
from fxmem.specs import TensorSpec, parse_dtype
from fxmem.tracing.modules import HOOK_TABLES
from fxmem.tracing.state import keep_random_states
from fxmem.training.losses import resolve_loss
from fxmem.training.optimizers import Adam8bit, resolve_optimizer
from fxmem.training.options import DtypeChoice, LossChoice, OptimizerChoice, load_choice
from fxmem.verifying.comparing import Record, compare_records, compare_values, iterate_leaves
from fxmem.verifying.measuring import measure_peak
from fxmem.verifying.verification import Difference, Kind

_INTEGERS = 2
"""Integers are drawn below it: 0 and 1 are valid indices, classes and masks wherever any are."""

_HINT = "inputs without values are random, integers 0 or 1; fxmem.verify takes tensors too"


def make_inputs(
    args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device, seed: int
) -> Inputs:
    """Gives specs among inputs values: floating ones are normal, integers 0 or 1.

    >>> (x,), _ = make_inputs(["2x3:int64"], {}, torch.device("cpu"), 0)
    >>> x.shape, int(x.max()) < 2
    (torch.Size([2, 3]), True)
    """
    generator = torch.Generator().manual_seed(seed)  # values do not depend on the device

    def make(leaf: Any) -> Any:
        spec = read_leaf(leaf)
        if not isinstance(spec, TensorSpec):
            return leaf
        dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            values = torch.randn(spec.shape, dtype=wide, generator=generator)
        else:
            values = torch.randint(_INTEGERS, spec.shape, generator=generator)
        memory_format = getattr(torch, spec.memory_format or "contiguous_format")
        values = values.to(dtype).contiguous(memory_format=memory_format)
        return values.to(device).requires_grad_(spec.requires_grad)

    made: Inputs = tree_map(make, (tuple(args), dict(kwargs)))
    return made


@contextlib.contextmanager
def keep_state(*models: nn.Module) -> Iterator[None]:
    """Restores models and random numbers at the end; within, no parameter has a gradient.

    Restored are the values of the tensors that modules hold, the modules' own attributes (modes,
    counters, generators, hooks) and gradients, but no other Python state.

    >>> layer = nn.Linear(2, 2)
    >>> with keep_state(layer):
    ...     _ = layer.eval().weight.data.zero_()
    >>> layer.training, bool(layer.weight.any())
    (True, True)
    """
    gradients = [(p, p.grad) for model in models for p in model.parameters()]
    modules = {module for model in models for module in model.modules()}
    # Hooks too: transformers installs some in a model's first forward, and notes that it did.
    names = ("_parameters", "_buffers", *HOOK_TABLES)
    tables = [table for m in modules for table in (vars(m), *(vars(m)[n] for n in names))]
    attributes = [(table, {**table}) for table in tables]
    values = [(tensor, tensor.detach().clone()) for tensor in _list_tensors(tables)]
    generators = {g for g in tree_iter(tables) if isinstance(g, torch.Generator)}
    states = [(generator, generator.get_state()) for generator in generators]
    with keep_random_states():
        for model in models:
            model.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            for table, saved in attributes:
                table.clear()
                table.update(saved)
            with torch.no_grad():
                for tensor, value in values:
                    if compare_values(tensor, value) is not None:
                        tensor.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for generator, state in states:
                generator.set_state(state)


def list_random_states() -> dict[str, Any]:
    """Lists the states of the generators of PyTorch, Python and NumPy.

    >>> [*list_random_states()][:2]
    ['torch', 'python']
    """
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states |= {f"cuda:{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def seed_random_numbers(seed: int) -> None:
    """Seeds the generators of PyTorch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The way that steps are taken: the options of :func:`fxmem.verify`."""

    mode: str = "train"
    steps: int = 3
    seed: int = 0
    optimizer: OptimizerChoice = None
    loss: LossChoice = None
    autocast: DtypeChoice = None
    mesh: Mapping[str, int] | None = None
    parallelize: ParallelizeChoice = None

    @property
    def train(self) -> bool:
        """True if loss, backward and optimizer run; else ``eval()`` without gradients."""
        return self.mode == "train"

    @property
    def cast_to(self) -> torch.dtype | None:
        """The dtype that forward and loss are autocast to; one that needs a scaler is refused."""
        if self.autocast is None:
            return None
        name = parse_dtype(self.autocast)
        if name != "bfloat16":
            raise UsageError(
                f"verify does not support autocast to {name}", hint="bf16, which needs no scaler"
            )
        return torch.bfloat16


@dataclass(frozen=True, slots=True)
class StepTask:
    """The steps that are taken of a model, each with the same inputs."""

    given: Inputs  # inputs, of which each step gets a copy
    device: torch.device  # the model's device
    options: StepOptions


class Runner:
    """Takes steps of a model.

    Attributes:
        target: Values that the loss compares the output with; made from the first output.
        record: What the last step computed and left.
    """

    def __init__(self, task: StepTask, model: nn.Module) -> None:
        self.task, self.model = task, model
        self.target: Tensor | None = None
        self.record: Record = {}
        self._loss = resolve_loss(load_choice(task.options.loss))
        self._make_optimizer = resolve_optimizer(load_choice(task.options.optimizer))
        self._optimizer: torch.optim.Optimizer | None = None
        self._inputs: Inputs = ((), {})

    def prepare(self) -> None:
        """Seeds random numbers, puts the model in its mode and makes its optimizer."""
        self.model.train(self.task.options.train)
        if self._make_optimizer is not None and self.task.options.train:
            optimizer: Any = self._make_optimizer([*self.model.parameters()])
            if isinstance(optimizer, Adam8bit):
                raise UsageError(
                    "adam8bit only models memory and updates nothing", hint="verify with adam"
                )
            # Made to run on tensors without values, under a mode that allocates by itself.
            optimizer.step = optimizer.step.__wrapped__
            self._optimizer = optimizer
        seed_random_numbers(self.task.options.seed)

    def run(self) -> float:
        """Takes a step, and records copies of what it computed and left; returns its seconds."""
        self.release()
        self._inputs = _copy_inputs(self.task.given)
        wait: Any = torch.cuda.synchronize if self.task.device.type == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        output, loss = self._take_step()
        wait()
        seconds = time.perf_counter() - start
        self.record = self._make_record(output, loss)
        self.release()
        return seconds

    def _take_step(self) -> tuple[Any, Tensor | None]:
        """Takes a step, whose output and loss the caller holds to the end."""
        (args, kwargs), options = self._inputs, self.task.options
        kind, dtype = self.task.device.type, options.cast_to
        cast = torch.autocast(kind, dtype=dtype, enabled=dtype is not None)
        with cast, torch.set_grad_enabled(options.train):
            output = self.model(*args, **kwargs)
            if not options.train:
                return output, None
            if self.target is None and self._loss.make_target is not None:
                self.target = self._loss.make_target(output)
            loss = self._loss.compute(output, self.target)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            self._optimizer.step()
        return output, loss

    def _make_record(self, output: Any, loss: Tensor | None) -> Record:
        inputs = [
            *iterate_leaves(self._inputs[0], "args"),
            *iterate_leaves(self._inputs[1], "kwargs"),
        ]
        leaves = [(n, v) for n, v in inputs if getattr(v, "requires_grad", False) and v.is_leaf]
        parameters: list[tuple[str, Tensor]] = [*self.model.named_parameters()]
        names = {parameter: name for name, parameter in parameters}
        trained = [self._optimizer] if self._optimizer is not None else []
        state = [
            *((f"{names.get(p, '')}.", held) for o in trained for p, held in o.state.items()),
            *((f"group {at}.", g) for o in trained for at, g in enumerate(o.param_groups)),
        ]
        values: dict[Kind, Iterable[tuple[str, Any]]] = {
            Kind.OUTPUT: iterate_leaves(output, "output"),
            Kind.LOSS: [] if loss is None else [("loss", loss)],
            Kind.GRADIENT: [] if loss is None else [(n, v.grad) for n, v in parameters + leaves],
            Kind.BUFFER: self.model.named_buffers(),
            Kind.PARAMETER: parameters,
            Kind.OPTIMIZER_STATE: (
                leaf
                for owner, held in state
                for key, value in held.items()
                if key != "params"
                for leaf in iterate_leaves(value, f"{owner}{key}")
            ),
            Kind.INPUT: inputs,
            Kind.RANDOM_STATE: list_random_states().items(),
        }
        return {
            (kind, name): value.detach().clone() if isinstance(value, Tensor) else value
            for kind, named in values.items()
            for name, value in named
        }

    def release(self) -> None:
        """Frees gradients and inputs."""
        self.model.zero_grad(set_to_none=True)
        self._inputs = ((), {})

    def measure(self) -> int:
        """Measures the peak of a step in bytes; its random numbers may decide which layers run."""

        def prepare() -> None:
            seed_random_numbers(self.task.options.seed)
            self._inputs = _copy_inputs(self.task.given)

        def list_held() -> list[Tensor]:
            state = [] if self._optimizer is None else [*self._optimizer.state.values()]
            attributes = [vars(module) for module in self.model.modules()]
            return _list_tensors([attributes, self._inputs, self.target, state])

        self.model.train(self.task.options.train)
        self.release()
        return measure_peak(prepare, list_held, self._take_step, self.release, self.task.device)


@dataclass(frozen=True, slots=True)
class ComparedSteps:
    """Steps of two models that were compared: what :class:`Verification` says of them."""

    compared: Mapping[str, int]
    times: tuple[list[float], list[float]]
    differences: tuple[Difference, ...]
    peaks: tuple[int | None, int | None] = (None, None)
    notes: tuple[str, ...] = ()


def compare_steps(
    ours: Runner, theirs: Runner, is_over: Callable[[bool], bool] = bool
) -> ComparedSteps:
    """Takes steps of two models in turns, until something differs.

    Until then both models leave the same state, so one copy is enough: the second model's step
    begins where the first one's did.

    Args:
        ours: Takes steps of the first model.
        theirs: Takes steps of the second.
        is_over: Returns whether a step was the last, given whether something differs in it.
    """
    changed_models = {theirs.model}
    with torch.no_grad():
        for kind in ("parameters", "buffers"):
            values = dict(getattr(ours.model, f"named_{kind}")())
            for name, tensor in getattr(theirs.model, f"named_{kind}")():
                if tensor is values[name]:  # a plan shares all state with its model
                    changed_models.add(ours.model)
                else:
                    tensor.copy_(values[name])
    ours.prepare()
    theirs.prepare()
    times: tuple[list[float], list[float]] = ([], [])
    differences: tuple[Difference, ...] = ()
    for step in range(1, ours.task.options.steps + 1):
        try:
            with keep_state(*changed_models):
                times[0].append(ours.run())
        except FxmemError:
            raise
        except Exception as error:
            raise TraceError(f"the model's step fails: {_explain(error)}", hint=_HINT) from error
        theirs.target = ours.target
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FxmemWarning)
                times[1].append(theirs.run())
        except FxmemWarning as warning:
            raise UsageError(str(warning), hint="make the plan for these inputs") from None
        except Exception as error:
            differences = (Difference(step, Kind.ERROR, "step", _explain(error)),)
            break
        differences = compare_records(step, ours.record, theirs.record)
        if is_over(bool(differences)):
            break
    return ComparedSteps(Counter(kind.value for kind, _ in ours.record), times, differences)


def _explain(error: Exception) -> str:
    where = find_raising_source(error)
    return summarize_error(error) + (f" at {where}" if where else "")


def _list_tensors(values: Any) -> list[Tensor]:
    return [*{id(t): t for t in tree_iter(values) if isinstance(t, Tensor)}.values()]


def _copy_inputs(given: Inputs) -> Inputs:
    """Copies inputs, which a step may change; a tensor that is passed twice stays one."""
    copies: dict[int, Any] = {}

    def copy_leaf(leaf: Any) -> Any:
        if id(leaf) not in copies:
            is_tensor = isinstance(leaf, Tensor)
            copies[id(leaf)] = leaf.detach().clone() if is_tensor else copy.deepcopy(leaf)
            if is_tensor:
                copies[id(leaf)].requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    copied: Inputs = tree_map(copy_leaf, given)
    return copied
