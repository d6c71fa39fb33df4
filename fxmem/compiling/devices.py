"""Devices in the code that Dynamo takes apart, where fake tensors stand for tensors of a GPU.

Within a recording, :mod:`fxmem.fakes.devices` answers what code asks of a tensor's device, and
turns the devices that it names. Dynamo runs no code that could be answered: it knows what tensors
answer, and writes down calls; of functions of ``torch.cuda`` it knows by name which are to be
called at once.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate

from fxmem.fakes.devices import SEEN, is_accelerator
from fxmem.kernels.cuda.convolution.backends import suggest_common_format
from fxmem.kernels.cuda.gpu import current_gpu, is_on_gpu
from fxmem.kernels.cuda.present_gpu import show_gpu
from fxmem.patching import change_items, patch

_HOST = torch.device("cpu")
_FROM_VALUES = (torch.tensor, torch.as_tensor)
"""Functions that make tensors of values, which do not matter."""
_DECOMPOSE = {"torch._decomp.decompositions", "torch._inductor.decomposition", "torch._refs"}
_DECIDED = {
    *("convolution_backward", "mm", "addmm", "bmm", "native_batch_norm_helper"),
    *("native_layer_norm", "native_group_norm", "_upsample_nearest"),
}
"""Decompositions that differ between devices, and make no tensor on the device that they see."""


@contextlib.contextmanager
def show_gpu_to_dynamo(device: torch.device) -> Iterator[None]:
    """Has Dynamo take tensors on a device for tensors on the GPU, and write that device in graphs.

    Args:
        device: Of the fakes that stand for the target's tensors; the host's own for none.
    """
    if device == _HOST:
        yield
        return
    rules: Any = importlib.import_module("torch._dynamo.trace_rules").get_torch_obj_rule_map()
    calls: Any = importlib.import_module("torch._dynamo.variables.torch")
    calls.TorchInGraphFunctionVariable._get_handlers()  # kept, by the functions as they are now
    folded = calls.constant_fold_functions
    tensors: Any = importlib.import_module("torch._dynamo.variables.tensor").TensorVariable
    tracers: Any = importlib.import_module("torch._dynamo.output_graph").SubgraphTracer
    fakes: Any = importlib.import_module("torch._subclasses.fake_tensor")
    find_fake: Any = importlib.import_module("torch._dynamo.utils").get_fake_value
    specialize, create_proxy = tensors.specialize, tracers.create_proxy

    def specialize_on_gpu(value: Any) -> dict[str, Any]:
        properties: dict[str, Any] = specialize(value)
        return properties | {"device": SEEN} if properties["device"] == device else properties

    def turn(value: Any) -> Any:
        return device if is_accelerator(value) else value

    def create_on_device(
        tracer: Any, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any
    ) -> Any:
        if kind in ("call_function", "call_method"):
            if target == "cuda":
                target, args, kwargs = "to", (args[0], device), {}
            elif target == "cpu":
                target, args, kwargs = "to", (args[0], _HOST), {}
            args, kwargs = map_aggregate(args, turn), map_aggregate(kwargs, turn)
            if target in _FROM_VALUES and kwargs.get("device") == device:
                on_host = {name: value for name, value in kwargs.items() if name != "device"}
                made = create_proxy(tracer, kind, target, args, on_host).node
                found = find_fake(made, tracer.output_graph.current_tx, allow_non_graph_fake=True)
                tracer.graph.erase_node(made)
                target, args = torch.full, (tuple(found.shape), 0)
                kwargs = {"dtype": found.dtype, "device": device}
        return create_proxy(tracer, kind, target, args, kwargs, *rest, **more)

    on_gpu: dict[Any, dict[str, Any]] = {
        tensors: {"specialize": staticmethod(specialize_on_gpu)},
        tracers: {"create_proxy": create_on_device},
        fakes: {"init_gpu_context": lambda _device: None},  # which allocates
    }
    before = dict(vars(torch.cuda))
    with show_gpu(current_gpu()), patch(on_gpu), _decide_as_on_gpu(device):
        pairs = [(before[name], now) for name, now in vars(torch.cuda).items() if callable(now)]
        known = {now: rules[real] for real, now in pairs if real in rules}
        called = {now: None for real, now in pairs if real in folded}
        with change_items(rules, known), change_items(folded, called):
            yield


def _decide_as_on_gpu(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Has convolutions laid out and operators decomposed as on the GPU, while a graph is made."""
    real: Callable[[FakeTensor], torch.device] = FakeTensor.device.fget  # type: ignore[attr-defined]
    select_on_host = torch._C._select_conv_backend
    choose_on_host = torch._C._conv_determine_backend_memory_format

    def select_backend(input: Tensor, *call: Any, **options: Any) -> Any:
        if input.is_cuda or is_on_gpu(input):  # builds for CUDA would ask the GPU
            return torch._C._ConvBackend.Cudnn  # type: ignore[attr-defined]
        return select_on_host(input, *call, **options)

    def choose_format(x: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
        if x.is_cuda or is_on_gpu(x):
            return suggest_common_format(x, weight)
        return choose_on_host(x, weight, backend)

    def see(tensor: FakeTensor) -> torch.device:
        found = real(tensor)
        if found != device:
            return found
        frame = sys._getframe(1)
        is_asked = frame.f_code.co_name in _DECIDED and frame.f_globals["__name__"] in _DECOMPOSE
        return SEEN if is_asked else found

    return patch(
        {
            torch._C: {
                "_select_conv_backend": select_backend,
                "_conv_determine_backend_memory_format": choose_format,
            },
            FakeTensor: {"device": property(see)},
        }
    )
