"""The calls into winograd.cpp: a 3x3 convolution with stride 1 for fewer products."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native

__all__ = ["Packed", "fits", "is_built", "pack", "run"]

_CHANNELS, _PIXELS = 32, 128  # the least of a map for which the transforms pay


class Packed(NamedTuple):
    """Weight and bias as winograd.cpp reads them."""

    weight: Tensor
    bias: Tensor
    inputs: int
    outputs: int


def is_built() -> bool:
    return ("gf_winograd", torch.float32) in native._functions()


def fits(x: Tensor, outputs: int, padding: tuple[int, int]) -> bool:
    """Whether a convolution can run so, and gains; the batch's size has no part in it, nor in any result."""
    height, width = x.shape[2:]
    return (
        min(x.shape[1], outputs) >= _CHANNELS
        and height * width >= _PIXELS
        and min(height + 2 * padding[0], width + 2 * padding[1]) >= 3
        and min(padding) >= 0
        and is_built()
        and x.dtype == torch.float32
        and native.fits(x)
    )


def pack(weight: Tensor, bias: Tensor | None) -> Packed:
    """The weight (O, I, 3, 3), of any strides, at the points of the transform."""
    outputs, inputs = weight.shape[:2]
    made = torch.empty(_function("gf_winograd_packed")(inputs, outputs), dtype=torch.float32)
    strides = (ctypes.c_int64 * 4)(*weight.stride())
    _function("gf_winograd_pack")(
        weight.data_ptr(), inputs, outputs, strides, made.data_ptr(), torch.get_num_threads()
    )
    bias = weight.new_zeros(outputs) if bias is None else bias
    return Packed(made, F.pad(bias, (0, -outputs % native.lanes())), inputs, outputs)


def run(
    x: Tensor,
    weights: Packed,
    padding: tuple[int, int],
    limits: tuple[float, ...] = (-float("inf"), float("inf")),
    other: Tensor | None = None,
) -> Tensor:
    """The convolution of channels-last maps, ``other`` added, within limits."""
    n, _, height, width = x.shape
    shape = (n, weights.outputs, height + 2 * padding[0] - 2, width + 2 * padding[1] - 2)
    y = torch.empty(shape, dtype=torch.float32, memory_format=torch.channels_last)
    numbers = (ctypes.c_int64 * 7)(n, weights.inputs, weights.outputs, height, width, *padding)
    threads = torch.get_num_threads()
    scratch = torch.empty(_function("gf_winograd_scratch")(numbers, threads), dtype=torch.float32)
    _function("gf_winograd")(
        x.data_ptr(), None if other is None else other.data_ptr(), y.data_ptr(), weights.weight.data_ptr(),
        weights.bias.data_ptr(), numbers, *limits, scratch.data_ptr(), threads,
    )  # fmt: skip
    return y


def _function(name: str) -> ctypes._NamedFuncPointer:
    return native._functions()[name, torch.float32]
