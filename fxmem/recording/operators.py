"""Operators on fake tensors: their results, effects and costs."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from fxmem.fakes.containers import iterate_tensors
from fxmem.fakes.fake_mode import TensorCopier, find_inner
from fxmem.fakes.operator_cache import Key, OperatorCache, make_key
from fxmem.fakes.values import DRAW, ROUTING, find_known, remember_constant
from fxmem.graph import Effect, FirstOperation, Operation, Phase, SourceLocation
from fxmem.kernels.registry import Backend, OperatorCall, Workspace
from fxmem.recording.constants import (
    answer_operator,
    is_known_index,
    list_tensors,
    looks_at_values,
    see_result,
)
from fxmem.recording.ledger import Ledger
from fxmem.recording.size_hints import SizeHints
from fxmem.source import find_source
from fxmem.specs import strip_torch
from fxmem.versions.fallbacks import find_flop_formula
from fxmem.versions.operators import aten

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_SAME_DTYPE = {
    aten.mm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.mv.default: (0, 1),
    aten.addmv.default: (1, 2),
    aten.convolution.default: (0, 1),
}
"""Positions of two arguments of one dtype; the tests hold this against what real tensors do."""
_RUN_BY = {"fsdp::chunk_cat": aten._chunk_cat.out}
"""Operators of ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``, and those they run."""
_FAKE_KEYS = (
    *("Meta", "CompositeImplicitAutograd"),
    *("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"),
)
_MASKS = (torch.bool, torch.uint8)
_INDICES = (torch.int64, torch.int32)


@functools.cache
def _has_fake_kernel(func: Any) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(func.name(), key) for key in _FAKE_KEYS)


@functools.cache
def _is_foreach_in_place(func: Any) -> bool:
    return func.name().startswith("aten::_foreach_") and not func._schema.returns


class RealTensorCache:
    """Fakes of real tensors that a step meets: globals, or made by ``torch.from_numpy``.

    Args:
        see_fake: Is called with the storage of a real tensor and that of its first fake.
    """

    def __init__(self, see_fake: Callable[[Any, Any], None]) -> None:
        self._see_fake = see_fake
        self._fakes: MutableMapping[Any, torch.Tensor] = WeakIdKeyDictionary()
        self._copiers: MutableMapping[Any, TensorCopier] = WeakIdKeyDictionary()  # by storage

    def find_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Finds the fake of a real tensor; returns any other tensor itself.

        Must be called with the step's fake mode active.
        """
        if type(tensor) in _PLAIN:  # torch.func.grad and vmap give theirs no class of its own
            tensor = find_inner(tensor)
        if type(tensor) not in _PLAIN or tensor.is_sparse:
            return tensor
        fake = self._fakes.get(tensor)
        if fake is None:
            mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
            storage = tensor.untyped_storage()
            # A copier for each storage: once it is freed, another may have its address.
            is_first = storage not in self._copiers
            if is_first:
                self._copiers[storage] = TensorCopier(mode)
            fake = self._fakes[tensor] = self._copiers[storage].copy(tensor)
            if is_first:  # the copier keeps it as long as the real one lives
                self._see_fake(storage, fake.untyped_storage())
            remember_constant(fake, tensor)
        return fake

    def has_fake(self, storage: torch.UntypedStorage) -> bool:
        """Returns whether a fake stands for a real storage."""
        return storage in self._copiers

    def restore_gradients(self) -> None:
        """Removes the fake gradients that backward has set on the user's tensors."""
        for tensor in self._fakes:
            if tensor.is_leaf and isinstance(tensor.grad, FakeTensor):
                tensor.grad = None


class OperatorRunner:
    """Runs operators on fake tensors, as the target's kernels would, and estimates their costs.

    Attributes:
        draws: Lines that look at a single random number, in their order.
        routings: Lines that look at the experts that tokens are sent to, and whether they search.
        is_routed: Scores choose experts, and not the tokens of a text.
    """

    def __init__(self, target: Backend, ledger: Ledger, hints: SizeHints) -> None:
        self.draws: dict[SourceLocation | None, None] = {}
        self.routings: dict[SourceLocation | None, bool] = {}
        self._target = target
        self._kernels = target.kernels
        self._ledger = ledger
        self.hints = hints
        self.is_routed = True
        self._cache = OperatorCache()
        self._flops: dict[Key, int] = {}

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, by_user: bool
    ) -> Any:
        """Runs an operator; ``by_user`` if the user's own code runs it, whose values count."""
        answer = answer_operator(func, args, kwargs, self.hints)
        for value in map(find_known, list_tensors((args, kwargs))) if answer and by_user else ():
            if value is not None and value.assumed:
                if value.assumed == DRAW:
                    self.draws[find_source()] = None
                elif value.assumed == ROUTING:
                    source, searches = find_source(), func is not aten._local_scalar_dense.default
                    self.routings[source] = searches or self.routings.get(source, False)
        result = answer[0] if answer else self._run_kernel(func, args, kwargs)
        if by_user or is_known_index(args):
            see_result(func, args, kwargs, result, self.hints, is_routed=self.is_routed)
        return result

    def detach(self, tensor: torch.Tensor) -> torch.Tensor:
        """Detaches a tensor, as no part of the step."""
        detached: torch.Tensor = self._cache.run(aten.detach.default, (tensor,), {})
        return detached

    def _run_kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_dtypes(func, args)
        kernel = self._kernels.get(func)
        result = kernel(*args, **kwargs) if kernel else NotImplemented
        if result is not NotImplemented:
            return result
        if _is_foreach_in_place(func) and all(tensor.constant is None for tensor in args[0]):
            return None  # FakeTensorMode would run it tensor by tensor, for no result
        if "out" in kwargs and not _has_fake_kernel(func):
            return kwargs["out"]  # FakeTensorMode would compute with real tensors as large
        result = self._cache.run(func, args, kwargs)
        # FakeTensorMode computes with known scalars on the host, and leaves the result there. What
        # is changed in place has its device; the result that the mode returns is dropped.
        is_on_host = isinstance(result, FakeTensor) and result.constant is not None
        if is_on_host and not (
            self._ledger.counts_all or "device" in kwargs or func._schema.is_mutable
        ):
            for tensor in list_tensors(args):
                if isinstance(tensor, FakeTensor) and self._ledger.is_counted(tensor):
                    result.fake_device = tensor.fake_device
        return result

    def count_flops(self, func: Any, call: OperatorCall) -> int:
        """Counts FLOPs as ``torch.utils.flop_counter`` does, once for like calls."""
        count = find_flop_formula(func)
        if count is None:
            return 0
        key = make_key(func, call.args, call.kwargs)  # type: ignore[arg-type]
        if key not in self._flops:
            flops = int(count(*call.args, **call.kwargs, out_val=call.outputs))
            if key is None:
                return flops
            self._flops[key] = flops
        return self._flops[key]

    def estimate_workspace(self, func: Any, call: OperatorCall) -> Workspace:
        func = _RUN_BY.get(func.name(), func) if func.namespace == "fsdp" else func
        if func not in self._target.estimators:
            return 0
        tensors = iterate_tensors((call.args, call.kwargs, call.outputs))
        if not (self._ledger.counts_all or any(map(self._ledger.is_counted, tensors))):
            return 0
        return self._target.estimate_workspace(func, call)

    def estimate_library_bytes(self, func: Any, call: OperatorCall) -> int:
        """Estimates the most that the library behind the kernel may choose to take besides."""
        estimate = self._target.libraries.get(func)
        if estimate is None or not self._ledger.is_counted(call.args[0]):
            return 0
        return estimate(call)

    def list_kept(self, func: Any, args: tuple[Any, ...]) -> tuple[tuple[str, int], ...]:
        """Lists names and bytes of memory that the library keeps from its first use on."""
        keeper = self._target.keepers.get(func)
        return () if keeper is None else keeper(OperatorCall(args, {}))


def check_dtypes(func: Any, args: tuple[Any, ...]) -> None:
    """Raises RuntimeError for mixed dtypes that eager refuses and fake kernels let pass.

    A bfloat16 model that makes a float32 tensor on its way fails where it runs.
    """
    dtypes = [args[position].dtype for position in _SAME_DTYPE.get(func, ())]
    if len(set(dtypes)) > 1:
        raise RuntimeError(
            f"two tensors must have the same dtype, but got {strip_torch(dtypes[0])} and "
            f"{strip_torch(dtypes[1])}"
        )
    if func is aten.embedding.default and args[1].dtype not in _INDICES:
        raise RuntimeError(
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: "
            f"Long, Int; but got {args[1].dtype} instead"
        )


def find_effect(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Effect | None:
    """Finds what keeps an operator from being recomputed as it was.

    Source: the tags in ``aten/src/ATen/native/tags.yaml``; the size of ``index`` depends on data
    only where it is given masks.
    """
    if kwargs.get("generator") is not None:
        return Effect.GENERATOR
    if func is aten.index.Tensor and not any(
        index is not None and index.dtype in _MASKS for index in args[1]
    ):
        return None
    return _read_tags(func)


@functools.lru_cache(maxsize=4096)
def _read_tags(func: Any) -> Effect | None:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return Effect.RANDOM
    return Effect.DATA if looks_at_values(func) else None


def find_overwritable(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> Iterator[torch.Tensor]:
    """Finds the arguments that an in-place variant could overwrite and give the same tensor.

    They have the result's shape, dtype and strides and all of their storage. Where autograd
    records, a leaf cannot be changed, and a view makes the backward copy (``CopySlices``). The
    second argument counts too, for operators in which it can take the place of the first.
    """
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    for tensor in args[:2] if kwargs.get("alpha", 1) == 1 else args[:1]:
        if not isinstance(tensor, torch.Tensor) or not _is_alike(tensor, result):
            continue
        if not (is_recorded and (tensor._is_view() or (tensor.is_leaf and tensor.requires_grad))):
            yield tensor


def _is_alike(tensor: torch.Tensor, result: torch.Tensor) -> bool:
    return (
        tensor.shape == result.shape
        and tensor.dtype == result.dtype
        and tensor.device == result.device
        and tensor.layout is torch.strided
        and tensor.stride() == result.stride()
        and tensor.untyped_storage().nbytes() == result.untyped_storage().nbytes()
        and tensor.is_conj() == result.is_conj()
        and tensor.is_neg() == result.is_neg()
    )


# -- the first step, to which the allocations before the steady one belong -------------------------

_SKIPPED = ("step.begin", "random.get_state", str(aten.detach.default))
"""Operations of the steady step alone: the recording's own, and what its hooks add to backward."""


class FirstStepLog:
    """Notes to which operator each allocation and free of the first step belongs."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, Phase, int, Any]] = []
        self._counts: dict[Phase, int] = defaultdict(int)

    def see(self, func: Any, phase: Phase, start: int) -> None:
        """Notes an operator that has run, after ``start`` allocations and frees."""
        rank = self._counts[phase]
        if func is aten.detach.default or (phase is Phase.OPTIMIZER and rank):
            return
        if self._marks and self._marks[-1][0] == start:
            self._marks.pop()  # the operator before neither allocated nor freed
        self._marks.append((start, phase, rank, func))
        self._counts[phase] = rank + 1

    def list_operations(self, operations: Iterable[Operation]) -> Iterator[FirstOperation]:
        """Lists the operators, each with its twin among those of the steady step.

        Both steps run the same operators in the same order.
        """
        steady: dict[Phase, list[Operation]] = defaultdict(list)
        for operation in operations:
            if operation.name not in _SKIPPED:
                steady[operation.phase].append(operation)
        for start, phase, rank, func in self._marks:
            twins = steady[phase]
            found = twins[rank] if phase is not Phase.OPTIMIZER and rank < len(twins) else None
            is_twin = found is not None and found.name == str(func)
            yield FirstOperation(start, phase, found.index if found and is_twin else None)
