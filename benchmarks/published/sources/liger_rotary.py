"""Rotary embeddings of transformers, as Liger-Kernel's benchmarks call them.

The frequencies are a matrix product, as in transformers before it multiplied elementwise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.published.sources.liger import (
    CUDA,
    Config,
    Kernel,
    make_input,
    start_from_random,
)

Rotate = Callable[[], tuple[Tensor, Tensor]]


def set_up_rope(config: Config) -> Kernel:
    """That of Llama: a sine and a cosine for each position and channel."""
    q, k = (make_heads(config, name).transpose(1, 2) for name in ("heads", "key_heads"))
    positions = torch.arange(config["length"], device=CUDA).unsqueeze(0)
    inverse = make_inverse_frequencies(config)
    frequencies = multiply_frequencies(inverse[None, :, None], positions[:, None, :].float())
    cos, sin = make_waves(frequencies, q.dtype)
    held = (positions, inverse)
    return finish(config, q, k, lambda: rotate(q, k, cos, sin), held)


def set_up_qwen2vl(config: Config) -> Kernel:
    """That of Qwen2-VL: channels take the positions of time, height or width."""
    q, k = (make_heads(config, name).transpose(1, 2) for name in ("heads", "key_heads"))
    positions = torch.arange(config["length"] * 3, device=CUDA).view(3, 1, -1)
    inverse = make_inverse_frequencies(config)
    expanded = inverse[None, None, :, None].expand(3, 1, -1, 1)
    cos, sin = make_waves(multiply_frequencies(expanded, positions[:, :, None, :].float()), q.dtype)
    size = find_head_size(config)
    side = size * 3 // 16
    sections = [size // 2 - 2 * side, side, side] * 2

    def compose(waves: Tensor) -> Tensor:
        parts = waves.split(sections, dim=-1)
        return torch.cat([part[i % 3] for i, part in enumerate(parts)], dim=-1)

    held = (positions, inverse)
    return finish(config, q, k, lambda: rotate(q, k, compose(cos), compose(sin)), held)


def set_up_llama4(config: Config) -> Kernel:
    """That of Llama 4: pairs of channels are complex numbers, which are turned."""
    q, k = (make_heads(config, name) for name in ("heads", "key_heads"))
    positions = torch.arange(config["length"], device=CUDA).unsqueeze(0)
    inverse = make_inverse_frequencies(config)
    frequencies = multiply_frequencies(inverse[None, :, None], positions[:, None, :].float())
    turns = torch.polar(torch.ones_like(frequencies), frequencies) * 1.0
    del frequencies
    held = (positions, inverse)
    return finish(config, q, k, lambda: turn(q, k, turns), held)


def find_head_size(config: Config) -> int:
    """Channels of a head."""
    size: int = config["hidden_size"] // config["heads"]
    return size


def make_heads(config: Config, name: str) -> Tensor:
    """A leaf of shape 1 x length x heads x channels."""
    return make_input(config, 1, config["length"], config[name], find_head_size(config))


def make_inverse_frequencies(config: Config) -> Tensor:
    """One for every two channels of a head."""
    size = find_head_size(config)
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=CUDA)
    return 1.0 / (10000.0 ** (exponents / size))


def multiply_frequencies(inverse: Tensor, positions: Tensor) -> Tensor:
    """A frequency for each position and pair of channels."""
    with torch.no_grad():
        return (inverse @ positions).transpose(-1, -2)


def make_waves(frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine for each channel."""
    angles = torch.cat((frequencies, frequencies), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns the halves of each head against each other."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    q_rotated = (q * cos) + (_rotate_half(q) * sin)
    k_rotated = (k * cos) + (_rotate_half(k) * sin)
    return q_rotated, k_rotated


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first = x[..., :half]
    second = x[..., half:]
    return torch.cat((-second, first), dim=-1)


def turn(q: Tensor, k: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Multiplies pairs of channels, as complex numbers."""
    q_pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    k_pairs = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    q_turned = torch.view_as_real(q_pairs * turns[:, :, None, :]).flatten(3)
    k_turned = torch.view_as_real(k_pairs * turns[:, :, None, :]).flatten(3)
    return q_turned.type_as(q), k_turned.type_as(k)


def finish(
    config: Config, q: Tensor, k: Tensor, forward: Rotate, held: tuple[Tensor, ...]
) -> Kernel:
    """Backward from the queries alone in the shared harness; else from both, to these inputs."""
    if config.get("shared_harness"):
        return Kernel(lambda: forward()[0], start_from_random, (q, k))
    gradients = torch.randn_like(q), torch.randn_like(k)

    def backward(outputs: tuple[Tensor, Tensor]) -> None:
        torch.autograd.grad(outputs, (q, k), gradients, allow_unused=True, retain_graph=True)

    return Kernel(forward, backward, held)
