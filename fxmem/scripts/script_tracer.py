"""Tracer of a script: its nodes are leaf modules and torch functions on fake tensors.

As :class:`fxmem.tracing.tracer.Tracer` for a model, but there is no model to begin with: a module
that the script itself calls gets the name that the script has for it, and what no module calls is a
node of the script. No FX graph is built.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _device
from torch.utils._pytree import tree_map_only

from fxmem.fakes.containers import iterate_tensors
from fxmem.fakes.devices import spell_device
from fxmem.fakes.fake_mode import find_inner, find_kind
from fxmem.fakes.reach import LEAVES
from fxmem.fakes.stand_ins import stand_in
from fxmem.graph import Category
from fxmem.scripts.repeats.carried import list_carried, list_slots
from fxmem.scripts.repeats.left_out import LeftOutCalls
from fxmem.scripts.repeats.micro_batches import MicroBatches
from fxmem.scripts.script_recorder import ScriptRecorder
from fxmem.scripts.windows import Windows
from fxmem.source import is_user_file
from fxmem.tracing.calls import bind_arguments
from fxmem.tracing.compiled import read_fqn
from fxmem.tracing.modules import is_leaf
from fxmem.tracing.nodes import Call, NodeLog
from fxmem.tracing.tracer import Tracer
from fxmem.training.residents import iterate_unsharded

_TO_VALUES: dict[Any, Callable[..., Any]] = {
    Tensor.numpy: lambda real, *args, **kwargs: real.numpy(*args, **kwargs),
    Tensor.__array__: lambda real, *args, **kwargs: real.__array__(*args, **kwargs),
    Tensor.__repr__: lambda real, **_: repr(real),
}
"""Methods that show the values of a tensor, on the real one that stands for it."""
_NUMBERS = (Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__bool__, Tensor.__index__)
"""Methods that read a number as such; other functions read a size."""
_MOVES = (Tensor.to, Tensor.cuda)
_set_data: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_NAMING: tuple[Any, ...] = (torch.device, torch._C._nn._parse_to)
_COPIES = (torch.tensor, torch.as_tensor)
_MOST_OBJECTS = 10_000
_MOST_ELEMENTS = 1000


class ScriptTracer(Tracer):
    """Traces a script while active.

    Args:
        recorder: Records the operators.
        device: Where the script's fake tensors lie.
        see_model: Is called with a module that has parameters, before it runs, if no other module
            calls it.
        windows: Tells whether models that were recorded need not run again.

    Attributes:
        roots: The modules that the script calls, by the name that it has for each.
    """

    def __init__(
        self,
        recorder: ScriptRecorder,
        device: torch.device,
        see_model: Callable[[nn.Module], None],
        windows: Windows,
    ) -> None:
        super().__init__(nn.Module(), recorder)
        self._see_model = see_model
        self.roots = weakref.WeakValueDictionary[str, nn.Module]()
        self._recorder = recorder
        self._target_device = device
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self.micro_batches = MicroBatches(recorder, lambda: self._log, self.be_silent)
        self.left_out = LeftOutCalls(
            recorder, windows.until is not None, lambda: windows.leaves_out, self.be_silent
        )
        self.begin_window()

    def begin_window(self) -> None:
        """Begins with no nodes."""
        self._log = NodeLog(self.model)
        for root in self.roots.values():
            self._log.add_model(root)
        self.micro_batches.forget()
        self.left_out.begin_window()

    # -- functions -----------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = map(find_inner, iterate_tensors((args, kwargs)))
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if func is Tensor.pin_memory:
            return args[0]
        for kind in types:
            if not issubclass(kind, Tensor):  # such as tensordict's
                with self:
                    result = kind.__torch_function__(func, types, args, kwargs)
                if result is not NotImplemented:
                    return result
        func, args, kwargs = spell_device(func, args, kwargs)
        if func in _COPIES and fakes and not isinstance(args[0], Tensor):  # a list of scalars
            values = tree_map_only(Tensor, Tensor.item, args[0])
            return self.__torch_function__(func, types, (values, *args[1:]), kwargs)
        if func == _set_data and len({isinstance(each, FakeTensor) for each in args}) > 1:
            return self._become(*args)
        if not fakes and not self._is_made(func, args, kwargs):
            listed = (x for each in args if isinstance(each, list | tuple) for x in each)
            if any(hasattr(x, "__torch_function__") and not isinstance(x, Tensor) for x in listed):
                return func(*args, **kwargs)  # torch.einsum of torch.fx.Proxy, as in e3nn
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        reads = self._recorder.reads
        reads.is_size = func not in _NUMBERS
        if func in _TO_VALUES and isinstance(args[0], FakeTensor):
            with torch._C.DisableTorchFunction():
                return _TO_VALUES[func](reads.make_real(args[0]), *args[1:], **kwargs)
        if func is Tensor.__format__ and isinstance(args[0], FakeTensor):
            return self._format(*args)
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return _copy_deep(*args)
        if func is Tensor.item:
            count = reads.count
            value = super().__torch_function__(func, types, args, kwargs)
            return value if count == reads.count else stand_in(value, reads.see_comparison)
        result = super().__torch_function__(func, types, args, kwargs)
        if not fakes and func in _MOVES and len(self._scopes) == 1 and not self._opaque_depth:
            self._recorder.label_input(result)
        return result

    def _is_made(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
        """Returns whether a function of no fake tensor may make one, or read a device's name."""
        if func in _MOVES or func in _NAMING:
            return True
        device = kwargs.get("device")
        if self._recorder.makes_fakes:
            return func in _device._device_constructors()
        return str(device).startswith("cuda") or isinstance(device, int)

    def _become(self, tensor: Tensor, data: Tensor) -> None:
        """Makes a tensor that is moved by ``tensor.data = data`` a fake one, or a real one."""
        make_subclass: Any = Tensor._make_subclass
        made = make_subclass(find_kind(tensor), data, tensor.requires_grad)
        vars(made).update(vars(tensor))
        swap: Any = torch.utils.swap_tensors
        swap(tensor, made)

    def _format(self, tensor: Tensor, spec: str) -> str:
        if tensor.dim() == 0:
            return format(tensor.item(), spec)
        return format(repr(tensor), spec)

    # -- modules -------------------------------------------------------------------------------

    def _make_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._opaque_depth or not _is_fake(module, args, kwargs):
                return call(module, *args, **kwargs)
            fqn, is_outermost = self._find_name(module), len(self._scopes) == 1
            has_parameters = next(module.parameters(), None) is not None
            is_criterion = is_leaf(module) and not has_parameters
            is_new = fqn is None and is_outermost and not is_criterion
            if is_new:
                fqn = self._add_root(module)
            if has_parameters and is_outermost:
                self._see_model(module)
            if is_new:
                self._label_inputs(module, args, kwargs)
            run = functools.partial(call, module)
            if fqn is not None and is_leaf(module):
                label = type(module).__name__
                return self._run_node(Call("call_module", fqn, label, fqn, run, args, kwargs))
            if fqn is not None and is_outermost:
                self._label_inputs(module, args, kwargs)
            made = f"{self._scopes[-1]}.{type(module).__name__}".strip(".")
            scope = made if fqn is None else fqn
            enter = functools.partial(self._enter, scope, run, args, kwargs)
            is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
            if not (has_parameters and is_outermost) or is_transformed:  # by torch.func.grad
                return enter()
            if not self._recorder.makes_fakes:
                enter = functools.partial(self.micro_batches.call, enter, module, (args, kwargs))
            result = self.left_out.call(enter, module, (args, kwargs))
            self._label_carried(module, args, kwargs)
            return result

        return call_module

    def run_move(self, module: nn.Module, move: Callable[[], Any]) -> Any:
        """Runs what moves or casts a module as one node, which names what it makes."""
        if self._phase is None or self._opaque_depth:
            return move()
        name = self._find_name(module) or type(module).__name__
        result = self._run_node(Call("call_function", "to", "to", name, move, (), {}))
        own = (
            (Category.PARAMETER, module.named_parameters()),
            (Category.BUFFER, module.named_buffers()),
        )
        for category, tensors in own:
            for fqn, tensor in tensors:
                if isinstance(find_inner(tensor), FakeTensor):
                    self._recorder.set_category(tensor, category, f"{name}.{fqn}")
        return result

    def _enter(self, scope: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a module whose parts are nodes."""
        self._scopes.append(scope)
        self._recorder.in_model = True
        try:
            return run(*args, **kwargs)
        finally:
            self._scopes.pop()
            self._recorder.in_model = len(self._scopes) > 1

    def _find_name(self, module: nn.Module) -> str | None:
        known = self._names.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def _add_root(self, module: nn.Module) -> str:
        """Names the modules of a root by what the script calls it."""
        root = _find_variable(module) or type(module).__name__
        while root in self.roots and self.roots[root] is not module:
            root += "_"
        self.roots[root] = module
        self._log.add_model(module)
        for fqn, child in module.named_modules():
            if self._find_name(child) is None:
                self._names[id(child)] = weakref.ref(child), read_fqn(f"{root}.{fqn}").strip(".")
        self.label_modules()
        return root

    def _label_inputs(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Labels what the script passes to a root as inputs, unless a node has computed it."""
        find_origin, nodes = self._log.find_origin, self._log.nodes
        for name, value in bind_arguments(module, args, kwargs):
            for tensor in iterate_tensors(value):
                origin = find_origin(tensor)
                if origin is None or nodes[origin.node].target in ("to", "cuda"):
                    self._recorder.label_input(tensor, name)

    def _label_carried(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Labels what objects hold that a model is given without gradients, as a cache does."""
        if torch.is_grad_enabled() or not list_carried((args, kwargs)):
            return
        with torch._C.DisableTorchFunction():
            for name, value in bind_arguments(module, args, kwargs):
                for slot in list_slots(list_carried(value)):
                    if isinstance(slot.value, Tensor):
                        path = ".".join(map(str, (name, *slot.path)))
                        self._recorder.set_category(slot.value, Category.KV_CACHE, path)

    def label_modules(self) -> dict[int, str]:
        """Labels parameters, buffers and gradients of the roots; names parameters by their ids."""
        names = {}
        with torch._C.DisableTorchFunction():
            for root, module in self.roots.items():
                for name, parameter in module.named_parameters():
                    names[id(parameter)] = fqn = f"{root}.{name}"
                    self._recorder.set_category(parameter, Category.PARAMETER, fqn)
                    if parameter.grad is not None:
                        self._recorder.label(parameter.grad, Category.GRADIENT, f"{fqn}.grad")
                for name, tensor in iterate_unsharded(module):
                    self._recorder.label(tensor, Category.PARAMETER, f"{root}.{name} (unsharded)")
                for name, buffer in module.named_buffers():
                    self._recorder.set_category(buffer, Category.BUFFER, f"{root}.{name}")
        return names

    def name_kept(self) -> None:
        """Names what the script's variables hold and nothing else names: averages of weights."""
        scopes = _list_variables()
        with torch._C.DisableTorchFunction():
            self._recorder.name_kept(held for scope in scopes for held in _iterate_held(scope))

    def name_owners(self, parameters: AbstractSet[int]) -> dict[int, str]:
        """Names modules that have parameters with these ids, and that compiled code alone calls.

        Returns:
            As :meth:`label_modules`.
        """
        found = (value for scope in _list_variables() for value in scope.values())
        modules = [value for value in found if isinstance(value, nn.Module)]
        for module in sorted(modules, key=lambda each: -sum(1 for _ in each.parameters())):
            own = {id(parameter) for parameter in module.parameters()}
            if own & parameters:
                self._add_root(module)
                parameters = parameters - own
        return self.label_modules()


def _is_fake(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> bool:
    given = iterate_tensors((args, kwargs, next(module.parameters(), None)))
    return any(isinstance(find_inner(tensor), FakeTensor) for tensor in given)


def _find_variable(module: nn.Module) -> str:
    """Finds the name that the user's innermost code has for a module; empty for none."""
    found = (item for scope in _list_variables() for item in scope.items())
    return next((str(name) for name, value in found if value is module), "")


def _list_variables() -> list[Mapping[str, Any]]:
    """Lists the variables of the user's innermost code: its own, globals, attributes of self."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    variables = dict(frame.f_locals)
    if is_function and sys.version_info < (3, 13):
        frame.f_locals.clear()  # a copy that the frame would keep, and with it every tensor
    owner = variables.pop("self", None)
    attributes = getattr(owner, "__dict__", {})
    modules = attributes.get("_modules") if isinstance(owner, nn.Module) else None
    attributes = {**attributes, **(modules or {})}  # BoTorch calls modules before it has its own
    return [variables, frame.f_globals, attributes]


def _iterate_held(scope: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that variables hold, by attributes, indices and keys, nearest first."""
    queue, seen = deque(scope.items()), set[int]()
    while queue and len(seen) < _MOST_OBJECTS:
        name, value = queue.popleft()
        if isinstance(value, LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, nn.Module):
            for fqn, tensor in (*value.named_parameters(), *value.named_buffers()):
                yield f"{name}.{fqn}", tensor
        elif not callable(value):
            is_list = type(value) in (list, tuple)
            owner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            # Past what a subclass does: transformers' maps of models load what they are asked for.
            items = dict.items(owner) if isinstance(owner, dict) else ()
            for key, held in islice(enumerate(value) if is_list else items, _MOST_ELEMENTS):
                if isinstance(key, (str, int)):  # an optimizer's states have parameters for keys
                    queue.append((f"{name}.{key}", held))


def _copy_deep(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copies a fake tensor as ``copy.deepcopy`` copies a real one."""
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    with torch.no_grad():
        copy = tensor.clone()
    if isinstance(tensor, nn.Parameter):
        copy = nn.Parameter(copy, tensor.requires_grad)
    elif tensor.requires_grad:
        copy.requires_grad_()
    memo[id(tensor)] = copy
    return copy
