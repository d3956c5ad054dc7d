"""Linear layers of plain features, by the products of matmul.py.

torch's own sums of few outputs depend on the number of threads where MKL makes them, oneDNN's do not: with
these, a run with another number of threads can give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .matmul import product, transposed_product

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of a matrix, to rounding.

    >>> linear(torch.ones(2, 3), torch.ones(4, 3), None).shape
    torch.Size([2, 4])
    """
    made: Tensor = _Linear.apply(x, weight, bias)
    return made


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        need_x, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        return product(x, weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        twice = (
            torch.is_grad_enabled()
        )  # a second derivative is asked for: only torch's own products have one
        x_grad = None if weight is None else (grad @ weight if twice else product(grad, weight))
        weight_grad = None
        if x is not None:
            weight_grad = grad.t() @ x if twice else transposed_product(grad, x)
        return x_grad, weight_grad, grad.sum(0) if ctx.needs_input_grad[2] else None
