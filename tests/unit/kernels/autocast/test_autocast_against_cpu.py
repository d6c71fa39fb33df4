"""The casts of a step, against a real one under ``torch.autocast("cpu")``.

PyTorch runs both autocasts by the same templates, and their lists agree on the operators here: what
is cast, when, once or again, what autograd saves of it and what backward makes of it must be equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_steps import Watch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fxmem.fakes.devices import translate_devices
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.kernels.autocast.dispatch import lower_autocast
from fxmem.kernels.cuda.gpu import GPU_DEVICE

pytestmark = pytest.mark.usefixtures("shown_gpu")  # else autocast stays off

BF16 = torch.bfloat16
Autocast = Callable[..., contextlib.AbstractContextManager[Any]]


def describe(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Lists an operator with shapes and types of its results."""
    if func is torch.ops.prim.device.default:
        return None
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return func, *[(tuple(t.shape), t.dtype) for t in leaves]


def record(run: Any, make: Callable[..., Tensor], autocast: Autocast) -> Any:
    """Operators of a step, saved tensors with the number of their storage, and gradients."""
    saved, storages = [], {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        number = storages.setdefault(storage._cdata, (len(storages), storage))[0]
        saved.append((tuple(tensor.shape), tensor.dtype, number))
        return tensor

    with (
        Watch(describe) as watch,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        x, parameters = make(4, 8), [make(8, 8).requires_grad_() for _ in range(3)]
        loss = run(autocast, x, *parameters)
        if loss.requires_grad:
            loss.backward()
    gradients = [None if p.grad is None else (p.grad.shape, p.grad.dtype) for p in parameters]
    return watch.calls, saved, gradients


def use_twice(autocast: Autocast, x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    with autocast(dtype=BF16):
        y = functional.linear(functional.linear(x, u), u, bias=v[0])
        return (torch.mm(y, v.t()) + torch.mm(y, w) @ w).float().sum()


def use_others_twice(autocast: Autocast, x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        view = u[:].requires_grad_()  # a leaf, but a view
    detached, computed, constant = v.detach().requires_grad_(), w * 2, w.detach()
    with autocast(dtype=BF16):
        y = x @ view @ view @ detached @ detached
        return (y @ computed @ computed @ constant @ constant).float().sum()


def use_without_keeping(autocast: Autocast, x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    with autocast(dtype=BF16, cache_enabled=False):
        return (x @ u @ u @ v.detach() @ v).float().sum()


def use_in_turns(autocast: Autocast, x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    with autocast(dtype=BF16):
        with torch.no_grad():
            torch.mm(x, u)
        with autocast(dtype=BF16):
            y = x @ u @ v
        with autocast(enabled=False):
            z = x @ u
        y = y @ v @ u
    with autocast(dtype=BF16):
        y = y @ v
        torch.clear_autocast_cache()
        return (y @ v).float().sum() + z.sum()


def use_half(autocast: Autocast, x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    with autocast(dtype=torch.float16):
        return (x.half() @ u @ v.double().float() @ w).sum(dtype=torch.float32)


def infer(autocast: Autocast, x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    with torch.inference_mode(), autocast(dtype=BF16):
        y = x @ u @ u
    with torch.no_grad(), autocast(dtype=BF16):
        return (y.clone() @ u @ u).float().sum()


def convolve(autocast: Autocast, x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    with autocast(dtype=BF16):
        y = functional.conv1d(x[None], u[:, :4, None], v[0])
        y = functional.conv2d(y[None], u[None, None, :3, :3], stride=2)
        y = functional.conv_transpose2d(y, u[None, None, :3, :3])
        y = functional.prelu(y, v[0, :1])
        y = functional.conv3d(y[None], u[None, None, None, :1, :1])
        return functional.mse_loss(y, torch.zeros_like(y))


def lose(autocast: Autocast, x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    with autocast(dtype=BF16):
        y = functional.binary_cross_entropy_with_logits(x @ u, x.sigmoid(), pos_weight=x[0, :1])
        z = functional.kl_div(x @ v, x @ w)
        a = functional.huber_loss(x @ v, x.bfloat16())
        b = functional.margin_ranking_loss(x @ v, x @ u, x.sign())
        return y + z + a + b + functional.l1_loss(torch.addmm(u, u, v), v)


def recompute(autocast: Autocast, x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    with autocast(dtype=BF16):
        y = x @ w
        for reentrant in (False, True):
            y = checkpoint(lambda y: (y @ u @ v).sin(), y, use_reentrant=reentrant)
        return (y @ v).float().sum()


STEPS = (use_twice, use_others_twice, use_without_keeping, use_in_turns, use_half, infer)


@pytest.mark.parametrize("run", [*STEPS, convolve, lose, recompute])
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_the_casts_are_those_of_a_real_step(run: Any) -> None:
    def make_real(*size: int) -> Tensor:
        return torch.rand(*size)

    def make_fake(*size: int) -> Tensor:
        return torch.rand(*size, device="cuda")

    real = record(run, make_real, lambda **kwargs: torch.autocast("cpu", **kwargs))
    with make_fake_mode(), translate_devices(GPU_DEVICE), lower_autocast():
        fake = record(run, make_fake, lambda **kwargs: torch.autocast("cuda", **kwargs))
    for expected, found in zip(real, fake, strict=True):
        assert found == expected
    assert any(func is torch.ops.aten._to_copy.default for func, *_ in real[0])
