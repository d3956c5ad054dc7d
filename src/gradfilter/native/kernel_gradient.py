"""The call into kernel_gradient.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import native

__all__ = ["Axis", "fits", "kernel_gradient"]

_NAMES = ("gf_kernel_gradient", "gf_kernel_gradient_scratch")
_NARROW = 16  # input channels: fewer do not fill the vectors
_DENSE = 2  # dilation: with more, most of what is packed is never read
_MANY = 1024  # pixels of a gradient: with more, oneDNN is faster where its vectors are as wide


class Axis(NamedTuple):
    """One axis of a convolution, in the order in which kernel_gradient.cpp reads it."""

    size: int
    outputs: int
    kernel: int
    stride: int
    padding: int
    dilation: int


def fits(grad: Tensor, x: Tensor, axes: Sequence[Axis]) -> bool:
    """Whether the pass can work on these maps, and is worth it."""
    if (_NAMES[0], grad.dtype) not in native._functions():
        return False
    few = grad.numel() <= _MANY * grad.shape[1] or native.lanes() == 8
    worth = few and x.shape[1] >= _NARROW and all(axis.dilation <= _DENSE for axis in axes)
    return worth and native.fits(grad, x)


def kernel_gradient(grad: Tensor, x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """The gradient (O, I, H, W) of the kernel of a convolution of one group, channels-last."""
    run, count_scratch = (native._functions()[name, torch.float32] for name in _NAMES)
    threads = torch.get_num_threads()
    n, inputs, outputs = len(x), x.shape[1], grad.shape[1]
    numbers = [n, inputs, outputs, *axes[0], *axes[1]]
    shape = (ctypes.c_int64 * len(numbers))(*numbers)
    made = torch.empty(
        (outputs, inputs, axes[0].kernel, axes[1].kernel), dtype=grad.dtype, memory_format=torch.channels_last
    )
    scratch = torch.empty(count_scratch(shape, threads), dtype=grad.dtype)
    run(grad.data_ptr(), x.data_ptr(), made.data_ptr(), shape, scratch.data_ptr(), threads)
    return made
