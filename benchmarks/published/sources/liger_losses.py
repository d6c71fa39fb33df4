"""Losses in plain PyTorch beside which Liger-Kernel measures its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def predict(case: Case) -> dict[str, int]:
    """The peak of a case."""
    return predict_figures(case, SETUPS)


def _start(config: Config, *, retain: bool) -> Callable[[Tensor], None]:
    """Backward from the loss; the shared harness gives a random gradient, and keeps the graph."""
    if config.get("shared_harness"):
        return start_from_random
    return lambda loss: loss.backward(retain_graph=retain)


def _set_up_cross_entropy(config: Config) -> Kernel:
    logits = make_input(config)
    rows, vocabulary = config["shape"]
    labels = torch.randint(vocabulary, (rows, 1), device=CUDA).squeeze(1)
    return Kernel(
        lambda: functional.cross_entropy(logits, labels), _start(config, retain=False), (labels,)
    )


def _set_up_distance(
    normalise: Callable[[Tensor], Tensor],
    normalise_target: Callable[[Tensor], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Setup:
    """A distance of distributions; that of the model is no leaf, and its graph is kept."""

    def set_up(config: Config) -> Kernel:
        ours = normalise(make_input(config))
        target = normalise_target(make_input(config, requires_grad=False))
        return Kernel(lambda: loss(ours, target), _start(config, retain=True))

    return set_up


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(dim=-1)


def _log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(dim=-1)


def _kl_divergence(ours: Tensor, target: Tensor) -> Tensor:
    return functional.kl_div(ours, target, reduction="batchmean")


def _total_variation(ours: Tensor, target: Tensor) -> Tensor:
    distances = torch.abs(ours - target) / 2.0
    return torch.sum(distances) / ours.size(0)


def _divergence(ours: Tensor, target: Tensor, reduction: str = "batchmean") -> Tensor:
    return functional.kl_div(ours, target, reduction=reduction, log_target=True)


def _jensen_shannon_first(p: Tensor, q: Tensor) -> Tensor:
    mean = 0.5 * (torch.exp(p) + torch.exp(q))
    log_mean = torch.log(mean)
    return 0.5 * (_divergence(log_mean, p) + _divergence(log_mean, q))


def _jensen_shannon_second(q: Tensor, p: Tensor) -> Tensor:
    dtype = q.dtype
    p, q = p.to(torch.float), q.to(torch.float)
    mean = torch.lerp(torch.exp(p), torch.exp(q), 0.5)
    loss = 0.5 * _divergence(torch.log(mean), p) + 0.5 * _divergence(torch.log(mean), q)
    return loss.to(dtype)


def _jensen_shannon_third(q: Tensor, p: Tensor) -> Tensor:
    dtype = q.dtype
    p, q = p.to(torch.float), q.to(torch.float)
    mean = torch.lerp(torch.exp(q), torch.exp(p), 0.5)
    # What is divided dies before the sum over a row is there.
    loss = 0.5 * _divergence(torch.log(mean), p, "none").sum(dim=-1) + 0.5 * _divergence(
        torch.log(mean), q, "none"
    ).sum(dim=-1)
    loss = (loss / q.shape[0]).sum()
    return loss.to(dtype)


JENSEN_SHANNON = {
    "first": _jensen_shannon_first,
    "second": _jensen_shannon_second,
    "third": _jensen_shannon_third,
}


def _set_up_jensen_shannon(config: Config) -> Kernel:
    loss = JENSEN_SHANNON[config["version"]]
    return _set_up_distance(_log_softmax, _log_softmax, loss)(config)


def _set_up_linear_cross_entropy(config: Config) -> Kernel:
    """A language model's head and its loss; Liger's head has a weight of its own."""
    head, other = (_make_head(config) for _ in range(2))
    x = make_input(config, config["tokens"], config["hidden_size"])
    labels = torch.randint(config["vocabulary"], (config["tokens"], 1), device=CUDA).squeeze(1)

    def forward() -> Tensor:
        logits = head(x)
        return functional.cross_entropy(logits, labels)

    return Kernel(forward, lambda loss: loss.backward(), (other,))


def _make_head(config: Config) -> nn.Linear:
    sizes = config["hidden_size"], config["vocabulary"]
    return nn.Linear(*sizes, bias=False, dtype=find_dtype(config)).to(CUDA)


def _set_up_linear_jensen_shannon(config: Config) -> Kernel:
    """Heads of a student and a teacher; Liger's modules have the same weights."""
    student, teacher = (_make_head(config) for _ in range(2))
    shape = config["tokens"], config["hidden_size"]
    x = make_input(config, *shape)
    teacher_x = make_input(config, *shape, requires_grad=False)
    loss = JENSEN_SHANNON[config["version"]]

    def forward() -> Tensor:
        logits = student(x)
        teacher_logits = teacher(teacher_x)
        ours = torch.log_softmax(logits / 1.0, dim=-1)
        target = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        return loss(ours, target)

    return Kernel(forward, _start(config, retain=False))


class VocabularyParallel(torch.autograd.Function):
    """Megatron-LM's cross entropy in eager mode, on one rank: softmax in the logits' place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token."""
        logits = logits.float()
        most = torch.max(logits, dim=-1)[0]
        logits -= most.unsqueeze(dim=-1)
        size = logits.size(-1)
        outside = (labels < 0) | (labels >= size)
        inside = labels.clone() - 0
        inside[outside] = 0
        rows = logits.view(-1, size)
        columns = inside.view(-1)
        indices = torch.arange(start=0, end=rows.size(0), device=rows.device)
        predicted = rows[indices, columns]
        predicted = predicted.clone().contiguous().view_as(labels)
        predicted[outside] = 0.0
        torch.exp(logits, out=logits)
        total = logits.sum(dim=-1)
        loss = torch.log(total) - predicted
        logits.div_(total.unsqueeze(dim=-1))
        ctx.save_for_backward(logits, outside, columns)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The softmax minus one at the label, times the gradient."""
        softmax, outside, columns = ctx.saved_tensors
        rows = softmax.view(-1, softmax.size(-1))
        indices = torch.arange(start=0, end=rows.size(0), device=rows.device)
        update = 1.0 - outside.view(-1).float()
        rows[indices, columns] -= update
        softmax.mul_(gradients[0].unsqueeze(dim=-1))
        return softmax, None


def _set_up_megatron(config: Config) -> Kernel:
    """On the shapes of Megatron-LM: length x batch x vocabulary in bfloat16."""
    length, batch, vocabulary = config["shape"]
    logits = make_input({**config, "dtype": "bfloat16"})
    labels = torch.randint(0, vocabulary, (length, batch), device=CUDA)

    def forward() -> Tensor:
        if not config["keeps_gradient"]:
            logits.grad = None
        if config["provider"] == "torch":
            return _reshape_and_compute(logits, labels)
        loss: Tensor = VocabularyParallel.apply(logits, labels)
        return loss

    return Kernel(forward, lambda loss: loss.sum().backward())


def _reshape_and_compute(logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits.reshape(-1, logits.size(-1)).float()
    return functional.cross_entropy(flat, labels.reshape(-1), reduction="none").reshape(
        labels.shape
    )


SETUPS: dict[str, Setup] = {
    "cross_entropy": _set_up_cross_entropy,
    "kl_div": _set_up_distance(_log_softmax, _softmax, _kl_divergence),
    "tvd": _set_up_distance(_softmax, _softmax, _total_variation),
    "jsd": _set_up_jensen_shannon,
    "fused_linear_cross_entropy": _set_up_linear_cross_entropy,
    "fused_linear_jsd": _set_up_linear_jensen_shannon,
    "megatron_cross_entropy": _set_up_megatron,
}
