"""Products of matrices, by whichever of torch's libraries is the faster one here."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["product"]

_FEW = 1 << 16  # multiply-adds: below, the call itself takes longer than they do


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b + bias; any strides.

    >>> product(torch.ones(2, 3), torch.ones(3, 4)).shape
    torch.Size([2, 4])
    """
    if a.numel() * b.shape[1] < _FEW or not (_is_plain(a) and _is_plain(b) and _is_faster()):
        return a @ b if bias is None else torch.addmm(bias, a, b)
    made: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
    return made


def _is_plain(matrix: Tensor) -> bool:
    return type(matrix) is Tensor and matrix.dtype == torch.float32 and matrix.device.type == "cpu"


@cache
def _is_faster() -> bool:
    """oneDNN has AVX-512 for all processors that do; MKL, torch's usual choice, only for Intel's."""
    return "AVX512" in torch.backends.cpu.get_cpu_capability() and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    )
