"""Passes written in C++: one sweep over memory, one call, where torch needs several.

Used where the library was built (build.py) and the tensors fit: on a CPU, float32 or float64, channels-last.
Callers have torch's operators for all else. ``GRADFILTER_NATIVE=0`` in the environment turns the library off;
``narrow`` takes the one without AVX-512 on any processor.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .build import HERE, LIBRARY, WIDE

__all__ = [
    "Links",
    "decode_blocks",
    "depthwise",
    "encode_blocks",
    "finish",
    "fits",
    "fits_blocks",
    "is_channels_last",
    "is_one_per_map",
    "lanes",
    "max_pool",
    "max_pool_back",
    "open_bits",
    "open_in_both",
    "open_pixels_and_means",
    "serves_patches",
    "through_bits",
    "through_gate",
]

_SUFFIX = {torch.float32: "float", torch.float64: "double"}
_P, _L, _D, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_double, ctypes.c_int
_ARGUMENTS = {
    "gf_patches": [_P, _P, _P, _L, _L, _L, _L, _L, _L, _D, _D, _I],
    "gf_finish": [_P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _D, _D, _D, _D, _I],
    "gf_both": [_P, _P, _P, _L, _L, _L, _L, _L, _L, _D, _D, _D, _D, _I],
    "gf_max_pool": [_P, _P, _P, _L, _L, _P, _P, _D, _D, _I],
    "gf_max_pool_back": [_P, _P, _P, _P, _L, _L, _P, _P, _I],
    "gf_gate": [_P, _P, _P, _P, _P, _L, _L, _L, _D, _I, _I],
    "gf_open_bits": [_P, _P, _L, _D, _D, _I],
    "gf_through_bits": [_P, _P, _P, _P, _L, _L, _D, _I],
    "gf_depthwise": [_P, _P, _P, _P, _P, _P, _P, _L, _L, _P, _P, _P, _P, _I],
    "gf_encode": [_P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _I],
    "gf_decode": [_P, _P, _P, _L, _L, _L, _I],
}
_Signatures = dict[str, tuple[list[Any], Any]]  # arguments, result
_INVERTED_RESIDUAL: _Signatures = {
    "gf_inverted_residual": ([_P] * 10 + [_I], None),
    "gf_inverted_residual_pack": ([_P, _P, _P, _I], None),
    "gf_inverted_residual_packed": ([_P], _L),
    "gf_inverted_residual_scratch": ([_P, _P, _I], _L),
}
_KERNEL_GRADIENT: _Signatures = {
    "gf_kernel_gradient": ([_P, _P, _P, _P, _P, _I], None),
    "gf_kernel_gradient_scratch": ([_P, _I], _L),
}
_WINOGRAD: _Signatures = {
    "gf_winograd": ([_P, _P, _P, _P, _P, _P, _D, _D, _P, _I], None),
    "gf_winograd_pack": ([_P, _L, _L, _P, _P, _I], None),
    "gf_winograd_packed": ([_L, _L], _L),
    "gf_winograd_scratch": ([_P, _I], _L),
}


@cache
def _functions() -> dict[tuple[str, torch.dtype], ctypes._NamedFuncPointer]:
    """The library's functions."""
    library = _library()
    if library is None:
        return {}
    found = {}
    for name, arguments in _ARGUMENTS.items():
        for dtype, suffix in _SUFFIX.items():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
            found[name, dtype] = function
    float_only = _INVERTED_RESIDUAL if library.gf_has_vectors() else {}
    if float_only and (library.gf_has_widest() or os.environ.get("GRADFILTER_NATIVE") == "narrow"):
        float_only = float_only | _KERNEL_GRADIENT | _WINOGRAD  # else oneDNN is as fast
    for name, (arguments, result) in float_only.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
        found[name, torch.float32] = function
    return found


@cache
def _library() -> ctypes.CDLL | None:
    """The one for this processor; None where it was not built or is turned off."""
    wanted = os.environ.get("GRADFILTER_NATIVE")
    names = [LIBRARY]
    if wanted != "narrow" and "AVX512" in torch.backends.cpu.get_cpu_capability():
        names = [WIDE, LIBRARY]
    for name in names if wanted != "0" else []:
        try:
            library = ctypes.CDLL(str(HERE / name))
        except OSError:  # not built, or for another kind of machine
            continue
        _share_threads(library)
        return library
    return None


@cache
def lanes() -> int:
    """Floats of a vector of products.h: packed weights have whole ones."""
    return int(_library().gf_lanes())  # type: ignore[union-attr]


def _share_threads(library: ctypes.CDLL) -> None:
    """Hand over torch's OpenMP threads; where they cannot be found, one thread does the work."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
            library.gf_use_threads(*(ctypes.cast(getattr(torch_library, n), _P) for n in names))
        except (OSError, AttributeError):
            continue
        return


def fits(*tensors: Tensor | None) -> bool:
    """Whether the native passes can work on these maps (N, C, H, W); an empty one has no address."""
    functions = _functions()
    if not functions:
        return False
    given = [t for t in tensors if t is not None]
    dtype = given[0].dtype
    if ("gf_gate", dtype) not in functions:
        return False
    for t in given:  # asked many times in a step: not as one expression, which would be slower
        if type(t) is not Tensor or t.dtype != dtype or t.device.type != "cpu" or t.numel() == 0:
            return False
        if not is_channels_last(t) or t.is_neg():
            return False
    return True


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def is_one_per_map(tensor: Tensor) -> bool:
    """Whether the maps of a tensor are constant, by its strides: what comes back through a mean is."""
    return tensor.dim() == 4 and tensor.stride() == (tensor.shape[1], 1, 0, 0)


def serves_patches(maps: Tensor, patches: Sequence[int]) -> bool:
    """Whether the passes over patches can work on them: of whole maps, whose pixels one byte counts."""
    return tuple(patches[:2]) == (1, 1) and prod(patches) < 256 and fits(maps)


def open_pixels_and_means(
    y: Tensor, sides: Sequence[int], coarse_shape: Sequence[int], bounds: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Of each patch: in how many pixels, of fewer than 256, y lies between the bounds; and the mean of y."""
    count, means = _empty(coarse_shape, torch.uint8), _empty(coarse_shape, y.dtype)
    n, channels, height, width = y.shape
    _functions()["gf_patches", y.dtype](
        y.data_ptr(), means.data_ptr(), count.data_ptr(), n, height, width, channels, *sides, *bounds,
        torch.get_num_threads(),
    )  # fmt: skip
    return count, means


def finish(
    y: Tensor,
    norm: tuple[Tensor, Tensor],
    limits: tuple[float, float],
    sides: Sequence[int],
    coarse_shape: Sequence[int],
    bounds: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Make y what the norm, ``y * scale + shift``, has within the limits; then ``open_pixels_and_means``."""
    count, means = _empty(coarse_shape, torch.uint8), _empty(coarse_shape, y.dtype)
    n, channels, height, width = y.shape
    _functions()["gf_finish", y.dtype](
        y.data_ptr(), norm[0].data_ptr(), norm[1].data_ptr(), means.data_ptr(), count.data_ptr(),
        n, height, width, channels, *sides, *bounds, *limits, torch.get_num_threads(),
    )  # fmt: skip
    return count, means


def open_in_both(
    y: Tensor,
    bounds: tuple[float, float],
    term: Tensor,
    term_bounds: tuple[float, float],
    sides: Sequence[int],
    coarse_shape: Sequence[int],
) -> Tensor:
    """In how many pixels of each patch y and ``term`` both lie between their bounds."""
    count = _empty(coarse_shape, torch.uint8)
    n, channels, height, width = y.shape
    _functions()["gf_both", y.dtype](
        y.data_ptr(), term.data_ptr(), count.data_ptr(), n, height, width, channels,
        *sides, *bounds, *term_bounds, torch.get_num_threads(),
    )  # fmt: skip
    return count


def max_pool(
    x: Tensor, axes: Tensor, shape: Sequence[int], coarse_shape: Sequence[int], bounds: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Max pooling to ``shape``, and by neighbour and output patch how many maxima lie between the bounds.

    axes: int64, a row per axis as kernels.cpp's PoolAxis has it.
    """
    n, channels, height, width = coarse_shape
    y = _empty(shape, x.dtype)
    neighbours = int(axes[0, -1] * axes[1, -1])
    counts = torch.empty(neighbours, n, height, width, channels, dtype=torch.uint8)
    _functions()["gf_max_pool", x.dtype](
        x.data_ptr(), y.data_ptr(), counts.data_ptr(), n, channels,
        axes[0].data_ptr(), axes[1].data_ptr(), *bounds, torch.get_num_threads(),
    )  # fmt: skip
    return y, counts.permute(0, 1, 4, 2, 3)


def max_pool_back(
    grad: Tensor, counts: Tensor, open_count: Tensor | None, axes: Tensor, coarse_shape: Sequence[int]
) -> Tensor:
    """The mean over each input patch, or over its open pixels, of what comes back through ``max_pool``."""
    made = _empty(coarse_shape, grad.dtype)
    _functions()["gf_max_pool_back", grad.dtype](
        grad.data_ptr(), counts.data_ptr(), _pointer(open_count), made.data_ptr(), *grad.shape[:2],
        axes[0].data_ptr(), axes[1].data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return made


def through_gate(grad: Tensor, count: Tensor, scale: Tensor | None, per_pixel: Tensor, shut: float) -> Tensor:
    """grad * scale * (share of open pixels, of which ``count`` are; shut ones pass ``shut``)."""
    made = _empty(grad.shape, grad.dtype)
    n, channels, height, width = grad.shape
    _functions()["gf_gate", grad.dtype](
        grad.data_ptr(), count.data_ptr(), _pointer(scale), per_pixel.data_ptr(), made.data_ptr(),
        n, height * width, channels, shut, is_one_per_map(grad), torch.get_num_threads(),
    )  # fmt: skip
    return made


def open_bits(y: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Where y lies between the bounds, as ``ops.bits.pack`` packs it."""
    made = torch.empty(-(-y.numel() // 8), dtype=torch.uint8)
    _functions()["gf_open_bits", y.dtype](
        y.data_ptr(), made.data_ptr(), y.numel(), *bounds, torch.get_num_threads()
    )
    return made


def through_bits(grad: Tensor, bits: Tensor, scale: Tensor | None, shut: float) -> Tensor:
    """grad * scale where bits say that a gate is open, times ``shut`` elsewhere."""
    made = torch.empty_like(grad)
    _functions()["gf_through_bits", grad.dtype](
        grad.data_ptr(), _pointer(scale), bits.data_ptr(), made.data_ptr(), grad.numel(), grad.shape[1], shut,
        torch.get_num_threads(),
    )  # fmt: skip
    return made


class Links(NamedTuple):
    """One axis of a depthwise backward, as kernels.cpp reads it: which patches are linked, by which kind."""

    table: Tensor  # int32: input patches, output patches, taps, kinds, links; then first, patch, kind
    weighs: Tensor  # float64 (kinds, taps)


def depthwise(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor,
    want_x: bool,
    per_pixel: Tensor,
    axes: tuple[Links, Links],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the input patches and, where x is given, of the weight."""
    n, channels = grad.shape[:2]
    inputs = [int(axis.table[0]) for axis in axes]
    x_grad = _empty((n, channels, *inputs), grad.dtype) if want_x else None
    weight_grad = torch.empty_like(weight) if x is not None else None
    threads = torch.get_num_threads()
    kinds = len(axes[0].weighs) * len(axes[1].weighs)
    scratch = torch.empty(2 * 32 * kinds * threads, dtype=grad.dtype)
    _functions()["gf_depthwise", grad.dtype](
        grad.data_ptr(), _pointer(x), weight.data_ptr(), _pointer(x_grad), _pointer(weight_grad),
        per_pixel.data_ptr(), scratch.data_ptr(), n, channels,
        *(tensor.data_ptr() for axis in axes for tensor in axis), threads,
    )  # fmt: skip
    return x_grad, weight_grad


def fits_blocks(flat: Tensor) -> bool:
    """Whether a row of values can be put into blocks, or taken out of them."""
    known = ("gf_encode", flat.dtype) in _functions() and type(flat) is Tensor
    return known and flat.numel() > 0 and flat.device.type == "cpu" and flat.is_contiguous()


def encode_blocks(
    flat: Tensor,
    codes: Tensor,
    ranges: Tensor,
    noise: Tensor,
    blocks: tuple[int, int],
    tile: tuple[int, int, int],
) -> None:
    """Fill in codes and ranges. blocks: values each, bits. tile: length, first offset, next chunk's."""
    _functions()["gf_encode", flat.dtype](
        flat.data_ptr(), codes.data_ptr(), ranges.data_ptr(), noise.data_ptr(), len(flat), *blocks, *tile,
        torch.get_num_threads(),
    )  # fmt: skip


def decode_blocks(codes: Tensor, ranges: Tensor, flat: Tensor, blocks: tuple[int, int]) -> None:
    """Fill in the values."""
    _functions()["gf_decode", flat.dtype](
        codes.data_ptr(), ranges.data_ptr(), flat.data_ptr(), len(flat), *blocks, torch.get_num_threads()
    )


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
