"""The call into inverted_residual.cpp, and weights as it reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native

__all__ = ["Stage", "is_built", "pack", "run"]

LANES, WIDEST = 8, 3  # floats of a vector, vectors of a panel, as in inverted_residual.cpp
_NAMES = ("gf_inverted_residual", "gf_inverted_residual_scratch")


class Stage(NamedTuple):
    """One convolution's weight and bias, with its norm in them."""

    weight: Tensor
    bias: Tensor | None


def is_built() -> bool:
    return (_NAMES[0], torch.float32) in native._functions()


def pack(expand: Stage | None, depthwise: Stage, project: Stage) -> Tensor:
    """All of a block's numbers in the order in which they are read."""
    hidden = _whole(len(depthwise.weight))
    by_vector = _filled(depthwise.weight.flatten(1), hidden).view(hidden // LANES, LANES, -1).transpose(1, 2)
    parts = [] if expand is None else [_bias(expand), *_panels(_filled(expand.weight.flatten(1), hidden))]
    parts += [_bias(depthwise), by_vector]
    outputs = _filled(project.weight.flatten(1), _whole(len(project.weight)))
    parts += [_bias(project), *_panels(F.pad(outputs, (0, hidden - outputs.shape[1])))]
    return torch.cat([part.reshape(-1) for part in parts])


def _whole(channels: int) -> int:
    return -(-channels // LANES) * LANES


def _filled(rows: Tensor, count: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, count - len(rows)))


def _bias(stage: Stage) -> Tensor:
    count = len(stage.weight)
    bias = stage.weight.new_zeros(count) if stage.bias is None else stage.bias
    return F.pad(bias, (0, _whole(count) - count))


def _panels(weight: Tensor) -> Iterator[Tensor]:
    """Output channels in panels of nearly equal width, each by input channel."""
    vectors = len(weight) // LANES
    count = -(-vectors // WIDEST)
    for panel in range(count):
        begin, end = (vectors * p // count * LANES for p in (panel, panel + 1))
        yield weight[begin:end].t()


def run(
    x: Tensor, other: Tensor | None, weights: Tensor, y_shape: Sequence[int], shape: ctypes.Array[ctypes.c_int64],
    activations: ctypes.Array[ctypes.c_float],
) -> Tensor:  # fmt: skip
    """The block of x, and ``other`` added; shape and activations as inverted_residual.cpp has them."""
    run_block, count_scratch = (native._functions()[name, torch.float32] for name in _NAMES)
    threads = torch.get_num_threads()
    y = torch.empty(y_shape, memory_format=torch.channels_last)
    scratch = torch.empty(count_scratch(shape, threads))
    run_block(
        x.data_ptr(), None if other is None else other.data_ptr(), y.data_ptr(), weights.data_ptr(),
        shape, activations, scratch.data_ptr(), threads,
    )  # fmt: skip
    return y
