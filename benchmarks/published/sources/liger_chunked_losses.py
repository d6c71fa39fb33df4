"""Losses of preferences and distillation that make all logits, beside Liger-Kernel's that do not.

Each begins with a language model's head; Liger's module beside it has weights of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.published.cases import Case
from benchmarks.published.sources.liger import (
    CUDA,
    Config,
    Kernel,
    Setup,
    find_dtype,
    make_input,
    predict_figures,
    start_from_random,
)

BETA = 0.1
IGNORED = -100


def predict(case: Case) -> dict[str, int]:
    """The peak of a case."""
    return predict_figures(case, SETUPS)


class Parts(NamedTuple):
    """Parts of a batch whose first half, or what labels choose, was preferred."""

    chosen: Tensor
    rejected: Tensor
    chosen_logits: Tensor
    rejected_logits: Tensor
    likelihood: Tensor


def make_heads(config: Config, *sizes: int, bias: bool = False) -> list[nn.Linear]:
    """Heads of these hidden sizes."""
    vocabulary, dtype = config["vocabulary"], find_dtype(config)
    return [nn.Linear(size, vocabulary, bias=bias, dtype=dtype).to(CUDA) for size in sizes]


def compute_log_probabilities(logits: Tensor, labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """The mean over a sequence of its tokens' log probabilities."""
    mask = labels != ignored
    labels = torch.where(labels == ignored, 0, labels)
    by_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (by_token * mask).sum(-1) / mask.sum(-1)


def compute_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """That of all tokens."""
    logits = logits.view(-1, logits.shape[-1])
    labels = labels.view(-1)
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED)


def _compute_halves(x: Tensor, weight: Tensor, labels: Tensor) -> Parts:
    half = x.shape[0] // 2
    outputs = x @ weight.t()
    logits = outputs.float()
    likelihood = compute_cross_entropy(logits[:half], labels[:half])
    sums = compute_log_probabilities(logits, labels)
    return Parts(sums[:half], sums[half:], logits[:half], logits[half:], likelihood)


def _set_up_preference(compare: Callable[[Tensor, Tensor], Tensor]) -> Setup:
    """A loss of pairs.

    Args:
        compare: From the log probabilities of chosen and rejected sequences to the pairs' scores.
    """

    def set_up(config: Config) -> Kernel:
        size = config["hidden_size"]
        head, other = make_heads(config, size, size)
        shape = config["batch"], config["length"]
        x = make_input(config, *shape, size)
        labels = torch.randint(config["vocabulary"], shape, device=CUDA)

        def forward() -> Tensor:
            parts = _compute_halves(x, head.weight, labels)
            scores = compare(parts.chosen, parts.rejected)
            return parts.likelihood - scores.mean()

        return Kernel(forward, lambda loss: loss.backward(), (other,))

    return set_up


def _compare_odds(chosen: Tensor, rejected: Tensor) -> Tensor:
    odds = (chosen - rejected) - (
        torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
    )
    ratio = functional.logsigmoid(odds)
    return BETA * ratio


def _compare_contrast(chosen: Tensor, rejected: Tensor) -> Tensor:
    logits = chosen - rejected
    return _smooth(logits)


def _compare_margin(chosen: Tensor, rejected: Tensor) -> Tensor:
    logits = chosen - rejected
    logits = logits - 0.5 / BETA
    return _smooth(logits)


def _smooth(logits: Tensor) -> Tensor:
    positive = functional.logsigmoid(BETA * logits) * 1.0
    return positive + functional.logsigmoid(-BETA * logits) * 0.0


def _set_up_kto(config: Config) -> Kernel:
    """Sequences that are preferred or not by themselves, against a reference model."""
    size, batch, length = config["hidden_size"], config["batch"], config["length"]
    head, reference, *others = make_heads(config, *[size] * 4, bias=True)
    x = make_input(config, batch, length, size, requires_grad=False)
    labels = torch.randint(config["vocabulary"], (batch, length), device=CUDA)
    preferred = torch.randint(2, (batch,), device=CUDA).to(torch.bool)
    divergence = torch.randn(1, dtype=find_dtype(config), device=CUDA)
    reference_x = torch.randn_like(x)
    metrics = config["metrics"]

    def forward() -> Tensor:
        parts = _compute_preferred(x, head, labels, preferred)
        with torch.no_grad():
            there = _compute_reference(reference_x, reference, labels, preferred)
        chosen_ratios = parts.chosen - there[0]
        chosen = 1 - functional.sigmoid(BETA * (chosen_ratios - divergence))
        rejected_ratios = parts.rejected - there[1]
        rejected = 1 - functional.sigmoid(BETA * (divergence - rejected_ratios))
        losses = torch.cat((chosen, rejected), 0)
        loss = parts.likelihood + losses.mean()
        if metrics == "none":
            return loss
        told = parts.chosen_logits.detach().sum(), parts.rejected_logits.detach().sum()
        return (loss, told)[0]

    held = (others, labels, preferred)
    return Kernel(forward, lambda loss: loss.backward(), held)


def _choose(values: Tensor, preferred: Tensor) -> tuple[Tensor, Tensor]:
    return values[preferred], values[~preferred]


def _compute_preferred(x: Tensor, head: nn.Linear, labels: Tensor, preferred: Tensor) -> Parts:
    outputs = x @ head.weight.t()
    outputs = outputs + head.bias
    logits = outputs.float()
    likelihood = torch.tensor(0.0, device=logits.device)
    sums = compute_log_probabilities(logits, labels, ignored=42)
    return Parts(*_choose(sums, preferred), *_choose(logits, preferred), likelihood)


def _compute_reference(
    x: Tensor, head: nn.Linear, labels: Tensor, preferred: Tensor
) -> tuple[Tensor, Tensor]:
    logits = x @ head.weight.t()
    logits = logits + head.bias
    return _choose(compute_log_probabilities(logits, labels, ignored=42), preferred)


def _set_up_distillation(compare: Callable[[Tensor, Tensor], Tensor]) -> Setup:
    """A student of half the teacher's hidden size."""

    def set_up(config: Config) -> Kernel:
        size, tokens = config["hidden_size"], config["tokens"]
        student, teacher, *others = make_heads(config, *[size // 2, size] * 2)
        base, twin, x = (
            make_input(config, tokens, size // 2, requires_grad=False) for _ in range(3)
        )
        x.requires_grad_(True)
        teacher_x = make_input(config, tokens, size, requires_grad=False)
        labels = torch.randint(0, config["vocabulary"], (tokens,), device=CUDA)

        def forward() -> Tensor:
            logits, teacher_logits, hard = _compute_both(
                x, student.weight, teacher_x, teacher.weight, labels
            )
            logits /= 1.0
            teacher_logits /= 1.0
            soft = compare(logits, teacher_logits)
            return 0.5 * hard + 0.5 * soft

        return Kernel(forward, lambda loss: loss.backward(), (others, base, twin))

    return set_up


def _compute_both(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = x @ weight.t()
    with torch.no_grad():
        teacher_outputs = teacher_x @ teacher_weight.t()
    logits = outputs.float()
    teacher_logits = teacher_outputs.float()
    torch.all(labels == IGNORED)
    hard = compute_cross_entropy(logits, labels)
    return logits, teacher_logits, hard


def _compare_distributions(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    ours = functional.log_softmax(logits, dim=-1)
    theirs = functional.log_softmax(teacher_logits, dim=-1)
    mean = 0.5 * ours.exp() + 0.5 * theirs.exp()
    log_mean = mean.log()
    student = functional.kl_div(log_mean, ours, reduction="batchmean", log_target=True)
    teacher = functional.kl_div(log_mean, theirs, reduction="batchmean", log_target=True)
    return 0.5 * teacher + 0.5 * student


def _compare_directions(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    ours = functional.normalize(logits, p=2, dim=-1)
    theirs = functional.normalize(teacher_logits, p=2, dim=-1)
    similarity = functional.cosine_similarity(ours, theirs, dim=-1)
    loss = 1.0 * (1 - similarity)
    return loss.mean()


def _set_up_policy(config: Config) -> Kernel:
    """Group-relative policy optimization; the older script has Liger's module beside it."""
    size, batch, length = config["hidden_size"], config["batch"], config["length"]
    is_shared = config.get("shared_harness", False)
    head, reference, *others = make_heads(config, *[size] * (2 if is_shared else 4))
    x = make_input(config, batch, length, size)
    ids = torch.randint(0, config["vocabulary"], (batch, length), device=CUDA)
    mask = torch.ones(batch, length, device=CUDA)
    advantages = torch.randn(batch, dtype=find_dtype(config), device=CUDA)
    reference_x = make_input(config, batch, length, size, requires_grad=False)

    def forward() -> Tensor:
        logits = x @ head.weight.t()
        probabilities = functional.log_softmax(logits.float(), dim=-1)
        by_token = probabilities.gather(dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            reference_logits = reference_x @ reference.weight.t()
            there = functional.log_softmax(reference_logits.float(), dim=-1)
            reference_by_token = there.gather(dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)
        losses = _score(by_token, reference_by_token, mask, advantages, config["level"])
        return (losses * mask).sum() / torch.clamp(mask.sum(), min=1.0)

    start = start_from_random if is_shared else Tensor.backward
    return Kernel(forward, start, (others,))


def _score(
    by_token: Tensor, reference: Tensor, mask: Tensor, advantages: Tensor, level: str
) -> Tensor:
    ratio = by_token - by_token.detach()
    if level == "sequence":
        ratio = (ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
        ratio = ratio.unsqueeze(-1)
    weight = torch.exp(ratio)
    clipped = torch.clamp(weight, 0.8, 1.2)
    loss = -torch.min(weight * advantages.unsqueeze(1), clipped * advantages.unsqueeze(1))
    divergence = torch.exp(reference - by_token) - (reference - by_token) - 1.0
    return loss + BETA * divergence


SETUPS: dict[str, Setup] = {
    "fused_linear_orpo_loss": _set_up_preference(_compare_odds),
    "fused_linear_cpo_loss": _set_up_preference(_compare_contrast),
    "fused_linear_simpo_loss": _set_up_preference(_compare_margin),
    "kto_loss": _set_up_kto,
    "distill_jsd_loss": _set_up_distillation(_compare_distributions),
    "distill_cosine_loss": _set_up_distillation(_compare_directions),
    "grpo_loss": _set_up_policy,
}
