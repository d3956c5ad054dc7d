"""The call into inverted_residual.cpp, and weights as it reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native

__all__ = ["Sizes", "Stage", "is_built", "pack", "run", "sizes"]

WIDEST = 3  # vectors of a panel, as in products.h
_NAMES = ("gf_inverted_residual", "gf_inverted_residual_scratch")


class Stage(NamedTuple):
    """One convolution's weight and bias, with its norm in them."""

    weight: Tensor
    bias: Tensor | None


class Sizes(NamedTuple):
    """Of one call: the output's shape, and all numbers as inverted_residual.cpp reads them."""

    y_shape: tuple[int, int, int, int]
    numbers: Any


def is_built() -> bool:
    return (_NAMES[0], torch.float32) in native._functions()


def pack(*, expand: Stage | None, depthwise: Stage, project: Stage) -> Tensor:
    """All of a block's numbers in the order in which they are read."""
    hidden, taps = _whole(len(depthwise.weight)), depthwise.weight[0].numel()
    by_vector = _filled(depthwise.weight.flatten(1), hidden).view(-1, native.lanes(), taps).transpose(1, 2)
    parts = [] if expand is None else [_bias(expand), *_panels(_filled(expand.weight.flatten(1), hidden))]
    parts += [_bias(depthwise), by_vector]
    outputs = _filled(project.weight.flatten(1), _whole(len(project.weight)))
    parts += [_bias(project), *_panels(F.pad(outputs, (0, hidden - outputs.shape[1])))]
    return torch.cat([part.reshape(-1) for part in parts])


def _whole(channels: int) -> int:
    return -(-channels // native.lanes()) * native.lanes()


def _filled(rows: Tensor, count: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, count - len(rows)))


def _bias(stage: Stage) -> Tensor:
    count = len(stage.weight)
    bias = stage.weight.new_zeros(count) if stage.bias is None else stage.bias
    return F.pad(bias, (0, _whole(count) - count))


def _panels(weight: Tensor) -> Iterator[Tensor]:
    """Output channels in panels of nearly equal width, each by input channel."""
    vectors = len(weight) // native.lanes()
    count = -(-vectors // WIDEST)
    for panel in range(count):
        begin, end = (vectors * p // count * native.lanes() for p in (panel, panel + 1))
        yield weight[begin:end].t()


def sizes(n: int, channels: tuple[int, int, int], expands: bool, axes: Sequence[tuple[int, ...]]) -> Sizes:
    """channels: of x, hidden and of y; axes: size, outputs, kernel, stride, padding of height and width."""
    numbers = [n, *channels, expands, *axes[0], *axes[1]]
    return Sizes((n, channels[-1], axes[0][1], axes[1][1]), (ctypes.c_int64 * len(numbers))(*numbers))


def run(x: Tensor, other: Tensor | None, weights: Tensor, sizes: Sizes, activations: Any) -> Tensor:
    """The block of x, and ``other`` added; two activations of three float32 each, as the pass reads them."""
    run_block, count_scratch = (native._functions()[name, torch.float32] for name in _NAMES)
    threads = torch.get_num_threads()
    y = torch.empty(sizes.y_shape, dtype=torch.float32, memory_format=torch.channels_last)
    scratch = torch.empty(count_scratch(sizes.numbers, threads), dtype=torch.float32)
    run_block(
        x.data_ptr(), None if other is None else other.data_ptr(), y.data_ptr(), weights.data_ptr(),
        sizes.numbers, activations, scratch.data_ptr(), threads,
    )  # fmt: skip
    return y
