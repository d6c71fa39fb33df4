"""Losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saved_sets.row import Row, index, leaf

F = nn.functional


def _ctc(x: Tensor, targets: Tensor) -> Tensor:
    return F.ctc_loss(x, targets, (12, 12), (4, 5), reduction="sum")


def _ctc_tensors(x: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    return F.ctc_loss(x, targets, steps, lengths, reduction="none")


_PAIR = (leaf(4, 6), torch.zeros(4, 6))

ROWS = (
    # nll_loss_forward: self, target, weight and total_weight, a scalar; cross entropy's self is
    # the result of log_softmax, which that saves as well.
    Row(
        "nll loss",
        F.nll_loss,
        (leaf(8, 10), index(8)),
        ("input 0", "input 1", ":float32"),
    ),
    Row(
        "nll loss with weights",
        lambda x, y, weight: F.nll_loss(x, y, weight),
        (leaf(8, 10), index(8), torch.zeros(10)),
        ("input 0", "input 1", "input 2", ":float32"),
    ),
    Row(
        "nll loss 2d",
        F.nll_loss,
        (leaf(2, 10, 4, 4), index(2, 4, 4)),
        ("input 0", "input 1", ":float32"),
    ),
    Row(
        "cross entropy",
        F.cross_entropy,
        (leaf(8, 10), index(8)),
        ("8x10:float32", "input 1", ":float32"),
    ),
    Row(
        "cross entropy 2d",
        F.cross_entropy,
        (leaf(2, 10, 4, 4), index(2, 4, 4)),
        ("2x10x4x4:float32", "input 1", ":float32"),
    ),
    Row(
        "cross entropy bf16",
        F.cross_entropy,
        (leaf(8, 10, dtype=torch.bfloat16), index(8)),
        ("8x10:bfloat16", "input 1", ":bfloat16"),
    ),
    # Self and target of each; those that are also made for the target's gradient save no more.
    Row("mse loss", F.mse_loss, _PAIR, ("input 0", "input 1")),
    Row("smooth l1 loss", F.smooth_l1_loss, _PAIR, ("input 0", "input 1")),
    Row("huber loss", F.huber_loss, _PAIR, ("input 0", "input 1")),
    Row("binary cross entropy", F.binary_cross_entropy, _PAIR, ("input 0", "input 1")),
    Row(
        "binary cross entropy with logits",
        F.binary_cross_entropy_with_logits,
        _PAIR,
        ("input 0", "input 1"),
    ),
    # multi_margin_loss: self, target, weight; multilabel_margin_loss_forward: self, target and
    # is_target, of the input's type (cuda/MultiLabelMarginCriterion.cu).
    Row("multi margin loss", F.multi_margin_loss, (leaf(8, 10), index(8)), ("input 0", "input 1")),
    Row(
        "multilabel margin loss",
        F.multilabel_margin_loss,
        (leaf(8, 10), index(8, 10)),
        ("input 0", "input 1", "8x10:float32"),
    ),
    Row("soft margin loss", F.soft_margin_loss, _PAIR, ("input 0", "input 1")),
    # _ctc_loss: log_probs, targets, result0 (a loss each) and result1, log_alpha, of sizes
    # (batch, steps, 2 * longest target + 1) (cuda/LossCTC.cu, ctc_loss_gpu_template).
    Row(
        "ctc loss",
        _ctc,
        (leaf(12, 2, 7), index(2, 6)),
        ("input 0", "input 1", "2:float32", "2x12x11:float32"),
    ),
    # ctc_loss_tensor: the lengths are saved; those of targets in rows are not looked at, and the
    # longest is as long as a row (6 of them).
    Row(
        "ctc loss with tensors of lengths",
        _ctc_tensors,
        (leaf(12, 2, 7), index(2, 6), index(2), index(2)),
        ("input 0", "input 1", "input 2", "input 3", "2:float32", "2x12x13:float32"),
    ),
)
