"""Inputs and tensors of a model, copied to fake CPU tensors that take no memory.

A fake tensor has a shape, a dtype, strides and a storage with a size, and no data. Whatever the
user gives - real, meta or fake tensors, on any device - becomes fake *CPU* tensors: fake tensors
on an accelerator abort the process where torch was built without it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_iter, tree_leaves, tree_map

from fxmem.errors import TraceError, UsageError
from fxmem.fakes.sparse import make_sparse, raise_layout, read_parts
from fxmem.fakes.values import mark_held, remember_constant
from fxmem.specs import TensorSpec, parse_spec, strip_torch

_CPU = torch.device("cpu")
_MARK = "_fxmem_on_accelerator"
_ALIGNMENT = 16  # the largest itemsize: complex128
_PLAIN = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)
_STARTS_LIKE_SPEC = re.compile(r"\s*(-?[0-9]|scalar\b)")


class LeanDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode without the wrapper that keeps torch.compile out of each operator.

    Nothing is compiled, and the wrapper would import ``torch._dynamo``, which takes longer than a
    whole analysis.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _LeanFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    __torch_dispatch__ = inspect.unwrap(FakeTensorMode.__torch_dispatch__)


def make_fake_mode() -> FakeTensorMode:
    """Makes a mode for one analysis, with whose fakes real tensors may be mixed."""
    return _LeanFakeMode(allow_non_fake_inputs=True)


# -- inputs ----------------------------------------------------------------------------------------


def make_fake_inputs(
    args: Sequence[object],
    kwargs: Mapping[str, object],
    fake_mode: FakeTensorMode,
    *,
    dtype: str | None = None,
    fakes: dict[int, Tensor] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Makes fresh fake CPU tensors of the inputs, in the lists, tuples and dicts they came in.

    A tensor keeps its strides and ``requires_grad``; one passed twice stays one, and two on one
    storage share it, cut to the part that they cover. A :class:`TensorSpec`, or a text that
    starts as one (a digit, or ``scalar``), becomes a tensor; other texts and numbers stay as they
    are, as does any other object. Floating tensors are cast to the dtype. ``fakes`` has those of
    tensors that the model holds, by the ids of their originals, and gets those of the inputs.

    >>> make_fake_inputs(["2x3", "mean"], {"mask": None}, make_fake_mode())
    ((FakeTensor(..., size=(2, 3)), 'mean'), {'mask': None})
    """
    cast_to = find_dtype(dtype)
    copier = TensorCopier(fake_mode, _find_spans(tree_iter((args, kwargs))))
    fakes = {} if fakes is None else fakes
    own: dict[int, Tensor] = {}

    def convert(leaf: object) -> object:
        leaf = read_leaf(leaf)
        if isinstance(leaf, TensorSpec):
            return copier.create(leaf, cast_to)
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in own:
            held = fakes.get(id(leaf)) if cast_to is None else None
            own[id(leaf)] = copier.copy(leaf, cast_to) if held is None else held
        return own[id(leaf)]

    inputs: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(convert, (tuple(args), dict(kwargs)))
    for key, fake in own.items():
        fakes.setdefault(key, fake)
    return inputs


def describe_inputs(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[str, ...]:
    """Describes the inputs by the texts that ``--input`` takes; nested ones with their path."""
    texts = []
    for index, value in enumerate(args):
        for path, leaf in flatten_with_paths(value):
            texts.append((f"[{index}]{path}=" if path else "") + _describe_leaf(leaf))
    for name, value in kwargs.items():
        for path, leaf in flatten_with_paths(value):
            texts.append(f"{name}{path}={_describe_leaf(leaf)}")
    return tuple(texts)


def flatten_with_paths(tree: object) -> list[tuple[str, Any]]:
    """Flattens nested containers into leaves, each with its path.

    Leaves are numbered where a class has not told PyTorch its keys: outputs of transformers 4.

    >>> flatten_with_paths({"loss": 0.5, "states": [1, 2]})
    [("['loss']", 0.5), ("['states'][0]", 1), ("['states'][1]", 2)]
    """
    try:
        return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(tree)[0]]
    except ValueError:
        return [(f"[{at}]", leaf) for at, leaf in enumerate(tree_leaves(tree))]


def read_leaf(leaf: object) -> object:
    """Reads an input that is a text like a spec as the spec; anything else stays as it is."""
    if isinstance(leaf, str) and _STARTS_LIKE_SPEC.match(leaf):
        return parse_spec(leaf)
    return leaf


def _describe_leaf(leaf: object) -> str:
    leaf = read_leaf(leaf)
    if isinstance(leaf, Tensor):
        memory_format = ""
        if leaf.layout is torch.strided and not leaf.is_contiguous():
            for dims, name in ((4, "channels_last"), (5, "channels_last_3d")):
                like: Any = getattr(torch, name)
                if leaf.dim() == dims and leaf.is_contiguous(memory_format=like):
                    memory_format = name
        dtype = strip_torch(leaf.dtype)
        return str(TensorSpec(tuple(leaf.shape), dtype, memory_format=memory_format))
    if isinstance(leaf, TensorSpec):
        return str(leaf)
    is_plain = leaf is None or isinstance(leaf, bool | int | float | complex | str)
    return repr(leaf) if is_plain else type(leaf).__name__


def find_dtype(name: str | None) -> torch.dtype | None:
    """Finds the floating dtype that a model is cast to; None for none."""
    dtype = getattr(torch, name) if name else None
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(
            f"a model cannot be cast to {name}", hint="float32, bfloat16, float16 or float64"
        )
    return dtype


# -- tensors ---------------------------------------------------------------------------------------


def lies_on_accelerator(tensor: Tensor) -> bool:
    """Returns whether the user put a tensor on an accelerator, were there one."""
    return tensor.device.type not in ("cpu", "meta") or _MARK in tensor.__dict__


def mark_on_accelerator(result: Any) -> Any:
    """Notes of a tensor that the user has it on an accelerator."""
    if isinstance(result, Tensor):
        result.__dict__[_MARK] = True
    return result


class TensorCopier:
    """Copies tensors to fakes; those on one storage to fakes on one storage.

    The storages are told apart by address: the tensors must outlive the copier. Of a storage, the
    bytes in its span are copied; without one, all.
    """

    def __init__(
        self, fake_mode: FakeTensorMode, spans: Mapping[int, tuple[int, int]] | None = None
    ) -> None:
        self.fake_mode = fake_mode
        self._spans = spans or {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def create(self, spec: TensorSpec, dtype: torch.dtype | None) -> Tensor:
        """Makes a fake tensor as a spec says, cast to a dtype."""
        with no_dispatch():
            meta = torch.empty(
                spec.shape,
                dtype=getattr(torch, spec.dtype),
                device="meta",
                memory_format=getattr(torch, spec.memory_format or "contiguous_format"),
            )
            fake = FakeTensor(self.fake_mode, _cast(meta, dtype), _CPU)
        return fake.requires_grad_() if spec.requires_grad else fake

    def copy(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Makes a fake of a tensor: a parameter if it is one, a leaf, without a gradient."""
        if is_traceable_wrapper_subclass(tensor):
            return self.fake_mode.from_tensor(tensor, static_shapes=True)
        if tensor.is_sparse:
            return self._copy_sparse(tensor, dtype)
        if tensor.layout is not torch.strided:
            raise_layout(tensor)
        if tensor.is_quantized:
            raise TraceError("a quantized tensor has no fake copy", hint="analyse the float model")
        with no_dispatch():
            storage: Any = tensor.untyped_storage()
            key = storage._cdata
            low, high = self._spans.get(key) or (0, max(_find_span(tensor)[1], storage.nbytes()))
            if key not in self._storages:
                self._storages[key] = torch.UntypedStorage(  # type: ignore[no-untyped-call]
                    high - low, device="meta"
                )
            offset = tensor.storage_offset() - low // tensor.itemsize
            meta = torch.empty(0, dtype=tensor.dtype, device="meta").set_(
                self._storages[key], offset, tensor.size(), tensor.stride()
            )
            meta = meta.conj() if tensor.is_conj() else meta
            meta = _cast(meta._neg_view() if tensor.is_neg() else meta, dtype)
            known: Any = None  # the value, which of one element only matters to control flow
            if tensor.numel() == 1 and not tensor.requires_grad and meta.dtype == tensor.dtype:
                known = tensor.constant if isinstance(tensor, FakeTensor) else tensor
            is_known = known is not None and known.device == _CPU
            constant = known.detach().clone() if is_known else None  # in-place operators write
            fake = FakeTensor(self.fake_mode, meta, _CPU, constant=constant)
        mark_held(fake)
        if lies_on_accelerator(tensor):
            mark_on_accelerator(fake)
        if type(tensor) not in _PLAIN:
            fake.__class__ = _make_fake_class(type(tensor))  # type: ignore[assignment]
        kinds = {"_is_param": nn.Parameter, "_is_buffer": nn.Buffer}
        vars(fake).update({flag: True for flag, kind in kinds.items() if isinstance(tensor, kind)})
        return fake.requires_grad_() if tensor.requires_grad else fake

    def _copy_sparse(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        indices, values = read_parts(tensor)
        fakes = self.copy(indices), self.copy(values, dtype)
        remember_constant(fakes[0], indices)
        with self.fake_mode:
            made = make_sparse(*fakes, tensor.shape, is_coalesced=tensor.is_coalesced())
        mark_held(made)
        return made.requires_grad_() if tensor.requires_grad else made


def make_fake_subclass(kind: type[Tensor], data: Tensor, requires_grad: bool = False) -> Tensor:
    """Makes an instance of a user's subclass of a fake tensor: ``Tensor._make_subclass``."""
    made = Tensor.detach(data)
    if kind not in _PLAIN:
        made.__class__ = _make_fake_class(kind)
    if issubclass(kind, nn.Parameter):
        vars(made)["_is_param"] = True
    with torch._C.DisableTorchFunction():  # a class may take few functions: ExpandedWeight
        return made.requires_grad_(requires_grad)


def view_as_fake_subclass(kind: type[Tensor], data: Tensor) -> Tensor:
    """Makes a view of a fake tensor that is an instance of a user's subclass: ``as_subclass``."""
    made = torch.ops.aten.alias.default(data)
    made.__class__ = _make_fake_class(kind)
    view: Tensor = made
    return view


def find_kind(tensor: Tensor) -> type[Tensor]:
    """Finds the class that a tensor has, or that a fake one stands for."""
    if not isinstance(tensor, FakeTensor):
        return type(tensor)
    if type(tensor) is not FakeTensor:
        return type(tensor).__mro__[2]
    return nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor


@functools.lru_cache(maxsize=256)
def _make_fake_class(kind: type[Tensor]) -> type[Tensor]:
    """Makes a class of fake tensors that are instances of a user's subclass, with its methods."""
    if issubclass(kind, FakeTensor):
        return kind
    run: Any = kind.__torch_function__
    names: dict[str, Any] = {"__dict__": property(_read_dict.__get__, _update_dict)}
    names["__init__"] = kind.__init__
    if hasattr(run, "__func__"):  # a class method: torch makes classes without one disable theirs
        names["__torch_function__"] = classmethod(lambda *call, **rest: run.__func__(*call, **rest))
    if issubclass(kind, nn.Parameter):  # whose results are plain tensors, whatever it does
        names["__torch_function__"] = run
        names["detach"] = lambda fake: _detach(kind, fake)
    if kind.__new__ is not Tensor.__new__:
        names["__new__"] = lambda _, *args, **kwargs: kind.__new__(kind, *args, **kwargs)
    return type(kind.__name__, (FakeTensor, kind), names)


_read_dict: Any = vars(Tensor)["__dict__"]


def _update_dict(fake: FakeTensor, attributes: dict[str, Any]) -> None:
    """Gives a fake a user's attributes; its own stay. fastai sets ``result.__dict__`` so."""
    own = _read_dict.__get__(fake)
    for name, value in attributes.items():
        if name not in own and not name.startswith("_fxmem"):
            own[name] = value


def _detach(kind: type[Tensor], fake: FakeTensor) -> Tensor:
    """Keeps the class: a module that is moved replaces a fake by a parameter made of it."""
    made = make_fake_subclass(kind, Tensor.detach(fake))
    vars(made).update(vars(fake))
    return made


def _cast(meta: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Makes the meta tensor that ``.to(dtype)`` gives, for a floating or complex one."""
    is_cast = dtype is not None and (meta.is_floating_point() or meta.is_complex())
    return torch.empty_like(meta, dtype=dtype) if is_cast and meta.dtype != dtype else meta


def _find_span(tensor: Tensor) -> tuple[int, int]:
    """Finds first and last byte, exclusive, of its storage that a strided tensor covers."""
    if tensor.numel() == 0:
        return (0, 0)
    first = tensor.storage_offset()
    sizes_strides = zip(tensor.size(), tensor.stride(), strict=True)
    last = first + sum((size - 1) * stride for size, stride in sizes_strides)
    return int(first * tensor.itemsize), int((last + 1) * tensor.itemsize)


def _find_spans(leaves: Iterable[object]) -> dict[int, tuple[int, int]]:
    """Finds for each storage the part that all tensors among the leaves cover together.

    An input is often a slice of a data set, which does not come to the device with it.
    """
    spans: dict[int, tuple[int, int]] = {}
    for leaf in leaves:
        is_plain = isinstance(leaf, Tensor) and not is_traceable_wrapper_subclass(leaf)
        if is_plain and leaf.layout == torch.strided:  # type: ignore[attr-defined]
            low, high = _find_span(leaf)  # type: ignore[arg-type]
            low -= low % _ALIGNMENT
            key = leaf.untyped_storage()._cdata  # type: ignore[attr-defined]
            known = spans.get(key, (low, high))
            spans[key] = (min(low, known[0]), max(high, known[1]))
    return spans


@functools.cache
def is_wrapper(kind: type) -> bool:
    """Returns whether tensors of a class wrap others, on which their operators run: DTensor."""
    return hasattr(kind, "__tensor_flatten__") and not issubclass(kind, FakeTensor)


def find_inner(tensor: Tensor) -> Tensor:
    """Finds the tensor that holds the memory of a DTensor or of ``torch.func``'s wrapper.

    Returns another tensor itself.
    """
    while True:
        if is_wrapper(type(tensor)):
            wrapper: Any = tensor
            tensor = getattr(wrapper, wrapper.__tensor_flatten__()[0][0])
        elif torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        else:
            return tensor


def holds_fakes(value: object) -> bool:
    """Returns whether a value is a fake tensor, or has one in containers, wrappers or modules."""
    leaves = tree_leaves(value)
    modules = (leaf for leaf in leaves if isinstance(leaf, nn.Module))
    parameters = (parameter for module in modules for parameter in module.parameters())
    tensors = (each for each in (*leaves, *parameters) if isinstance(each, Tensor))
    return any(isinstance(find_inner(tensor), FakeTensor) for tensor in tensors)


def refuse_scripts(model: nn.Module) -> None:
    """Checks that no module runs as TorchScript has compiled it."""
    for name, module in model.named_modules():
        subject = f"{name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(
                f"{subject} is TorchScript, which does not run on fake tensors",
                hint="pass the module that was scripted",
            )


def overrides_functions(kind: type) -> bool:
    """Returns whether a type of tensors overrides torch functions, as C++ decides it."""
    if kind is torch.Tensor:
        return False
    function = getattr(kind, "__torch_function__", _not_overridden)
    return function is not _not_overridden


_not_overridden = torch._C._disabled_torch_function_impl
