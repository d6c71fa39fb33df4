"""The gradient scaler of a float16 step: what it allocates, and that the optimizer steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxmem.lowering.cuda import CUDA
from fxmem.lowering.cuda.grad_scaler import GradScaler
from fxmem.lowering.cuda.target import is_on_gpu
from fxmem.lowering.functions import lower_functions
from fxmem.tracing.fakes import make_fake_mode

aten = torch.ops.aten


class Watch(TorchDispatchMode):
    """Notes operators that return new tensors, with their type."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in given:
                assert is_on_gpu(leaf)
                name = func.overloadpacket.__name__
                self.made.append(f"{name} {str(leaf.dtype).removeprefix('torch.')}")
        return result


def test_what_a_step_allocates() -> None:
    """Line by line of ``torch/amp/grad_scaler.py``; each is a scalar."""
    steps: list[int] = []
    with make_fake_mode(), lower_functions(CUDA):
        model, scaler = nn.Linear(8, 4, device="cuda"), GradScaler()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: steps.append(len(steps)))
        assert scaler.is_enabled() and scaler.state_tensors == ()
        for step in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.empty(2, 8, device="cuda")).sum()
            with Watch() as scale:
                scaled = scaler.scale(loss)
            scaled.backward()
            with Watch() as unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            with Watch() as update:
                scaler.update()
            first = [] if step else ["full float32", "full int32"]
            assert scale.made == [*first, "mul float32"]
            # The inverse through float64, found_inf, and a copy of both for the device.
            assert unscale.made == [
                *("_to_copy float64", "reciprocal float64", "_to_copy float32"),
                *("full float32", "_to_copy float32", "_to_copy float32"),
            ]
            assert update.made == []
        assert [t.dtype for t in scaler.state_tensors] == [torch.float32, torch.int32]
    assert steps == [0, 1]


def test_gradients_in_float16_are_refused() -> None:
    with make_fake_mode(), lower_functions(CUDA):
        model, scaler = nn.Linear(8, 4, device="cuda", dtype=torch.float16), GradScaler()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.empty(2, 8, device="cuda", dtype=torch.float16)
        scaler.scale(model(x).sum()).backward()
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.step(optimizer)


def test_pytorch_is_as_before() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not torch.amp.GradScaler("cuda").is_enabled()
