"""Assignment of boxes to anchors by how well class and place agree, as detectors train with."""

from __future__ import annotations

import torch
from torch import Tensor

import fxmem
from benchmarks.published.cases import Case

ANCHORS, TOP, STRIDE = 8400, 10, 8
"""Of images of 640x640, with strides of 8, 16 and 32; candidates of a box; the least width."""
INSIDE = 0.001
"""Share of pairs of an anchor and a box in which the anchor lies in the box, as was assumed."""


def find_inside(points: Tensor, boxes: Tensor, mask: Tensor, compares: bool) -> Tensor:
    """Finds the anchors in each box: by comparisons, or by the least distance to its sides."""
    low, high = boxes.chunk(2, -1)
    center, size = (low + high) / 2, high - low
    size = torch.where(((size < STRIDE) * mask).bool(), 16.0, size)
    boxes = torch.cat((center - size / 2, center + size / 2), -1)
    if compares:
        low, high = boxes.unsqueeze(2).chunk(2, 3)
        return ((points - low > 0) & (high - points > 0)).all(3)
    low, high = boxes.view(-1, 1, 4).chunk(2, 2)
    distances = torch.cat((points[None] - low, high - points[None]), dim=2)
    return distances.view(*boxes.shape[:2], len(points), -1).amin(3).gt_(0)


def measure_boxes(
    scores: Tensor, predicted: Tensor, labels: Tensor, boxes: Tensor, pairs: Tensor
) -> tuple[Tensor, Tensor]:
    """Measures how well class and place of anchors in boxes agree, and how much they overlap."""
    batch, count, anchors = pairs.shape
    pairs = pairs.bool()
    overlaps = torch.zeros([batch, count, anchors], device=scores.device)
    own = torch.zeros([batch, count, anchors], device=scores.device)
    index = torch.zeros([2, batch, count], dtype=torch.long)
    index[0] = torch.arange(batch).view(-1, 1).expand(-1, count)
    index[1] = labels.squeeze(-1)
    own[pairs] = scores[index[0], :, index[1]][pairs]
    left = predicted.unsqueeze(1).expand(-1, count, -1, -1)[pairs]
    right = boxes.unsqueeze(2).expand(-1, -1, anchors, -1)[pairs]
    shared = torch.minimum(left[:, 2:], right[:, 2:]) - torch.maximum(left[:, :2], right[:, :2])
    area = shared.clamp_(0).prod(-1)
    both = (left[:, 2:] - left[:, :2]).prod(-1) + (right[:, 2:] - right[:, :2]).prod(-1)
    overlaps[pairs] = area / (both - area)
    return own.pow(0.5) * overlaps.pow(6.0), overlaps


def choose_candidates(metric: Tensor, mask: Tensor) -> Tensor:
    """Chooses the anchors of each box that agree best."""
    chosen = torch.topk(metric, TOP, dim=-1).indices
    chosen.masked_fill_(~mask.expand(-1, -1, TOP).bool(), 0)
    counts = torch.zeros(metric.shape, dtype=torch.int8, device=metric.device)
    ones = torch.ones_like(chosen[:, :, :1], dtype=torch.int8)
    for rank in range(TOP):
        counts.scatter_add_(-1, chosen[:, :, rank : rank + 1], ones)
    counts.masked_fill_(counts > 1, 0)
    return counts.to(metric.dtype)


def assign(
    scores: Tensor, predicted: Tensor, points: Tensor, labels: Tensor, boxes: Tensor, mask: Tensor,
    *, is_lean: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Assigns boxes to anchors: scores, places and whether each anchor has a box."""
    count, classes = boxes.shape[1], scores.shape[2]
    inside = find_inside(points, boxes, mask, is_lean)
    metric, overlaps = measure_boxes(scores, predicted, labels, boxes, inside * mask)
    positive = choose_candidates(metric, mask) * inside * mask
    del inside
    found = positive.sum(-2)
    several = (found.unsqueeze(1) > 1).expand(-1, count, -1)
    best = torch.zeros(positive.shape, dtype=positive.dtype, device=positive.device)
    best.scatter_(1, overlaps.argmax(1).unsqueeze(1), 1)
    positive = torch.where(several, best, positive).float()
    del several, best
    found = positive.sum(-2)
    owner = positive.argmax(-2)
    owner = owner + torch.arange(len(boxes), device=boxes.device)[..., None] * count
    targets = labels.long().flatten()[owner]
    places = boxes.view(-1, 4)[owner]
    dtype = torch.int8 if is_lean else torch.int64
    wanted = torch.zeros((*targets.shape, classes), dtype=dtype, device=boxes.device)
    wanted.scatter_(2, targets.clamp_(0).unsqueeze(-1), 1)
    if is_lean:
        wanted = wanted * (found[:, :, None] > 0)
    else:
        repeated = found[:, :, None].repeat(1, 1, classes)
        wanted = torch.where(repeated > 0, wanted, 0)
        del repeated
    metric *= positive
    most = metric.amax(dim=-1, keepdim=True)
    most_overlap = (overlaps * positive).amax(dim=-1, keepdim=True)
    norm = (metric * most_overlap / (most + 1e-9)).amax(-2).unsqueeze(-1)
    return targets, places, wanted * norm, found.bool(), owner


def predict(case: Case) -> dict[str, int]:
    """The most memory that the assignment takes beside its inputs."""
    batch, count, classes = (case.config[name] for name in ("batch", "boxes", "classes"))
    pairs = batch * count * ANCHORS
    with fxmem.record(gpu=case.gpu, size_hint=int(INSIDE * pairs)):
        shapes = (
            (batch, ANCHORS, classes), (batch, ANCHORS, 4), (ANCHORS, 2),
            (batch, count, 1), (batch, count, 4), (batch, count, 1),
        )  # fmt: skip
        inputs = [torch.zeros(shape, device="cuda") for shape in shapes]
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            assign(*inputs, is_lean=case.config["is_lean"])
        return {"allocated by assignment": torch.cuda.max_memory_allocated() - before}
