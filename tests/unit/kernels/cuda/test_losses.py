"""Losses on CUDA, against ``Loss.cpp``, ``Loss.cu``, ``NLLLoss2d.cu`` and ``LossCTC.cu``."""

from __future__ import annotations

import pytest
import torch
from cuda_steps import estimate, made, run_kernel, run_step, saved
from torch import Tensor, nn

from fxmem.graph import Phase

aten = torch.ops.aten
F = nn.functional
NONE, MEAN = 0, 1


@pytest.mark.parametrize("operator", [aten.mse_loss, aten.smooth_l1_loss])
def test_a_scalar_in_a_storage_for_all_elements(operator: object, gpu: None) -> None:
    x = torch.empty(8, 4)
    result, nbytes = run_kernel(operator.default, x, x)  # type: ignore[attr-defined]
    # meta: the output takes the size of all and is resized; beside it, the losses.
    assert result.untyped_storage().nbytes() == 128 and nbytes == 128
    result, nbytes = run_kernel(operator.default, x, x, NONE)  # type: ignore[attr-defined]
    assert result.shape == (8, 4) and nbytes == 0


def test_the_mean_of_many_takes_a_reduction(gpu: None) -> None:
    x = torch.empty(1024, 1024)
    # 2^20 elements: 512 threads with vectors of 4, 128 blocks (test_reduction).
    assert estimate(aten.mse_loss.default, x, x) == (4 << 20) + 128 * 4 + 4
    assert estimate(aten.huber_loss.default, x, x) == (4 << 20) + 128 * 4 + 4


def test_binary_cross_entropy(gpu: None) -> None:
    x, weights = torch.empty(8, 4), torch.empty(4)
    result, nbytes = run_kernel(aten.binary_cross_entropy.default, x, x)
    assert result.untyped_storage().nbytes() == 128 and nbytes == 4  # the scalar that is copied
    with_logits = aten.binary_cross_entropy_with_logits.default
    assert estimate(with_logits, x, x) == 256  # log_sigmoid and the loss
    assert estimate(with_logits, x, x, None, None, NONE) == 128
    # pos_weight - 1, its product with the target, and log_sigmoid.
    assert estimate(with_logits, x, x, None, weights) == 256 + 16 - 4


def test_cross_entropy_saves_probabilities_and_a_total() -> None:
    target = torch.zeros(6, dtype=torch.int64)
    logits = torch.zeros(6, 10, requires_grad=True)
    graph = run_step(F.cross_entropy, logits, target)
    assert saved(graph) == [((6, 10), "float32"), ((), "float32")]
    assert made(graph) == [("_log_softmax", 240), ("nll_loss_forward", 8)]
    assert made(graph, Phase.BACKWARD)[-2:] == [
        ("nll_loss_backward", 240),
        ("_log_softmax_backward_data", 240),
    ]


def test_operands_of_the_negative_log_likelihood_are_dense(gpu: None) -> None:
    x, target = torch.empty(10, 6).t(), torch.empty(6, dtype=torch.int64)
    assert estimate(aten.nll_loss_forward.default, x, target, None, MEAN, -100) == 240
    assert estimate(aten.nll_loss_forward.default, x, target, None, NONE, -100) == 0
    image = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    labels = torch.empty(2, 4, 4, dtype=torch.int64).transpose(1, 2)
    args = (image, labels, None)
    assert estimate(aten.nll_loss2d_forward.default, *args, MEAN, -100) == 96 * 4 + 32 * 8


def test_connectionist_temporal_classification(gpu: None) -> None:
    log_probs, targets = torch.empty(50, 4, 20), torch.empty(4, 10, dtype=torch.int64)
    lengths = ([50] * 4, [10] * 4)
    (loss, alpha), nbytes = run_kernel(aten._ctc_loss.default, log_probs, targets, *lengths)
    assert alpha.shape == (4, 50, 21) and loss.shape == (4,)
    assert nbytes == 3 * 8 * 4  # lengths and offsets
    args = (loss, log_probs, targets, *lengths, loss, alpha, 0)
    inside = 4 * 50 * 21 * 4 + 3 * 8 * 4
    assert estimate(aten._ctc_loss_backward.default, *args) == inside
    # A mask of losses, a zero, and the gradient once more.
    expected = inside + 4 + 4 + 50 * 4 * 20 * 4
    assert estimate(aten._ctc_loss_backward.default, *args, True) == expected


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("tensors", [False, True])
def test_a_step_with_ctc(tensors: bool, reduction: str) -> None:
    def function(x: Tensor, targets: Tensor, *lengths: Tensor) -> Tensor:
        inputs, outputs = lengths or ((50,) * 4, (10,) * 4)
        return F.ctc_loss(x.log_softmax(-1), targets, inputs, outputs, reduction=reduction)

    targets, length = torch.ones(4, 10, dtype=torch.int64), torch.full((4,), 10)
    x = torch.zeros(50, 4, 20, requires_grad=True)
    graph = run_step(function, x, targets, *[5 * length, length][: 2 * tensors])
    assert ((4, 50, 21), "float32") in saved(graph)
