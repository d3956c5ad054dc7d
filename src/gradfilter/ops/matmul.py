"""Products of matrices, by whichever library is the fastest one here.

torch's own choice on a CPU is MKL, which has AVX-512 for Intel's processors only. oneDNN has it for all.
"""

from __future__ import annotations

from functools import cache
from math import gcd

import torch
from torch import Tensor

from ..native import kernel_gradient

__all__ = ["product", "transposed_product"]

_FEW = 1 << 16  # multiply-adds: below, the call itself takes longer than they do
_ONE = kernel_gradient.Axis(1, 1, 1, 1, 0, 1)  # of a 1x1 convolution of one pixel


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b + bias; any strides.

    >>> product(torch.ones(2, 3), torch.ones(3, 4)).shape
    torch.Size([2, 4])
    """
    if not _serves(a, b, a.numel() * b.shape[1]):
        return a @ b if bias is None else torch.addmm(bias, a, b)
    bias = None if bias is None else bias.contiguous()  # oneDNN does not look at its strides
    made: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
    return made


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """a.t() @ b of contiguous matrices: what the gradient of a 1x1 kernel is, and runs as.

    >>> transposed_product(torch.ones(3, 2), torch.ones(3, 4))
    tensor([[3., 3., 3., 3.],
            [3., 3., 3., 3.]])
    """
    count, outputs = a.shape
    if not (_serves(a, b, a.numel() * b.shape[1]) and a.is_contiguous() and b.is_contiguous()):
        return a.t() @ b
    width = gcd(count, 64)
    grad, x = (t.view(-1, 1, width, t.shape[1]).permute(0, 3, 1, 2) for t in (a, b))
    axes = [_ONE, _ONE._replace(size=width, outputs=width)]
    if kernel_gradient.fits(grad, x, axes):
        return kernel_gradient.kernel_gradient(grad, x, axes).flatten(1)
    like = a.new_empty(()).expand(outputs, b.shape[1], 1, 1)
    grad, x = (t.view(1, 1, *t.shape).permute(0, 3, 1, 2) for t in (a, b))
    settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
    made: Tensor = torch.ops.aten.convolution_backward(grad, x, like, None, *settings)[1]
    return made.view(outputs, -1)


def _serves(a: Tensor, b: Tensor, products: int) -> bool:
    enough = products >= _FEW and _is_plain(a) and _is_plain(b)
    return enough and _has_wide_onednn() and bool(torch.backends.mkldnn.enabled)


def _is_plain(matrix: Tensor) -> bool:
    return type(matrix) is Tensor and matrix.dtype == torch.float32 and matrix.device.type == "cpu"


@cache
def _has_wide_onednn() -> bool:
    wide = "AVX512" in torch.backends.cpu.get_cpu_capability()
    return wide and hasattr(torch.ops.mkldnn, "_linear_pointwise")
