"""CUDA's autocast on fake tensors: its state, its reach, and how long casts live."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fxmem.kernels.cuda import CUDA
from fxmem.kernels.functions import lower_functions
from fxmem.tracing.fakes import make_fake_mode

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
aten = torch.ops.aten


@pytest.fixture
def x() -> Iterator[Tensor]:
    """A float32 tensor on the GPU that is not there."""
    with make_fake_mode(), lower_functions(CUDA):
        yield torch.empty(8, 8, device="cuda")


def test_it_is_off_until_the_step_turns_it_on(x: Tensor) -> None:
    assert torch.mm(x, x).dtype == FP32
    with torch.autocast("cuda", dtype=BF16):
        assert torch.mm(x, x).dtype == BF16
        assert x.exp().dtype == x.bfloat16().exp().dtype == FP32
        assert (x.bfloat16() + 1).dtype == BF16
    assert torch.mm(x, x).dtype == FP32


def test_float16_unless_a_dtype_is_named(x: Tensor) -> None:
    with torch.autocast("cuda"):
        assert torch.mm(x, x).dtype == FP16
    with torch.autocast(device_type=x.device.type, dtype=BF16):
        assert torch.mm(x, x).dtype == BF16


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


def test_the_host_is_left_alone(x: Tensor) -> None:
    host = torch.empty(8, 8)
    with torch.autocast("cuda", dtype=BF16):
        assert torch.mm(host, host).dtype == FP32
        assert host.bfloat16().exp().dtype == host.bfloat16().norm().dtype == BF16
        assert functional.binary_cross_entropy(host, host).dtype == FP32


def test_the_host_has_its_own_autocast(x: Tensor) -> None:
    host = torch.empty(8, 8)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.mm(host, host).dtype == BF16
        assert torch.mm(x, x).dtype == FP32
        with torch.autocast("cuda", dtype=FP16):
            assert torch.mm(host, host).dtype == BF16
            assert torch.mm(x, x).dtype == FP16
            with torch.autocast("cpu", enabled=False):
                assert torch.mm(host, host).dtype == FP32
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


def test_a_recomputation_runs_as_the_forward_did(x: Tensor) -> None:
    types: list[torch.dtype] = []

    def block(x: Tensor) -> Tensor:
        y = x @ x
        types.append(y.dtype)
        return y.sin()

    for reentrant in (False, True):
        with torch.autocast("cuda", dtype=BF16):
            loss = checkpoint(block, x.requires_grad_(), use_reentrant=reentrant).sum()
        loss.backward()
    assert types == [BF16] * 4


def weight() -> Tensor:
    return torch.empty(8, 4, device="cuda", requires_grad=True)


def test_casts_of_weights_live_until_the_outermost_autocast_ends(x: Tensor) -> None:
    fc = weight()
    with torch.autocast("cuda", dtype=BF16):
        with torch.autocast("cuda", dtype=BF16), torch.no_grad():
            torch.mm(x, fc)
        found = saved_by(x, fc)
        with torch.autocast("cuda", enabled=False):
            torch.mm(x, fc)
        again = saved_by(x, fc)
        assert again()._cdata == found()._cdata
    assert found() is again() is None


def saved_by(x: Tensor, fc: Tensor) -> Any:
    """A weak reference to the storage of the cast weight that a product saves."""
    references = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == fc.shape:
            references.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.mm(x.detach().requires_grad_(), fc)
    (reference,) = references
    return reference


def test_weighted_logits_are_cast_before_they_are_saved(x: Tensor) -> None:
    saved = []
    with (
        torch.autocast("cuda", dtype=FP16),
        torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor),
    ):
        functional.binary_cross_entropy_with_logits(
            x.half().requires_grad_(), x.half(), pos_weight=x[0]
        )
    assert [tensor.dtype for tensor in saved] == [FP32] * 3
