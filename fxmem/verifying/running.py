"""Steps of a model on real tensors: of training, or of inference."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from fxmem.applying.comparing import Record, iterate_leaves
from fxmem.applying.state import drop_gradients, list_random_states, seed_random_numbers
from fxmem.applying.verification import Kind
from fxmem.errors import UsageError
from fxmem.recording.losses import Loss
from fxmem.recording.optimizers import Adam8bit, OptimizerFactory
from fxmem.specs import TensorSpec
from fxmem.tracing.fakes import read_leaf
from fxmem.tracing.user_state import iterate_holders
from fxmem.verifying.measuring import measure_peak

_INTEGERS = 2
"""Integers are drawn below it: 0 and 1 are valid indices, classes and masks wherever any are."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def make_inputs(
    args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device, seed: int
) -> Inputs:
    """Inputs with values: those of a spec are random, floating ones normal, integers 0 or 1.

    Args:
        args: Tensors, specs, or lists, tuples and dicts of them; anything else stays as it is.
        kwargs: Likewise.
        device: Where those of specs are made.
        seed: Of their values.

    >>> (x,), _ = make_inputs(["2x3:int64"], {}, torch.device("cpu"), 0)
    >>> x.shape, int(x.max()) < 2
    (torch.Size([2, 3]), True)
    """
    generator = torch.Generator().manual_seed(seed)  # values do not depend on the device

    def make(leaf: Any) -> Any:
        spec = read_leaf(leaf)
        if not isinstance(spec, TensorSpec):
            return leaf
        return _draw(spec, generator).to(device).requires_grad_(spec.requires_grad)

    made: Inputs = tree_map(make, (tuple(args), dict(kwargs)))
    return made


def _draw(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        values = torch.randn(spec.shape, dtype=wide, generator=generator).to(dtype)
    else:
        values = torch.randint(_INTEGERS, spec.shape, generator=generator).to(dtype)
    memory_format = getattr(torch, spec.memory_format or "contiguous_format")
    return values.contiguous(memory_format=memory_format)


@dataclass
class Runner:
    """Takes steps of a model, each with the same inputs.

    Attributes:
        model: The model.
        given: Inputs, of which each step gets a copy.
        loss: From the output to the loss.
        make_optimizer: From the parameters to the optimizer; None for none.
        device: Where the model is.
        autocast: What forward and loss are autocast to, or None.
        train: Whether loss, backward and the optimizer run; else ``eval()`` without gradients.
        target: What the loss compares with; made from the first output.
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
                "adam8bit is there for its memory and computes nothing", hint="verify with adam"
            )
        # Made to answer for tensors without values, under a mode that allocates by itself.
        optimizer.step = optimizer.step.__wrapped__
        self._optimizer = optimizer

    @property
    def roots(self) -> list[Any]:
        """Where code that runs in a step begins."""
        return [self.model, self.loss, self.make_optimizer]

    def run(self) -> tuple[Any, Tensor | None, float]:
        """One step: its output, its loss (None in inference) and the seconds that it took."""
        self.release()
        self._inputs = _copy_inputs(self.given)
        self._wait()
        start = time.perf_counter()
        output, loss = self._take_step()
        self._wait()
        return output, loss, time.perf_counter() - start

    def _take_step(self) -> tuple[Any, Tensor | None]:
        """A step, whose output and loss the caller holds to the end, as fxmem says."""
        args, kwargs = self._inputs
        with self._cast(), torch.set_grad_enabled(self.train):
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

    def record(self, output: Any, loss: Tensor | None) -> Record:
        """What a step that has just run computed, and what it left."""
        record: Record = {}

        def add(kind: Kind, name: str, value: Any) -> None:
            record[kind, name] = value.detach().clone() if isinstance(value, Tensor) else value

        for name, value in iterate_leaves(output, "output"):
            add(Kind.OUTPUT, name, value)
        if loss is not None:
            add(Kind.LOSS, "loss", loss)
            for name, parameter in self.model.named_parameters():
                add(Kind.GRADIENT, name, parameter.grad)
            for name, value in self._iterate_inputs():
                if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
                    add(Kind.GRADIENT, name, value.grad)
        for name, buffer in self.model.named_buffers():
            add(Kind.BUFFER, name, buffer)
        for name, parameter in self.model.named_parameters():
            add(Kind.PARAMETER, name, parameter)
        for name, value in self._iterate_optimizer_state():
            add(Kind.OPTIMIZER_STATE, name, value)
        for name, value in self._iterate_inputs():
            add(Kind.INPUT, name, value)
        for name, value in list_random_states(self.roots).items():
            add(Kind.RANDOM_STATE, name, value)
        return record

    def release(self) -> None:
        """Lets go of gradients and inputs."""
        drop_gradients(self.model.parameters())
        self._inputs = ((), {})

    def measure(self, seed: int) -> int:
        """The peak of a step in bytes, with what is there before it.

        Args:
            seed: Of its random numbers, which may decide which layers run.
        """

        def prepare() -> None:
            seed_random_numbers(seed)
            self._inputs = _copy_inputs(self.given)

        self.model.train(self.train)
        self.release()
        return measure_peak(
            prepare, self._iterate_residents, self._take_step, self.release, self.device
        )

    def _iterate_residents(self) -> Iterator[Tensor]:
        for value in (*iterate_holders([self.model]), *tree_iter(self._inputs), self.target):
            if isinstance(value, Tensor):
                yield value
        for _, value in self._iterate_optimizer_state():
            if isinstance(value, Tensor):
                yield value

    def _iterate_inputs(self) -> Iterator[tuple[str, Any]]:
        args, kwargs = self._inputs
        yield from iterate_leaves(args, "args")
        yield from iterate_leaves(kwargs, "kwargs")

    def _iterate_optimizer_state(self) -> Iterator[tuple[str, Any]]:
        if self._optimizer is None:
            return
        names: dict[Tensor, str] = {
            parameter: name for name, parameter in self.model.named_parameters()
        }
        for owner, state in self._optimizer.state.items():
            for key, value in state.items():
                yield from iterate_leaves(value, f"{names.get(owner, '')}.{key}")
        for at, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield from iterate_leaves(value, f"group {at}.{key}")

    def _cast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _copy_inputs(given: Inputs) -> Inputs:
    """Inputs that a step may change; a tensor that is passed twice stays one."""
    copies: dict[int, Any] = {}

    def copy_leaf(leaf: Any) -> Any:
        if id(leaf) not in copies:
            if isinstance(leaf, Tensor):
                copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            else:
                copies[id(leaf)] = copy.deepcopy(leaf)
        return copies[id(leaf)]

    copied: Inputs = tree_map(copy_leaf, given)
    return copied
