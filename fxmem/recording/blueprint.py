"""Blueprint of a step: the caller's model and inputs, copied to fake tensors for each recording."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from fxmem.errors import FxmemError
from fxmem.kernels.cpu import CPU
from fxmem.kernels.cuda.gpu import use_gpu
from fxmem.kernels.registry import Target
from fxmem.loading.building import replace_converted
from fxmem.recording.constants import remember_inputs
from fxmem.recording.failures import explain_failure
from fxmem.recording.losses import Loss, make_own_loss
from fxmem.recording.optimizers import OptimizerFactory
from fxmem.recording.options import Options
from fxmem.recording.step import Recording, Step, record_step, trace_forward
from fxmem.tracing.deepcopy import Memo
from fxmem.tracing.devices import keep_default_on_cpu, lies_on_accelerator, replace_devices
from fxmem.tracing.fake_checks import answer_fake_checks
from fxmem.tracing.fakes import make_fake_inputs, make_fake_model
from fxmem.tracing.lazy import settle_lazy
from fxmem.tracing.model_copier import copy_reader

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The parts of a step.

    Attributes:
        model: The caller's model, which is left unchanged.
        args: Positional inputs as the caller gives them: tensors and specs.
        kwargs: Keyword inputs, of the same kinds.
        loss: From the model's output to the loss.
        make_optimizer: From the parameters to the optimizer; None for none.
        options: How the step is recorded.
        fake_mode: The mode of the model's and the inputs' fake tensors.
        named_devices: Collects the devices that the model's code names.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Loss
    make_optimizer: OptimizerFactory | None
    options: Options
    fake_mode: FakeTensorMode
    named_devices: set[str]

    def make_inputs(self, memo: Memo | None = None) -> Inputs:
        """Makes fake inputs, new ones each time: a step may change a cache among them."""
        dtype = self.options.dtype
        with keep_default_on_cpu():
            made = make_fake_inputs(self.args, self.kwargs, self.fake_mode, dtype=dtype, memo=memo)
        remember_inputs(made, (self.args, self.kwargs))
        return made

    def make_step(self) -> Step:
        """A step on a fake model and fake inputs of its own, where the target has them."""
        options, train = self.options, self.options.mode == "train"
        memo: Memo = {}
        with keep_default_on_cpu():
            model = make_fake_model(
                self.model, self.fake_mode, dtype=options.dtype, train=train, memo=memo
            )
        inputs = self.make_inputs(memo)
        _place_inputs(inputs, CPU)
        with replace_devices(self.named_devices):
            settle_lazy(model, *inputs, self.fake_mode)
        _place_model(model, self.model, options.target)
        _place_inputs(inputs, options.target)
        return Step(
            model=model,
            args=inputs[0],
            kwargs=inputs[1],
            train=train,
            inference_mode=options.inference_mode,
            loss=self._copy_loss(memo),
            make_optimizer=self.make_optimizer if train else None,
            loop=options.loop,
            autocast=options.autocast_to,
        )

    def _copy_loss(self, memo: Memo) -> Loss:
        """The loss, with the fakes of inputs and of the model's tensors where it reads those."""
        if self.loss.function is None:
            return self.loss
        return make_own_loss(self.loss.name, copy_reader(self.loss.function, memo))

    def record(self, symbolic_sizes: bool, inputs: Sequence[str]) -> Recording:
        """Makes a step and records it; to be called with the fake mode active.

        Args:
            symbolic_sizes: See :class:`fxmem.tracing.tracer.Tracer`.
            inputs: How an error names the inputs.

        Raises:
            TraceError: The step cannot be run on fake tensors.
        """
        target, size_hint = self.options.target, self.options.size_hint
        try:
            step = self.make_step()
            with self._replace_functions():
                return record_step(step, target, symbolic_sizes=symbolic_sizes, size_hint=size_hint)
        except FxmemError:
            raise
        except (Exception, SystemExit) as error:
            raise explain_failure(error, inputs, size_hint) from error

    def trace(self) -> tuple[fx.Graph, str]:
        """Makes a step and traces its forward alone; to be called with the fake mode active.

        Returns:
            The FX graph, and what it cannot express.
        """
        step, options = self.make_step(), self.options
        with self._replace_functions():
            return trace_forward(step, options.target, size_hint=options.size_hint)

    @contextlib.contextmanager
    def _replace_functions(self) -> Iterator[None]:
        """Has functions of PyTorch answer as the target would, on fake tensors."""
        with (
            replace_devices(self.named_devices, self.options.target.device),
            use_gpu(self.options.architecture),
            replace_converted(),
            answer_fake_checks(),
        ):
            yield


def _place_model(model: nn.Module, source: nn.Module, target: Target) -> None:
    """Moves parameters, their gradients and buffers as ``model.to(device)`` does.

    Other tensors of the modules stay where the tensors of the source model are.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        _place(tensor, target.device)
        _place(tensor.grad, target.device)
    for copied, given in zip(model.modules(), source.modules(), strict=True):
        for name, value in vars(given).items():
            if isinstance(value, torch.Tensor) and lies_on_accelerator(value):
                _place(vars(copied).get(name), target.device)
    for module in model.modules():
        for kind, move in target.movers.items():
            if isinstance(module, kind):
                move(module)


def _place_inputs(inputs: Any, target: Target) -> None:
    for leaf in tree_leaves(inputs):
        _place(leaf, target.device)


def _place(value: Any, device: torch.device) -> None:
    if isinstance(value, FakeTensor):
        value.fake_device = device
