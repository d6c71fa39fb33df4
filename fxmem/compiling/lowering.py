"""Lowering of a graph by inductor, for a device that is not there, up to the code that runs it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from fxmem.compiling.places import Place, find_places
from fxmem.kernels.cuda.gpu import current_gpu
from fxmem.kernels.cuda.present_gpu import show_gpu
from fxmem.kernels.registry import Backend
from fxmem.patching import patch
from fxmem.versions.operators import aten

_GPU = torch.device("cuda", 0)
_ASKED = ("get_device_properties", "device_count", "is_available", "current_device", "synchronize")


def lower_graph(
    module: fx.GraphModule, inputs: Sequence[Any], target: Backend, options: Mapping[str, Any]
) -> tuple[str, dict[str, Place]]:
    """Lowers a graph of operators to the Python code that allocates, launches and frees.

    Args:
        module: The graph, traced on fake tensors; changed.
        inputs: With the strides that a forward compiled before gives them.
        target: The device. Properties of the GPU decide how reductions are split and what is fused.
        options: Those of ``torch._inductor.compile_fx.compile_fx_inner``.

    Returns:
        The wrapper of inductor (``torch/_inductor/codegen/wrapper.py``), and the places that its
        buffers come from.
    """
    inductor: Any = importlib.import_module("torch._inductor.compile_fx")
    graphs: Any = importlib.import_module("torch._inductor.graph")
    lowered: list[tuple[str, dict[str, Place]]] = []

    def compile_nothing(graph: Any) -> Any:
        source, _ = graph.codegen()
        places = find_places(graph)
        lowered.append((getattr(source, "value", source), places))
        return SimpleNamespace(call=lambda _inputs: None)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch({graphs.GraphLowering: {"_compile_to_module": compile_nothing}}))
        if target.name == "cuda":
            inputs = _move_graphs(module, inputs, target.device)
            stack.enter_context(show_gpu(current_gpu()))
            stack.enter_context(_answer_inductor())
        inductor.compile_fx_inner(module, inputs, **options)  # tells AOTAutograd of strides
    return lowered[-1]


def _move_graphs(
    module: fx.GraphModule, inputs: Sequence[Any], device: torch.device
) -> Sequence[Any]:
    """Makes a graph and those within graphs of tensors on the GPU.

    No operator of autograd may run on these.

    Returns:
        The inputs, likewise.
    """

    def move_tensor(tensor: Tensor) -> Tensor:
        if tensor.device != device:
            return tensor
        assert isinstance(tensor, FakeTensor)
        mode: FakeTensorMode = tensor.fake_mode
        with no_dispatch():  # AOTAutograd's own mode, up to 2.9
            meta = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        return FakeTensor(mode, meta, _GPU)

    graphs = [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        node.meta.pop("tensor_meta", None)
        if "val" in node.meta:
            node.meta["val"] = tree_map_only(Tensor, move_tensor, node.meta["val"])
        node.args = map_aggregate(node.args, lambda each: _GPU if each == device else each)
        node.kwargs = map_aggregate(node.kwargs, lambda each: _GPU if each == device else each)
    return tree_map_only(Tensor, move_tensor, [*inputs])  # type: ignore[no-any-return]


@contextlib.contextmanager
def _answer_inductor() -> Iterator[None]:
    """Answers what inductor asks beyond ``torch.cuda``."""
    devices: Any = importlib.import_module("torch._dynamo.device_interface")
    scheduler: Any = importlib.import_module("torch._inductor.scheduler")
    triton: Any = importlib.import_module("torch.utils._triton")
    codecache: Any = importlib.import_module("torch._inductor.codecache")
    hints: Any = importlib.import_module("torch._inductor.runtime.hints")

    get_item = torch.Tensor.__getitem__

    def select(tensor: Tensor, index: Any) -> Any:
        if tensor.device.type == "cuda" and type(index) is int:
            return aten.select.int(tensor, 0, index)
        if tensor.device.type == "cuda" and isinstance(index, Tensor):
            return aten.index.Tensor(tensor, [index])
        return get_item(tensor, index)

    def copy(tensor: Tensor, *source: Any, **options: Any) -> Tensor:
        return aten.copy_.default(tensor, *source, **options)  # type: ignore[no-any-return]

    answers = {name: staticmethod(getattr(torch.cuda, name)) for name in _ASKED}
    worker = {name: answers[name] for name in ("get_device_properties", "current_device")}
    forget = hints.DeviceProperties.create.cache_clear
    forget()
    with patch(
        {
            devices.CudaInterface: answers,
            devices.CudaInterface.Worker: worker,
            scheduler: {"has_triton": lambda *_: True},
            triton: {"triton_hash_with_backend": lambda *_: "none"},
            # Templates of attention are loaded, which imports Triton, and never run.
            codecache.PyCodeCache: {"load": lambda *_, **__: SimpleNamespace(key="", __file__="")},
            # These ask for a guard of the device, which a build for the CPU lacks.
            torch.Tensor: {
                "__invert__": lambda tensor: aten.bitwise_not.default(tensor),
                "copy_": copy,
                "__getitem__": select,
            },
        }
    ):
        try:
            yield
        finally:
            forget()
