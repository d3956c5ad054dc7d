"""The calls into inverted_residual.cpp: an inverted residual in one pass."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import native

__all__ = ["Patches", "Sizes", "Stage", "is_built", "pack", "patches", "run", "sizes"]


class Stage(NamedTuple):
    """One convolution: its contiguous weight, and what its outputs are then multiplied by and gain."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None


class Sizes(NamedTuple):
    """Of one call: the output's shape, and all numbers as inverted_residual.cpp reads them."""

    y_shape: tuple[int, int, int, int]
    numbers: Any


class Patches(NamedTuple):
    """Of what a trained block keeps: for each hidden map the patches' means, and counts of open pixels.

    bounds: of the two gates. The first map is left out where there is no expansion.
    """

    shapes: tuple[Sequence[int] | None, Sequence[int]]
    sides: Any
    bounds: Any


def is_built() -> bool:
    return ("gf_inverted_residual", torch.float32) in native._functions()


def sizes(n: int, channels: tuple[int, int, int], expands: bool, axes: Sequence[tuple[int, ...]]) -> Sizes:
    """channels: of x, hidden and of y; axes: size, outputs, kernel, stride, padding of height and width."""
    numbers = [n, *channels, expands, *axes[0], *axes[1]]
    return Sizes((n, channels[-1], axes[0][1], axes[1][1]), (ctypes.c_int64 * len(numbers))(*numbers))


def patches(
    shapes: tuple[Sequence[int] | None, Sequence[int]], sides: Sequence[int], bounds: Sequence[float]
) -> Patches:
    """sides, bounds: two of each map."""
    return Patches(shapes, (ctypes.c_int64 * 4)(*sides), (ctypes.c_float * 4)(*bounds))


def pack(sizes: Sizes, *, expand: Stage | None, depthwise: Stage, project: Stage) -> Tensor:
    """All of a block's numbers in the order in which they are read."""
    made = torch.empty(_function("packed")(sizes.numbers), dtype=torch.float32)
    stages = [t for stage in (expand, depthwise, project) for t in stage or (None, None, None)]
    pointers = (ctypes.c_void_p * len(stages))(*map(native._pointer, stages))
    _function("pack")(pointers, sizes.numbers, made.data_ptr(), torch.get_num_threads())
    return made


def run(
    x: Tensor,
    other: Tensor | None,
    weights: Tensor,
    sizes: Sizes,
    activations: Any,
    patches: Patches | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """The block of x, and ``other`` added; two activations of three float32 each, as the pass reads them.

    With patches, also means and open pixels of the first hidden map and of the second.
    """
    threads = torch.get_num_threads()
    y = native._empty(sizes.y_shape, torch.float32)
    kept: list[Tensor | None] = []
    pointers = sides = bounds = None
    if patches is not None:
        for shape in patches.shapes:
            for dtype in (torch.float32, torch.uint8):
                kept.append(None if shape is None else native._empty(shape, dtype))
        pointers = (ctypes.c_void_p * 4)(*map(native._pointer, kept))
        sides, bounds = patches.sides, patches.bounds
    scratch = torch.empty(_function("scratch")(sizes.numbers, sides, threads), dtype=torch.float32)
    _function()(
        x.data_ptr(), native._pointer(other), y.data_ptr(), weights.data_ptr(), sizes.numbers, activations,
        pointers, sides, bounds, scratch.data_ptr(), threads,
    )  # fmt: skip
    return y, kept


def _function(name: str = "") -> ctypes._NamedFuncPointer:
    return native._functions()[f"gf_inverted_residual_{name}".rstrip("_"), torch.float32]
