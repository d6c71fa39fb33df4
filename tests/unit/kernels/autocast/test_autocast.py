"""CUDA's autocast: its state, its reach, how long casts live, and that nothing of it stays."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_steps import lower_for_cuda
from running import Runs
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxmem import analyze
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.kernels.autocast import lists
from fxmem.kernels.autocast.dispatch import lower_autocast
from fxmem.kernels.autocast.policies import find_policies
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.gpu import GPU_DEVICE
from fxmem.recording.recorder import Recorder

pytestmark = pytest.mark.usefixtures("shown_gpu")  # else autocast stays off

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def x() -> Iterator[Tensor]:
    """A float32 tensor on the GPU that is not there."""
    with make_fake_mode(), lower_for_cuda():
        yield torch.empty(8, 8, device="cuda")


def test_it_is_off_until_the_step_turns_it_on(x: Tensor) -> None:
    assert torch.mm(x, x).dtype == FP32
    with torch.autocast("cuda"):
        assert torch.mm(x, x).dtype == FP16
        with torch.autocast(device_type=x.device.type, dtype=BF16):
            assert torch.mm(x, x).dtype == BF16
            assert x.exp().dtype == x.bfloat16().exp().dtype == FP32
            assert (x.bfloat16() + 1).dtype == BF16
    assert torch.mm(x, x).dtype == FP32


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(
    ("run", "expected"),
    [
        # composites, through what they call
        (lambda x: functional.cross_entropy(x, x.argmax(1)), FP32),
        (lambda x: functional.conv2d(x[None, None], x[None, None, :3, :3], padding="same"), None),
        # out= and in-place variants run on what they are given
        (lambda x: torch.mm(x, x, out=torch.empty_like(x)), FP32),
        (lambda x: x.half().exp_(), FP16),
        # a dtype that is named
        (lambda x: x.softmax(0, dtype=FP16), FP16),
        (lambda x: x.half().norm(dim=0, keepdim=True), FP32),
        # neither float64 nor integers are cast
        (lambda x: x.double() @ x.double(), torch.float64),
        (lambda x: x.double().norm(), torch.float64),
        (lambda x: x.double().sum(), torch.float64),
        (lambda x: x.int().sum(), torch.int64),
        (lambda x: torch.dot(x[0].double(), x[0].double()), torch.float64),
    ],
)
def test_result_types(x: Tensor, run: Any, expected: Any, dtype: torch.dtype) -> None:
    """As listed on pytorch.org/docs/stable/amp.html; None is autocast's dtype."""
    with torch.autocast("cuda", dtype=dtype):
        assert run(x).dtype == (expected or dtype)


def test_the_host_has_its_own_autocast(x: Tensor) -> None:
    host = torch.empty(8, 8)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.mm(host, host).dtype == BF16
        assert torch.mm(x, x).dtype == FP32
        with torch.autocast("cuda", dtype=FP16), torch.autocast("cpu", enabled=False):
            assert torch.mm(host, host).dtype == FP32
            assert host.bfloat16().exp().dtype == host.bfloat16().norm().dtype == BF16
            assert functional.binary_cross_entropy(host, host).dtype == FP32
            assert torch.mm(x, x).dtype == FP16


class Squared(torch.autograd.Function):
    """Notes in which types its parts run."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        seen.append((x @ x).dtype)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        seen.append((x @ x).dtype)
        return grad * x


class CastSquared(Squared):
    """Asks for float32."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=FP32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return Squared.forward.__wrapped__(ctx, x)


seen: list[torch.dtype] = []


@pytest.mark.parametrize(
    ("function", "types"), [(Squared, [FP16, FP16]), (CastSquared, [FP32, FP32, FP32])]
)
def test_functions_of_the_user(x: Tensor, function: Any, types: list[torch.dtype]) -> None:
    seen.clear()
    with torch.autocast("cuda", dtype=FP16):
        result = function.apply(x.half().requires_grad_())
    result.sum().backward()
    assert seen == types


@torch.library.custom_op("fxmem_test::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


torch.library.register_autocast("fxmem_test::double", "cuda", FP16)


def test_operators_of_the_user(x: Tensor) -> None:
    assert double(x).dtype == FP32
    with torch.autocast("cuda", dtype=FP16):
        assert double(x).dtype == torch.ops.fxmem_test.double(x).dtype == FP16
        assert double(torch.empty(2)).dtype == FP32


def test_casts_of_weights_live_until_the_outermost_autocast_ends(x: Tensor) -> None:
    fc = torch.empty(8, 4, device="cuda", requires_grad=True)
    found = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == fc.shape:
            found.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def multiply() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            torch.mm(x.detach().requires_grad_(), fc)

    with torch.autocast("cuda", dtype=BF16):
        with torch.autocast("cuda", dtype=BF16), torch.no_grad():
            torch.mm(x, fc)
        multiply()
        with torch.autocast("cuda", enabled=False):
            torch.mm(x, fc)
        multiply()
        assert found[0]()._cdata == found[1]()._cdata
    assert found[0]() is found[1]() is None


# -- In a step --


def test_what_a_step_saves() -> None:
    def run(model: Any, x: Tensor) -> Any:
        with torch.autocast("cuda", dtype=BF16):
            return model.down(model.up(x).relu()).float()

    model = Runs(run, up=nn.Linear(8, 32, bias=False), down=nn.Linear(32, 4, bias=False))
    analysis = analyze(model, ("16x8",), device="cuda")
    # mm: its input, cast, and the second one's weight, cast and transposed (the input of the
    # model needs no gradient); relu: its result, which is the second product's input.
    found = sorted((s.shape, s.dtype) for s in analysis.saved)
    assert found == [((16, 8), "bfloat16"), ((16, 32), "bfloat16"), ((32, 4), "bfloat16")]


DECORATED = """
import torch

class Model(torch.nn.Linear):
    @torch.autocast("cuda", dtype=torch.bfloat16)
    def forward(self, x):
        return super().forward(x)
"""


def test_a_decorated_function_is_believed_when_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "decorated.py"
    path.write_text(DECORATED)
    analysis = analyze(f"{path}:Model(8, 4)", ("16x8",), device="cuda")
    assert [(s.shape, s.dtype) for s in analysis.saved] == [((16, 8), "bfloat16")]


@pytest.mark.parametrize(("autocast", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_a_step_may_be_autocast_as_a_whole(autocast: str, dtype: str) -> None:
    analysis = analyze(nn.Linear(8, 4), ("16x8",), device="cuda", autocast=autocast)
    saved = [(s.shape, s.dtype) for s in analysis.saved]
    assert saved[0] == ((16, 8), dtype)
    # The scale of float16, by which backward multiplies the loss's gradient.
    assert saved[1:] == ([((), "float32")] if autocast == "fp16" else [])


def test_nothing_stays() -> None:
    def look() -> tuple[Any, ...]:
        return (
            *(torch._C._dispatch_dump(operator.name()) for operator in find_policies()),
            torch._C._dispatch_tls_local_include_set(),
            torch._C._dispatch_tls_local_exclude_set(),
            torch.clear_autocast_cache,
            torch.cuda.is_bf16_supported,
            torch.cuda.amp.common.amp_definitely_not_available,
            torch.get_autocast_dtype("cuda"),
            torch.is_autocast_cache_enabled(),
            torch.autocast_increment_nesting() - torch.autocast_decrement_nesting(),
            torch.autocast_increment_nesting(),
            torch.autocast_decrement_nesting(),
        )

    before = look()
    with make_fake_mode(), pytest.raises(ZeroDivisionError), lower_autocast():
        x = torch.empty(8, 8, device=GPU_DEVICE)
        torch.autocast("cuda", dtype=BF16, cache_enabled=False).__enter__()  # and is not left
        assert torch.mm(x, x).dtype == BF16
        assert look() != before
        raise ZeroDivisionError
    assert look() == before


def test_other_threads_keep_their_kernels() -> None:
    """Calls what a thread with a real GPU would."""
    results = []

    def multiply() -> None:
        kernel = torch.library.get_kernel(torch.ops.aten.mm.default, "AutocastCUDA")
        ones = torch.ones(2, 2)
        results.append(kernel.call_boxed(torch._C._dispatch_keys(ones), ones, ones))

    with lower_autocast():
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
    assert torch.equal(results[0], torch.full((2, 2), 2.0))


# -- The operators that are treated, against PyTorch's kernels and its own test's lists --

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
    """PyTorch's lists of calls, on the GPU."""
    pytest.importorskip("expecttest")
    from torch.testing._internal.autocast_test_lists import AutocastTestLists

    with make_fake_mode(), AnswerCudnn(), Recorder(CUDA), lower_for_cuda():
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
def test_lists_of_calls(entries: Any, name: str, dtype: torch.dtype) -> None:
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
