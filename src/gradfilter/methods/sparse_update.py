"""Sparse updates: some input channels of a weight train, and only those are kept of the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..geometry import ConvGeometry
from ..ops.exact_conv import Want, exact_weight_gradient
from ..ops.storage import Store
from .base import Memory, Method
from .settings import check_choice, frozen, of_layer, values_of

__all__ = ["SparseUpdate"]

Channels = float | tuple[int, ...]  # a whole number is a count
CRITERIA = ("magnitude", "random", "last")


@dataclass(frozen=True)
class SparseUpdate(Method):
    """Keep and train some input channels of the weight; the gradient of the others is zero.

    channels: how many, as a fraction (0.25; 1.0 is exact) or a count (8; all where there are fewer), or
        which, as a tuple of indices, or a dict from layer globs to one of these (first match wins). Of a
        layer with groups these are channels of each group: a depthwise layer, which has one, stays exact.
    criterion: which channels are chosen, once, when the method is applied: those whose weights have the
        largest "magnitude", some at "random", or the "last".
    seed: for "random"; every layer draws numbers of its own.
    store: how what is kept is stored: "same", "bf16" or "int8".

    An optimizer with weight decay changes the other channels too, and so does momentum from before.

    >>> import gradfilter as gf
    >>> model = gf.apply_(gf.models.build("tiny"), gf.SparseUpdate(channels=(0, 3)), "last:1")
    >>> model(torch.randn(2, 3, 16, 16)).sum().backward()
    >>> model.head.weight.grad.any(0).nonzero().flatten().tolist()
    [0, 3]
    """

    channels: Channels | Mapping[str, Channels] = 0.25
    criterion: Literal["magnitude", "random", "last"] = "magnitude"
    seed: int = 0
    store: Store = "same"

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", frozen(self.channels))
        for channels in values_of(self.channels):
            _check(channels)
        check_choice("criterion", self.criterion, CRITERIA)

    def for_layer(self, name: str) -> SparseUpdate:
        return replace(self, channels=of_layer(self.channels, name, "SparseUpdate's channels"))

    def misfits(self, module: nn.Module) -> str | None:
        there = _channels(module)
        if isinstance(self.channels, tuple) and max(self.channels) >= there:
            raise PlanError(
                f"SparseUpdate's channel {max(self.channels)} is not one of its {there} input channels "
                f"(of each group); use indices up to {there - 1}, or a fraction."
            )
        return None

    def prepare(self, name: str, module: nn.Module, memory: Memory) -> None:
        count = self._count(_channels(module))
        if count < _channels(module):
            memory["channels"] = self._choice(name, module, count).sort().values.int()

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: Memory) -> tuple[Tensor, ...]:
        if "channels" not in memory:  # all of them
            return (x,)
        chosen = memory["channels"].to(x.device)
        return x.index_select(1, _of_every_group(chosen, geometry)), chosen

    def weight_gradient(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry
    ) -> Tensor:
        x, *chosen = kept
        if not chosen:
            return super().weight_gradient(grad, kept, weight, geometry)
        axis, at = (0, _of_every_group(chosen[0], geometry)) if geometry.transposed else (1, chosen[0].long())
        shape = (geometry.x_shape[0], x.shape[1], *geometry.x_shape[2:])
        part_shape = [len(at) if d == axis else size for d, size in enumerate(weight.shape)]
        part = exact_weight_gradient(grad, x, part_shape, replace(geometry, x_shape=shape))
        return torch.zeros_like(weight).index_copy_(axis, at, part)

    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        there = geometry.x_shape[1] // geometry.groups
        return want.x * geometry.macs + want.weight * geometry.macs * self._count(there) // there

    def _count(self, there: int) -> int:
        if isinstance(self.channels, Mapping):
            raise PlanError("SparseUpdate's channels are given by layer; ask for_layer(name) first.")
        if isinstance(self.channels, tuple):
            return len(self.channels)
        wanted = self.channels if isinstance(self.channels, int) else round(self.channels * there)
        return min(max(1, wanted), there)

    def _choice(self, name: str, module: Any, count: int) -> Tensor:
        there, weight = _channels(module), module.weight.detach()
        if isinstance(self.channels, tuple):
            return torch.tensor(self.channels, device=weight.device)
        if self.criterion == "last":
            return torch.arange(there - count, there, device=weight.device)
        if self.criterion == "random":
            own = torch.Generator().manual_seed(self.seed + crc32(name.encode()))
            return torch.randperm(there, generator=own)[:count].to(weight.device)
        by_channel = weight if _is_transposed(module) else weight.transpose(0, 1)
        sizes = by_channel.abs().float().flatten(1).sum(1).view(-1, there).sum(0)
        largest: Tensor = sizes.topk(count).indices
        return largest


def _check(channels: Any) -> None:
    if isinstance(channels, tuple):
        fine = channels and all(_is_whole(c, 0) for c in channels) and len(set(channels)) == len(channels)
    else:
        fine = _is_whole(channels, 1) or (isinstance(channels, float) and 0 < channels <= 1)
    if not fine:
        raise PlanError(
            "channels must be a fraction above 0 up to 1.0, a count of at least 1, or a tuple of different "
            f"indices, not {channels!r}; 0.25 is usual."
        )


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_transposed(module: Any) -> bool:
    return bool(getattr(module, "transposed", False))


def _channels(module: Any) -> int:
    """Input channels of each group."""
    if isinstance(module, nn.Linear):
        return module.in_features
    return int(module.in_channels // module.groups)


def _of_every_group(chosen: Tensor, geometry: ConvGeometry) -> Tensor:
    starts = torch.arange(geometry.groups, device=chosen.device) * (geometry.x_shape[1] // geometry.groups)
    return (starts[:, None] + chosen).flatten()
