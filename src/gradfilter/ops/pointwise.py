"""1x1 convolutions over any number of axes, and linear layers, by the shape of their weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["pointwise"]

_CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def pointwise(x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """x times weight over channels: the second dimension, or the last where the weight has no taps.

    A weight of zeros gives +0.0 everywhere, never -0.0: its bias of zeros sees to that.

    >>> import torch
    >>> pointwise(torch.ones(1, 2, 3, 3), torch.ones(4, 2, 1, 1)).shape
    torch.Size([1, 4, 3, 3])
    """
    zeros = weight.new_zeros(len(weight))
    if weight.dim() == 2:
        return F.linear(x, weight, zeros)
    return _CONVOLUTIONS[weight.dim()](x, weight, zeros, groups=groups)
