"""Linear layers of plain features, by the products of matmul.py.

The bits of torch's own depend on the number of threads where MKL makes them. Those of oneDNN, which is taken
for all but the smallest, do not, but for a single sample: so a run with another number of threads can give
the same bits.
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
        # torch's own products have a second derivative, and take gradients by the batch
        by_torch = torch.is_grad_enabled() or torch._C._functorch.is_batchedtensor(grad)
        x_grad = weight_grad = None
        if weight is not None:
            x_grad = grad @ weight if by_torch else product(grad, weight.detach())
        if x is not None:
            weight_grad = grad.t() @ x if by_torch else transposed_product(grad, x)
        return x_grad, weight_grad, grad.sum(0) if ctx.needs_input_grad[2] else None
