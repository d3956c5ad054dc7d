"""Tucker form: a small core and one factor per mode; weight gradients from these, the input never rebuilt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from ..geometry import ConvAxis, ConvGeometry
from .exact_conv import exact_weight_gradient
from .unfolding import at_least_float32, balanced, mode_product

__all__ = ["compress", "contraction_macs", "is_smaller", "stored_elements", "tucker_weight_gradient"]


def stored_elements(shape: Sequence[int], ranks: Sequence[int]) -> int:
    """Elements of core and factors.

    >>> stored_elements((8, 16, 7, 7), (2, 3, 1, 1))
    84
    """
    return prod(ranks) + sum(size * rank for size, rank in zip(shape, ranks, strict=True))


def is_smaller(shape: Sequence[int], ranks: Sequence[int]) -> bool:
    """Whether core and factors take less than the tensor itself."""
    return stored_elements(shape, ranks) < prod(shape)


def compress(x: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The core of ``x`` in these orthonormal factors, and the factors; the first takes some of its scale."""
    core = _multiplied(at_least_float32(x), {mode: f.t() for mode, f in enumerate(factors)})
    core, first = balanced(core.contiguous(), factors[0])
    return tuple(t.to(x.dtype) for t in (core, first, *factors[1:]))


def tucker_weight_gradient(
    grad: Tensor, core: Tensor, factors: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry
) -> Tensor:
    """The gradient of the weight, along the path that takes the fewest operations."""
    grad, core, *factors = (at_least_float32(t) for t in (grad, core, *factors))
    path = min(_paths(geometry, tuple(core.shape)), key=lambda p: p.macs)
    if path.on_map:
        return _on_map(path, grad, core, factors, weight, geometry)
    return _on_taps(path, grad, core, factors, weight, geometry)


def contraction_macs(geometry: ConvGeometry, ranks: Sequence[int]) -> int:
    """Multiply-adds of ``tucker_weight_gradient``; more rank never takes fewer."""
    return min(path.macs for path in _paths(geometry, tuple(ranks))) if all(ranks) else 0


@dataclass(frozen=True)
class _Path:
    """How to contract; the batch always stays as small as the core's.

    on_map: expand the core to the whole map and correlate; else gather the factors' rows for every tap,
    project the gradient onto those, and nothing is left to correlate.
    all_channels: expand the core to all channels first, which pays where groups see few channels each.
    """

    macs: int
    on_map: bool
    all_channels: bool


def _paths(geometry: ConvGeometry, ranks: tuple[int, ...]) -> list[_Path]:
    paths = []
    for all_channels in (False, True):
        paths.append(_Path(_map_macs(geometry, ranks, all_channels), True, all_channels))
        projected = ranks[0] * prod(a.kernel * r for a, r in zip(geometry.axes, ranks[2:], strict=True))
        if projected <= geometry.y_shape[0] * prod(geometry.y_shape[2:]):  # needs no more memory than grad
            paths.append(_Path(_taps_macs(geometry, ranks, all_channels), False, all_channels))
    return paths


def _map_macs(geometry: ConvGeometry, ranks: tuple[int, ...], all_channels: bool) -> int:
    batch, channels, *sizes = ranks
    steps = list(zip(sizes, geometry.x_shape[2:], strict=True))
    steps += [(channels, geometry.x_shape[1])] if all_channels else []
    macs = batch * prod(geometry.y_shape) + _chain_macs(prod(ranks), steps)
    macs += _seen_by_map(geometry, ranks, all_channels).macs
    return macs + (0 if all_channels else _channel_macs(geometry, channels))


def _taps_macs(geometry: ConvGeometry, ranks: tuple[int, ...], all_channels: bool) -> int:
    batch, channels, *sizes = ranks
    n, channels_out, *outputs = geometry.y_shape
    taps = (a.kernel * rank for a, rank in zip(geometry.axes, sizes, strict=True))
    macs = _chain_macs(prod(geometry.y_shape), [(n, batch), *zip(outputs, taps, strict=True)])
    inner = batch * prod(sizes)
    if all_channels:
        group = geometry.x_shape[1] // geometry.groups
        return macs + geometry.x_shape[1] * channels * inner + channels_out * group * geometry.taps * inner
    return macs + channels_out * channels * geometry.taps * inner + _channel_macs(geometry, channels)


def _channel_macs(geometry: ConvGeometry, rank: int) -> int:
    """From compressed input channels to those of the weight."""
    return geometry.y_shape[1] * rank * geometry.taps * (geometry.x_shape[1] // geometry.groups)


def _on_map(
    path: _Path,
    grad: Tensor,
    core: Tensor,
    factors: Sequence[Tensor],
    weight: Tensor,
    geometry: ConvGeometry,
) -> Tensor:
    expanded = [i for i in range(1, core.dim()) if i > 1 or path.all_channels]
    maps = _multiplied(core, {i: factors[i] for i in expanded})
    mixed = mode_product(grad, factors[0].t(), 0)
    inner = _seen_by_map(geometry, tuple(core.shape), path.all_channels)
    pair = (maps.shape[1], grad.shape[1]) if geometry.transposed else (grad.shape[1], maps.shape[1])
    shape = weight.shape if path.all_channels else (*pair, *weight.shape[2:])
    found = exact_weight_gradient(mixed, maps, shape, inner)
    if path.all_channels:
        return found
    by_tap = found.reshape(*pair, -1).permute((2, 1, 0) if geometry.transposed else (2, 0, 1))
    return _own_channels(by_tap, factors[1], weight, geometry)


def _on_taps(
    path: _Path,
    grad: Tensor,
    core: Tensor,
    factors: Sequence[Tensor],
    weight: Tensor,
    geometry: ConvGeometry,
) -> Tensor:
    batch, _, *sizes = core.shape
    rows = {0: factors[0].t()}
    for i, (axis, factor) in enumerate(zip(geometry.axes, factors[2:], strict=True)):
        rows[i + 2] = _tap_rows(factor, axis, geometry.transposed)
    split = [n for axis, rank in zip(geometry.axes, sizes, strict=True) for n in (axis.kernel, rank)]
    projected = _multiplied(grad, rows).reshape(batch, grad.shape[1], *split)
    taps, inner = range(2, projected.dim(), 2), range(3, projected.dim(), 2)
    by_tap = projected.permute(*taps, 1, 0, *inner).reshape(geometry.taps, grad.shape[1], -1)
    if path.all_channels:
        maps = mode_product(core, factors[1], 1).movedim(1, 0).reshape(geometry.groups, -1, by_tap.shape[2])
        grouped = by_tap.unflatten(1, (geometry.groups, -1))
        return _as_weight(grouped @ maps.transpose(1, 2), weight, geometry)
    return _own_channels(by_tap @ core.movedim(1, -1).flatten(0, -2), factors[1], weight, geometry)


def _own_channels(by_tap: Tensor, factor: Tensor, weight: Tensor, geometry: ConvGeometry) -> Tensor:
    """(taps, output channels, rank) to the input channels that each group sees."""
    grouped = by_tap.unflatten(1, (geometry.groups, -1))
    return _as_weight(grouped @ factor.unflatten(0, (geometry.groups, -1)).transpose(1, 2), weight, geometry)


def _as_weight(grouped: Tensor, weight: Tensor, geometry: ConvGeometry) -> Tensor:
    """(taps, groups, outputs, inputs) in the shape of the weight."""
    order = (1, 3, 2, 0) if geometry.transposed else (1, 2, 3, 0)
    return grouped.permute(order).reshape(weight.shape)


def _seen_by_map(geometry: ConvGeometry, ranks: tuple[int, ...], all_channels: bool) -> ConvGeometry:
    channels = geometry.x_shape[1] if all_channels else ranks[1]
    return replace(
        geometry,
        x_shape=(ranks[0], channels, *geometry.x_shape[2:]),
        y_shape=(ranks[0], *geometry.y_shape[1:]),
        groups=geometry.groups if all_channels else 1,
    )


def _tap_rows(factor: Tensor, axis: ConvAxis, transposed: bool) -> Tensor:
    """(taps * rank, outputs): the factor's row that each tap of each output reads; zero in the padding."""
    if axis.kernel == axis.stride == 1 and axis.is_pointwise:
        return factor.t()
    places = torch.arange(axis.size_out, device=factor.device) * axis.stride - axis.pad
    read = places + torch.arange(axis.kernel, device=factor.device).unsqueeze(1) * axis.dilation
    outside = (read < 0) | (read >= axis.size_in)
    read = read.masked_fill(outside, axis.size_in)  # one row more, which is zero or thrown away
    if transposed:  # the roles of the two maps are exchanged: the input is what is written from
        rows = factor.new_zeros(axis.kernel, axis.size_in + 1, factor.shape[1])
        rows.scatter_(
            1, read.unsqueeze(2).expand(-1, -1, factor.shape[1]), factor.expand(axis.kernel, -1, -1)
        )
        rows = rows[:, : axis.size_in]
    else:
        rows = torch.cat([factor, factor.new_zeros(1, factor.shape[1])])[read]
    return rows.transpose(1, 2).flatten(0, 1)


def _multiplied(x: Tensor, matrices: Mapping[int, Tensor]) -> Tensor:
    """The tensor with a matrix multiplied onto each of these modes, in the order that costs least."""
    for mode in sorted(matrices, key=lambda m: _urgency(*reversed(matrices[m].shape))):
        x = mode_product(x, matrices[mode], mode)
    return x


def _chain_macs(elements: int, steps: Sequence[tuple[int, int]]) -> int:
    macs = 0
    for size, rank in sorted(steps, key=lambda step: _urgency(*step)):
        macs += elements * rank
        elements = elements // size * rank
    return macs


def _urgency(size: int, made: int) -> float:
    """Products in ascending order of this cost least: exchange two neighbours to see it."""
    return 1 / size - 1 / made
