"""Blueprint of a step: the caller's model and inputs, on fake tensors for each recording."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from fxmem.errors import FxmemError
from fxmem.fakes.devices import keep_default_on_cpu, translate_devices
from fxmem.fakes.fake_mode import lies_on_accelerator, make_fake_inputs
from fxmem.fakes.reach import find_attributes, iterate_reached
from fxmem.fakes.swapping import restore_user_state, settle_lazy, swap_in_fakes
from fxmem.kernels.registry import Backend
from fxmem.loading.target import replace_converted
from fxmem.parallelism.process_group import make_mesh
from fxmem.parallelism.wrapping import copy_model, parallelize_model, shard_optimizer
from fxmem.recording.constants import remember_inputs
from fxmem.tracing.fxgraph import list_calls
from fxmem.tracing.state import save_random_states
from fxmem.training.failures import explain_failure
from fxmem.training.loops import infer
from fxmem.training.losses import Loss
from fxmem.training.optimizers import OptimizerFactory
from fxmem.training.options import Options, load_choice
from fxmem.training.step import trace_forward
from fxmem.training.training import Step

if TYPE_CHECKING:
    from fxmem.analysis import Analysis

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The parts of a step, from which each recording makes one of its own."""

    model: nn.Module  # the caller's, which is left unchanged
    args: tuple[Any, ...]  # as the caller gives them: tensors and specs
    kwargs: Mapping[str, Any]
    loss: Loss
    make_optimizer: OptimizerFactory | None
    options: Options
    fake_mode: FakeTensorMode  # of the fakes of model and inputs
    named_devices: set[str]  # collects the devices that the model's code names

    def make_inputs(self) -> Inputs:
        """Makes fake inputs for what looks at their structure."""
        with keep_default_on_cpu():
            return make_fake_inputs(
                self.args, self.kwargs, self.fake_mode, dtype=self.options.dtype
            )

    @contextlib.contextmanager
    def make_step(self) -> Iterator[Step]:
        """A step on fakes in the model and inputs of its own, where the target has them."""
        options, train = self.options, self.options.mode == "train"
        with contextlib.ExitStack() as stack:
            with keep_default_on_cpu():
                args, kwargs, forget_replaced = stack.enter_context(
                    swap_in_fakes(
                        self.model,
                        self.fake_mode,
                        self.args,
                        self.kwargs,
                        dtype=options.dtype,
                        train=train,
                        readers=(self.loss.function, self.make_optimizer),
                    )
                )
            remember_inputs((args, kwargs), (self.args, self.kwargs))
            with translate_devices(named=self.named_devices):
                settle_lazy(self.model, args, kwargs, self.fake_mode, options.dtype)
            device = options.target.device
            for leaf in tree_leaves((args, kwargs)):
                _place(leaf, device)
            for module in self.model.modules():
                _place_module(module, options.target)
            before = self.model._compiled_call_impl
            stack.callback(setattr, self.model, "_compiled_call_impl", before)
            make_optimizer = self.make_optimizer
            if make_optimizer and options.layout and options.layout.knobs.shards_state:
                make_optimizer = shard_optimizer(make_optimizer)
            outputs = {k: v for k, v in options.loop.settings.items() if k == "outputs"}
            yield Step(
                model=self.model if options.layout is None else copy_model(self.model),
                args=args,
                kwargs=kwargs,
                train=train,
                inference_mode=options.inference_mode,
                loss=self.loss,
                make_optimizer=make_optimizer if train else None,
                loop=options.run_loop if train else functools.partial(infer, **outputs),
                autocast=options.autocast_to,
                parallelize=None if options.layout is None else self._parallelize,
                mesh=() if options.layout is None else options.layout.mesh,
                compilation=options.compilation,
                forget_replaced=forget_replaced,
            )

    def _parallelize(self, model: nn.Module) -> nn.Module:
        layout = self.options.layout
        assert layout is not None
        device = self.options.target.name
        mesh = make_mesh(layout, device)
        is_aside = self.options.has_side_stream and layout.parallelize == "ddp"
        stream: Any = torch.cuda.Stream  # show_gpu's
        stream = stream() if is_aside and device == "cuda" else None
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            return parallelize_model(model, load_choice(layout.parallelize), mesh, layout.knobs)

    @contextlib.contextmanager
    def prepare_step(self, inputs: Sequence[str]) -> Iterator[Step]:
        """Makes a step to be run within, on the target as far as PyTorch's code can tell.

        What the user's code keeps from call to call is restored. An error names the inputs as
        given.

        Raises:
            TraceError: The step cannot be run on fake tensors.
        """
        users = [*map(type, self.model.modules()), self.loss, self.make_optimizer]
        with contextlib.ExitStack() as after, restore_user_state(users), self.fake_mode:
            after.callback(save_random_states())
            try:
                with (
                    self.make_step() as step,
                    translate_devices(self.options.target.device, self.named_devices),
                    replace_converted(),
                ):
                    yield step
            except FxmemError:
                raise
            except (Exception, SystemExit) as error:
                has_size_hint = self.options.hints.default is not None
                raise explain_failure(error, inputs, has_size_hint) from error

    def trace(self) -> tuple[fx.Graph, str]:
        """Makes a step and traces its forward once, without recording the step.

        Returns:
            The FX graph, and what it cannot express.
        """
        with self.prepare_step(()) as step:
            return trace_forward(step, self.options.target, hints=self.options.hints)

    def make_graph_module(self, analysis: Analysis) -> fx.GraphModule | None:
        """Makes the traced forward of the analysis that this is the blueprint of."""
        from fxmem.training.annotation import make_graph_module

        return make_graph_module(analysis)

    def is_hinted(self, graph: fx.Graph) -> bool:
        """Returns whether other sizes lead to another graph."""
        calls = [*list_calls(graph)]
        for hints in self.options.hints.vary():
            try:
                found, reason = replace(self, options=replace(self.options, hints=hints)).trace()
            except Exception:  # the code does not take these sizes
                continue
            if reason or [*list_calls(found)] != calls:
                return True
        return False


_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)


def _place_module(module: nn.Module, target: Backend) -> None:
    """Moves parameters, their gradients and buffers as ``module.to(device)`` does.

    So move tensors that a parameter of a class of its own holds, such as a packed weight's scales.
    Other tensors of the module stay where the user has them.
    """
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        _place(tensor, target.device)
        _place(tensor.grad, target.device)
        if type(tensor) not in _PLAIN:
            for held in iterate_reached(find_attributes(tensor)):
                _place(held, target.device)
    for value in vars(module).values():
        if isinstance(value, torch.Tensor) and lies_on_accelerator(value):
            _place(value, target.device)
    for kind, move in target.movers.items():
        if isinstance(module, kind):
            move(module)


def _place(value: Any, device: torch.device) -> None:
    if isinstance(value, FakeTensor):
        value.fake_device = device
