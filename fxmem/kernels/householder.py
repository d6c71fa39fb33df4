"""Backward of a product of Householder reflectors, in place.

Source: ``torch/csrc/autograd/FunctionsManual.cpp``, ``householder_product_backward``. With tensors
that may be a subclass it keeps the gradients of all columns and joins them; with others it writes
each into the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.target import ANY


class _HouseholderProduct(torch.autograd.Function):
    """``linalg_householder_product``, differentiated once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tau: Tensor) -> Tensor:
        result: Tensor = torch.linalg.householder_product(x, tau)
        ctx.save_for_backward(x, tau, result)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, tau, result = ctx.saved_tensors
        count = tau.shape[-1]
        vectors = x.tril(-1)
        vectors.diagonal(0, -2, -1).fill_(1.0)
        columns = vectors[..., :count]
        squares = (columns * columns.conj()).sum(-2)
        inverse = tau / (tau * squares - 1.0)
        kernel = result @ grad.mH
        _reflect_rows(kernel, vectors, inverse, 0)
        x_grad, tau_grad = torch.zeros_like(vectors), torch.zeros_like(tau)
        for i in range(count):
            _run_step(kernel, vectors, tau, inverse, i, x_grad, tau_grad)
        return x_grad.tril_(-1), tau_grad


def _run_step(
    kernel: Tensor,
    vectors: Tensor,
    tau: Tensor,
    inverse: Tensor,
    i: int,
    x_grad: Tensor,
    tau_grad: Tensor,
) -> None:
    """Differentiates one reflector, and takes the kernel to the next."""
    column, number = _differentiate(kernel, vectors[..., i : i + 1], tau[..., i : i + 1], i)
    x_grad[..., i].copy_(column.squeeze(-1))
    tau_grad[..., i].copy_(number.squeeze(-1))
    if i + 1 < tau.shape[-1]:
        _reflect_rows(kernel, vectors, inverse, i + 1)
        _reflect_columns(kernel, vectors, tau, i)


def _differentiate(
    kernel: Tensor, vector: Tensor, number: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """``update_grad``: a vector is zero before its first element of interest."""
    v = vector[..., first:, :]
    left = v.mH @ kernel[..., first:, :]
    right = kernel[..., first:] @ v
    factor = number.unsqueeze(-1)
    column = (-factor * left).conj().squeeze(-2) - (factor * right).squeeze(-1)
    return column.unsqueeze(-1), -(left[..., first:] @ v).conj().squeeze(-1)


def _reflect_rows(kernel: Tensor, vectors: Tensor, numbers: Tensor, i: int) -> None:
    """``apply_simple_transformation`` from the left."""
    v, number = vectors[..., i:, i : i + 1], numbers[..., i : i + 1]
    kernel = kernel[..., i:, :]
    row = v.mH @ kernel
    kernel.sub_((number.unsqueeze(-1) * v) * row)


def _reflect_columns(kernel: Tensor, vectors: Tensor, numbers: Tensor, i: int) -> None:
    """``apply_simple_transformation`` from the right."""
    v, number = vectors[..., i:, i : i + 1], numbers[..., i : i + 1]
    kernel = kernel[..., i:]
    column = kernel @ (number.unsqueeze(-1) * v)
    kernel.sub_(column * v.mH)


@ANY.function(torch.linalg.householder_product, torch.orgqr, Tensor.orgqr)
def householder_product(input: Tensor, tau: Tensor) -> Tensor:
    """Of tensors that are not differentiated: the operator itself."""
    is_differentiated = torch.is_grad_enabled() and (input.requires_grad or tau.requires_grad)
    run = _HouseholderProduct.apply if is_differentiated else torch.linalg.householder_product
    result: Tensor = run(input, tau)
    return result
