"""Real steps of a model, of training or of inference, and the state that they change."""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from fxmem.errors import UsageError
from fxmem.recording.losses import Loss
from fxmem.recording.optimizers import Adam8bit, OptimizerFactory
from fxmem.specs import TensorSpec
from fxmem.tracing.fakes import read_leaf
from fxmem.verifying.comparing import Record, compare_values, iterate_leaves
from fxmem.verifying.measuring import measure_peak
from fxmem.verifying.verification import Kind

_INTEGERS = 2
"""Integers are drawn below it: 0 and 1 are valid indices, classes and masks wherever any are."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


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


def save_state(*models: nn.Module) -> Callable[[], None]:
    """Saves the state that steps of models change, and returns a function that restores it.

    That is the values of the tensors that modules hold, the modules' own attributes (modes,
    counters, generators), and all global random numbers, but no other Python state.

    >>> layer = nn.Linear(2, 2)
    >>> restore = save_state(layer)
    >>> _ = layer.eval().weight.data.zero_()
    >>> restore()
    >>> layer.training, bool(layer.weight.any())
    (True, True)
    """
    modules = {module for model in models for module in model.modules()}
    dicts = [d for m in modules for d in (vars(m), m._parameters, m._buffers)]
    attributes = [(current, {**current}) for current in dicts]
    values = [(tensor, tensor.detach().clone()) for tensor in _list_tensors(dicts)]
    generators = {g for g in tree_iter(dicts) if isinstance(g, torch.Generator)}
    states = [(generator, generator.get_state()) for generator in generators]
    randomness = list_random_states()

    def restore() -> None:
        for current, saved in attributes:
            current.clear()
            current.update(saved)
        with torch.no_grad():
            for tensor, value in values:
                if compare_values(tensor, value) is not None:
                    tensor.copy_(value)
        for generator, state in states:
            generator.set_state(state)
        torch.set_rng_state(randomness["torch"])
        random.setstate(randomness["python"])
        np.random.set_state(randomness["numpy"])
        for name, state in randomness.items():
            if name.startswith("cuda:"):
                torch.cuda.set_rng_state(state, name)

    return restore


@contextlib.contextmanager
def keep_state(*models: nn.Module) -> Iterator[None]:
    """Restores models at the end; within, none of their parameters has a gradient."""
    gradients = [(p, p.grad) for model in models for p in model.parameters()]
    restore = save_state(*models)
    for model in models:
        model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


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
    # Asking for the generator of a GPU that nobody uses would start it.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states |= {f"cuda:{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def seed_random_numbers(seed: int) -> None:
    """Seeds the generators of PyTorch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _list_tensors(values: Any) -> list[Tensor]:
    return [*{id(t): t for t in tree_iter(values) if isinstance(t, Tensor)}.values()]


@dataclass
class Runner:
    """Takes steps of a model, each with the same inputs.

    Attributes:
        model: The model.
        given: Inputs, of which each step gets a copy.
        loss: From the output to the loss.
        make_optimizer: From the parameters to the optimizer; None for none.
        device: The model's device.
        autocast: The dtype that forward and loss are autocast to, or None.
        train: Whether loss, backward and the optimizer run; else ``eval()`` without gradients.
        target: Values that the loss compares the output with; made from the first output.
    """

    model: nn.Module
    given: Inputs
    loss: Loss
    make_optimizer: OptimizerFactory | None
    device: torch.device
    autocast: torch.dtype | None = None
    train: bool = True
    target: Tensor | None = None
    _optimizer: torch.optim.Optimizer | None = field(default=None, init=False)
    _inputs: Inputs = field(default=((), {}), init=False)

    def prepare(self) -> None:
        """Puts the model in its mode and makes its optimizer."""
        self.model.train(self.train)
        if self.make_optimizer is None or not self.train:
            return
        optimizer: Any = self.make_optimizer([*self.model.parameters()])
        if isinstance(optimizer, Adam8bit):
            raise UsageError(
                "adam8bit only models memory and updates nothing", hint="verify with adam"
            )
        # Made to run on tensors without values, under a mode that allocates by itself.
        optimizer.step = optimizer.step.__wrapped__
        self._optimizer = optimizer

    def run(self) -> tuple[Record, float]:
        """Takes a step; returns copies of what it computed and left, and its seconds."""
        self.release()
        self._inputs = _copy_inputs(self.given)
        self._wait()
        start = time.perf_counter()
        output, loss = self._take_step()
        self._wait()
        seconds = time.perf_counter() - start
        record = self._record(output, loss)
        self.release()
        return record, seconds

    def _take_step(self) -> tuple[Any, Tensor | None]:
        """Takes a step, whose output and loss the caller holds to the end."""
        args, kwargs = self._inputs
        is_cast = self.autocast is not None
        cast = torch.autocast(self.device.type, dtype=self.autocast, enabled=is_cast)
        with cast, torch.set_grad_enabled(self.train):
            output = self.model(*args, **kwargs)
            if not self.train:
                return output, None
            if self.target is None and self.loss.make_target is not None:
                self.target = self.loss.make_target(output)
            loss = self.loss.compute(output, self.target)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            self._optimizer.step()
        return output, loss

    def _record(self, output: Any, loss: Tensor | None) -> Record:
        inputs = [
            *iterate_leaves(self._inputs[0], "args"),
            *iterate_leaves(self._inputs[1], "kwargs"),
        ]
        leaves = [(n, v) for n, v in inputs if getattr(v, "requires_grad", False) and v.is_leaf]
        parameters: list[tuple[str, Tensor]] = [*self.model.named_parameters()]
        values: dict[Kind, Iterable[tuple[str, Any]]] = {
            Kind.OUTPUT: iterate_leaves(output, "output"),
            Kind.LOSS: [] if loss is None else [("loss", loss)],
            Kind.GRADIENT: [] if loss is None else [(n, v.grad) for n, v in parameters + leaves],
            Kind.BUFFER: self.model.named_buffers(),
            Kind.PARAMETER: parameters,
            Kind.OPTIMIZER_STATE: self._iterate_optimizer_state(),
            Kind.INPUT: inputs,
            Kind.RANDOM_STATE: list_random_states().items(),
        }
        return {
            (kind, name): value.detach().clone() if isinstance(value, Tensor) else value
            for kind, named in values.items()
            for name, value in named
        }

    def _iterate_optimizer_state(self) -> Iterator[tuple[str, Any]]:
        if self._optimizer is None:
            return
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        for owner, state in self._optimizer.state.items():
            for key, value in state.items():
                yield from iterate_leaves(value, f"{names.get(owner, '')}.{key}")
        for at, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield from iterate_leaves(value, f"group {at}.{key}")

    def release(self) -> None:
        """Frees gradients and inputs."""
        self.model.zero_grad(set_to_none=True)
        self._inputs = ((), {})

    def measure(self, seed: int) -> int:
        """Measures the peak of a step in bytes, with what is there before it.

        Args:
            seed: Seed of the step's random numbers, which may decide which layers run.
        """

        def prepare() -> None:
            seed_random_numbers(seed)
            self._inputs = _copy_inputs(self.given)

        def list_residents() -> list[Tensor]:
            state = self._optimizer.state.values() if self._optimizer is not None else ()
            attributes = [vars(module) for module in self.model.modules()]
            return _list_tensors([attributes, self._inputs, self.target, [*state]])

        self.model.train(self.train)
        self.release()
        return measure_peak(prepare, list_residents, self._take_step, self.release, self.device)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


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
