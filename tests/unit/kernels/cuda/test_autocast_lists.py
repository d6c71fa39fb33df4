"""The operators that autocast treats, against PyTorch's kernels and its own test's lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxmem.kernels.autocast import lists
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.functions import lower_functions
from fxmem.recording.recorder import Recorder
from fxmem.tracing.fakes import make_fake_mode

LISTS = (
    lists.LOWER_PRECISION,
    lists.FP32,
    lists.FP32_RESULT,
    frozenset(lists.FP32_OVERLOAD),
    lists.PROMOTE,
    lists.BANNED,
)


def test_the_lists_are_those_of_the_installed_pytorch() -> None:
    """Each operator that has a kernel of CUDA's autocast is in one list, and no other is."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    treated = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has_kernel(name, "AutocastCUDA")
    }
    treated.discard("_cudnn_rnn")  # where PyTorch was built with cuDNN
    assert sum(map(len, LISTS)) == len(treated)
    assert frozenset().union(*LISTS) == treated


@pytest.fixture
def entries() -> Iterator[Any]:
    """PyTorch's lists of calls, on the GPU that is not there."""
    pytest.importorskip("expecttest")
    from torch.testing._internal.autocast_test_lists import AutocastTestLists

    with make_fake_mode(), AnswerCudnn(), Recorder(CUDA), lower_functions(CUDA):
        yield AutocastTestLists("cuda")


class AnswerCudnn(TorchDispatchMode):
    """Answers operators that have no fake kernel with a tensor like their input."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("aten::cudnn_convolution"):
            assert args[0].dtype == args[1].dtype
            return args[0].new_empty(1)
        return func(*args, **(kwargs or {}))


NAMESPACES = {"nn": torch._C._nn, "linalg": torch._C._linalg}


def check(entries: Any, name: str, expected: torch.dtype | None, dtype: torch.dtype) -> int:
    """Runs a list's calls, as functions and as methods; returns how many there were."""
    count = 0
    for operator, args, *rest in getattr(entries, name):
        keywords = rest[0] if rest and isinstance(rest[0], dict) else {}
        if rest and isinstance(rest[0], torch.dtype):
            expected = rest[0]
        if operator == "equal" or (rest and isinstance(rest[0], tuple)):
            continue  # asks for values; the entry of einsum, which is no call
        namespace = NAMESPACES.get(name.split("_")[0], torch)
        owners = [o for o in (namespace, Tensor) if hasattr(o, operator)]
        if "methods" in name:
            owners = owners[-1:]
        for owner in owners:
            if owner is Tensor and not isinstance(args[0], Tensor):
                continue
            with torch.autocast("cuda", dtype=dtype):
                result = getattr(owner, operator)(*args, **keywords)
            dtypes = {leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
            assert dtypes == {expected}, (operator, dtypes)
            count += 1
    return count


LOWER = ("torch_fp16", "nn_fp16", "linalg_fp16", "methods_fp16")
FLOAT = ("torch_fp32", "nn_fp32", "methods_fp32")


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*LOWER, *FLOAT])
def test_result_types(entries: Any, name: str, dtype: torch.dtype) -> None:
    assert check(entries, name, dtype if name in LOWER else torch.float32, dtype)


@pytest.mark.filterwarnings("ignore:Using torch.cross without")
def test_promotion(entries: Any) -> None:
    assert check(entries, "torch_need_autocast_promote", torch.float32, torch.float16)
    for kind in ("torch", "methods"):
        assert check(entries, f"{kind}_expect_builtin_promote", None, torch.float16)


def test_banned(entries: Any) -> None:
    for name, args, namespace in entries.banned:
        unsafe = pytest.raises(RuntimeError, match="unsafe to auto")
        with torch.autocast("cuda", dtype=torch.float16), unsafe:
            getattr(namespace, name)(*args)
