"""Softmax, dropout and elementwise operators on CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_steps import made, make_buffers_test, run_step, saved
from torch import Tensor, nn

from fxmem.graph import Phase

F = nn.functional
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TAIL = (-1, F32)
e = torch.empty


def square() -> Tensor:
    return torch.empty(8, 8)


def spread() -> Tensor:
    return torch.empty(1).expand(8, 8)


def leaf(*sizes: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.zeros(sizes or (4, 6), dtype=dtype, requires_grad=True)


BUFFERS = [
    # Distributions.cpp, _s_dirichlet_cuda: the sum of each row; binomial and gradients have none.
    ("_sample_dirichlet", lambda: (square(),), 8 * 4),
    ("_dirichlet_grad", lambda: (square(), square(), square()), 0),
    ("binomial", lambda: (square(), square()), 0),
    # SoftMax.cu, host_softmax and host_softmax_backward: dense operands; grad * output.
    ("_softmax", lambda: (square(), -1, False), 0),
    ("_softmax", lambda: (square().t(), -1, False), 256),
    ("_softmax_backward_data", lambda: (square(), square(), *TAIL), 256),
    ("_softmax_backward_data", lambda: (square().t(), square(), *TAIL), 512),  # as grad lies
    ("_softmax_backward_data", lambda: (spread(), square(), *TAIL), 256),
    ("_log_softmax_backward_data", lambda: (square(), square(), *TAIL), 0),
    ("_log_softmax_backward_data", lambda: (spread(), square(), *TAIL), 256),
    # DistanceKernel.cu: what each of 5 x 7 pairs contributes to 3 elements.
    ("_cdist_backward", lambda: (e(5, 7), e(5, 3), e(7, 3), 1.0, e(5, 7)), 5 * 7 * 3 * 4),
    # ForeachReduceOp.cu: chunks of 65536, as many for each tensor as the largest has.
    ("_foreach_norm.Scalar", lambda: ([e(200000), e(10)], 2), 2 * 4 * 4),
    # TensorTransformations.cu, roll_cuda: what was rolled first, or a dense input.
    ("roll", lambda: (e(2, 8, 8, 3), [1], [1]), 0),
    ("roll", lambda: (e(2, 8, 8, 3), [1, 1], [1, 2]), 384 * 4),
    ("roll", lambda: (e(2, 8, 8, 3).transpose(1, 2), [1], [1]), 384 * 4),
]
test_buffers = make_buffers_test(BUFFERS)


def dropout_in_place(x: Tensor) -> Tensor:
    return F.dropout(x * 1, 0.1, inplace=True)


def autocast_softmax(x: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=F16):
        return x.softmax(-1)


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        # SoftMax.cpp: the kernel casts float16 to float32, and no other.
        (lambda x: F.softmax(x, -1, dtype=F32), leaf(dtype=F16), [("_softmax", 96)]),
        (lambda x: x.softmax(-1, F32), leaf(dtype=F16), [("_softmax", 96)]),
        (lambda x: F.log_softmax(x, -1, dtype=F32), leaf(dtype=F16), [("_log_softmax", 96)]),
        (autocast_softmax, leaf(dtype=F16), [("_softmax", 96)]),
        (autocast_softmax, leaf(dtype=BF16), [("_to_copy", 96), ("_softmax", 96)]),
        # Dropout.cu: the result, and a mask of bytes.
        (nn.Dropout(0.1), leaf(), [("native_dropout", 24 * 4 + 24)]),
        (lambda x: torch.dropout(x, 0.5, True), leaf(dtype=F64), [("native_dropout", 24 * 9)]),
        (F.dropout, leaf(dtype=BF16), [("native_dropout", 24 * 3)]),
        # _dropout_impl: noise of the input's type in place, and for whole channels; nothing drawn.
        (dropout_in_place, leaf(), [("mul", 96), ("empty_like", 96)]),
        (nn.Dropout2d(0.1), leaf(2, 3, 4, 4), [("new_empty", 24), ("mul", 384)]),
        (nn.AlphaDropout(0.1), leaf(), [("empty_like", 96), ("add", 96), ("mul", 96)]),
        (lambda x: torch.dropout(x, 0.0, True), leaf(), []),
        (lambda x: torch.dropout(x, 1.0, True), leaf(), [("zeros", 4), ("mul", 96)]),
        # The host has the kernels of the CPU.
        (lambda x: x + F.dropout(torch.ones(())).to(x.device), leaf(), None),
        # Activation.cpp, log_sigmoid_forward_cuda: no buffer.
        (F.logsigmoid, leaf(), [("log_sigmoid_forward", 96)]),
    ],
)
def test_what_a_step_makes(
    function: Callable[[Tensor], Tensor], x: Tensor, expected: list[tuple[str, int]] | None
) -> None:
    found = [what for what in made(run_step(function, x)) if what[0] != "view"]
    if expected is None:
        assert "native_dropout" not in dict(found)
    else:
        assert found == expected


def test_a_half_softmax_s_gradient() -> None:
    # Of half precision, beside a product of floats.
    graph = run_step(lambda x: F.softmax(x, -1, dtype=F32), leaf(dtype=F16))
    assert saved(graph) == [((4, 6), "float32")]
    assert made(graph, Phase.BACKWARD)[-1][1] == 48 + 96


def test_a_mask_is_dropped_in_inference_and_has_the_input_s_format() -> None:
    x = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    formats = []

    def function(x: Tensor) -> Tensor:
        result = F.dropout(x)
        formats.append(result.is_contiguous(memory_format=torch.channels_last))
        return result

    graph = run_step(function, x, mode="infer")
    mask = next(storage for storage in graph.storages if storage.dtype == "bool")
    assert mask.died is not None and all(formats)
