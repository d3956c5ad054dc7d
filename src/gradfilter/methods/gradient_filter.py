"""Gradient filtering: the backward of a convolution is computed on patches of its maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from torch import Tensor

from ..coarse import CoarseGradient, densify, onto
from ..errors import PlanError
from ..geometry import ConvGeometry
from ..grid import per_axis
from ..ops.coarse_conv import coarse_backward, coarse_macs
from ..ops.exact_conv import Gradients, Want, exact_backward
from ..ops.means import patch_means
from .base import Memory, Method
from .by_layer import ByLayer

__all__ = ["GradientFilter"]

Patch = int | tuple[int, ...]


@dataclass(frozen=True)
class GradientFilter(Method):
    """Average gradients over patches, and keep only the patch means of the input.

    patch: side of the patch, or one side per axis, or a dict from layer globs to either (first match wins).
    taps: "overlap" keeps the taps of a kernel and the neighbours of a patch apart; "collapse", the published
        method without its stride error, is cheaper and blunter.
    input_gradient: "coarse" leaves the gradient on the grid; "exact" pays the dense input gradient, which
        stops the error from spreading to earlier layers, and keeps the small storage.
    tokens: height and width of the map behind a linear layer's (N, L, C) tokens.

    >>> GradientFilter(patch=4)
    GradientFilter(patch=4, taps='overlap', input_gradient='coarse', tokens=None)
    """

    patch: Patch | Mapping[str, Patch] = 2
    taps: Literal["overlap", "collapse"] = "overlap"
    input_gradient: Literal["coarse", "exact"] = "coarse"
    tokens: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.patch, list):
            object.__setattr__(self, "patch", tuple(self.patch))
        if isinstance(self.patch, Mapping):
            object.__setattr__(self, "patch", ByLayer(self.patch))
        for patch in self.patch.values() if isinstance(self.patch, Mapping) else [self.patch]:
            _check_patch(patch)
        _check_choice("taps", self.taps, ("overlap", "collapse"))
        _check_choice("input_gradient", self.input_gradient, ("coarse", "exact"))

    def for_layer(self, name: str) -> GradientFilter:
        if not isinstance(self.patch, ByLayer):
            return self
        return replace(self, patch=self.patch.of(name, "GradientFilter", "patch"))

    def refuses(self, geometry: ConvGeometry) -> str | None:
        if geometry.spatial == 0:
            return "plain features have no map"
        if not geometry.is_map:
            return f"the map behind {geometry.x_shape[2]} tokens is not known; set tokens=(H, W)"
        if isinstance(self.patch, tuple) and len(self.patch) != geometry.spatial:
            return f"patch {self.patch} has {len(self.patch)} numbers but the map has {geometry.spatial} axes"
        return None

    def patches(self, geometry: ConvGeometry) -> tuple[int, ...]:
        if self.input_gradient == "exact":
            return (1,) * geometry.spatial
        return self._sides(geometry)

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: Memory) -> tuple[Tensor, ...]:
        sides = self._sides(geometry)
        return (x if prod(sides) == 1 else patch_means(x, geometry.input_grid(sides)),)

    def gradients(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry, want: Want
    ) -> Gradients:
        sides = self._sides(geometry)
        x = kept[0] if kept else None
        if prod(sides) == 1:
            return exact_backward(densify(grad), x, weight, geometry, want)
        x_exact = None
        if want.x and self.input_gradient == "exact":
            x_exact = exact_backward(densify(grad), None, weight, geometry, want._replace(weight=False)).x
            want = want._replace(x=False)
        means = onto(grad, geometry.output_grid(sides))
        x_grad, weight_grad = coarse_backward(means, x, weight, geometry, sides, self.taps, want)
        if x_grad is None:
            return Gradients(x_exact, weight_grad)
        return Gradients(CoarseGradient(x_grad, geometry.input_grid(sides)), weight_grad)

    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        sides = self._sides(geometry)
        coarse = geometry.macs if prod(sides) == 1 else coarse_macs(geometry, sides, self.taps)
        x_macs = geometry.macs if self.input_gradient == "exact" else coarse
        return want.x * x_macs + want.weight * coarse

    def _sides(self, geometry: ConvGeometry) -> tuple[int, ...]:
        if isinstance(self.patch, Mapping):
            raise PlanError("GradientFilter's patch is given by layer; ask for_layer(name) first.")
        return per_axis(self.patch, geometry.spatial)


def _check_patch(patch: object) -> None:
    sides = patch if isinstance(patch, tuple) else (patch,)
    if not sides or not all(isinstance(side, int) and side >= 1 for side in sides):
        raise PlanError(f"patch must be whole numbers of at least 1, not {patch!r}; 2 or 4 are usual.")


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise PlanError(f"{name} must be {' or '.join(map(repr, known))}, not {value!r}.")
