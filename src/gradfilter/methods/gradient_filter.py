"""Gradient filtering: the backward of a convolution is computed on patches of its maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

from torch import Tensor, nn

from ..coarse import CoarseGradient, densify, onto
from ..errors import PlanError
from ..geometry import ConvGeometry
from ..grid import Grid, per_axis
from ..ops.coarse_conv import coarse_backward, coarse_macs
from ..ops.exact_conv import Gradients, Want, exact_backward
from ..ops.fused import is_pointwise
from ..ops.means import patch_means
from ..ops.storage import STORES, Store
from .base import Memory, Method
from .settings import ByLayer, check_choice, check_patch, check_tokens, frozen, of_layer, values_of

__all__ = ["GradientFilter"]

Patch = int | tuple[int, ...]
Taps = Literal["overlap", "collapse"]
TAPS = ("overlap", "collapse")
BY_LAYER = ("patch", "weight_patch", "weight_taps")


@dataclass(frozen=True)
class GradientFilter(Method):
    """Average gradients over patches, and keep only the patch means of the input.

    patch: side of the patch, or one side per axis, or a dict from layer globs to either (first match wins).
    taps: "overlap" keeps the taps of a kernel and the neighbours of a patch apart; "collapse", the published
        method without its stride error, is cheaper and blunter.
    input_gradient: "coarse" leaves the gradient on the grid; "exact" pays the dense input gradient, which
        stops the error from spreading to earlier layers, and keeps the small storage.
    tokens: height and width of the map behind a linear layer's (N, L, C) tokens.
    weight_patch, weight_taps: those of the weight gradient where they differ; dicts by layer too. It needs
        less detail than the input gradient, and its patch decides what is kept.
    store: "bf16" keeps the means in half the bytes.

    >>> print(GradientFilter(patch=2, weight_patch=4))
    GradientFilter(patch=2, weight_patch=4)
    """

    patch: Patch | Mapping[str, Patch] = 2
    taps: Taps = "overlap"
    input_gradient: Literal["coarse", "exact"] = "coarse"
    tokens: tuple[int, int] | None = None
    weight_patch: Patch | Mapping[str, Patch] | None = None
    weight_taps: Taps | Mapping[str, Taps] | None = None
    store: Store = "same"

    def __post_init__(self) -> None:
        for name in (*BY_LAYER, "tokens"):
            object.__setattr__(self, name, frozen(getattr(self, name)))
        check_tokens(self.tokens)
        for name in ("patch", "weight_patch"):
            for patch in values_of(getattr(self, name)):
                if patch is not None or name == "patch":
                    check_patch(name, patch)
        check_choice("taps", self.taps, TAPS)
        for taps in values_of(self.weight_taps):
            check_choice("weight_taps", taps or "overlap", TAPS)
        check_choice("input_gradient", self.input_gradient, ("coarse", "exact"))
        check_choice("store", self.store, STORES)
        self._check_nesting()

    def _check_nesting(self) -> None:
        """A coarse gradient has nothing to say on finer patches, nor on those that lie across its own."""
        patch, weight_patch = self.patch, self.weight_patch
        if self.input_gradient == "exact" or weight_patch is None:
            return
        if isinstance(patch, Mapping) or isinstance(weight_patch, Mapping):
            return
        axes = max(len(p) if isinstance(p, tuple) else 1 for p in (patch, weight_patch))
        sides = zip(per_axis(weight_patch, axes), per_axis(patch, axes), strict=False)
        if any(mine % arriving for mine, arriving in sides):
            raise PlanError(
                f"weight_patch {weight_patch} is no multiple of patch {patch}, on which the gradient "
                "arrives; use a multiple, a patch that divides it, or input_gradient='exact'."
            )

    def for_layer(self, name: str) -> GradientFilter:
        given = {key: of_layer(getattr(self, key), name, f"GradientFilter's {key}") for key in BY_LAYER}
        return replace(self, **given)

    def refuses(self, geometry: ConvGeometry) -> str | None:
        if geometry.spatial == 0:
            return "plain features have no map"
        if not geometry.is_map:
            return f"the map behind {geometry.x_shape[2]} tokens is not known; set tokens=(H, W)"
        for name, patch in (("patch", self.patch), ("weight_patch", self.weight_patch)):
            if isinstance(patch, tuple) and len(patch) != geometry.spatial:
                return f"{name} {patch} has {len(patch)} numbers but the map has {geometry.spatial} axes"
        return None

    def patches(self, geometry: ConvGeometry) -> tuple[int, ...]:
        return self._ways(geometry)[0].sides

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: Memory) -> tuple[Tensor, ...]:
        way = self._ways(geometry)[1]
        return (x if way.is_exact else patch_means(x, geometry.input_grid(way.sides)),)

    def kept_grid(self, geometry: ConvGeometry) -> Grid | None:
        of_x, of_weight = self._ways(geometry)
        other = type(self) is not GradientFilter or of_x.is_exact or of_weight.is_exact
        return None if other else geometry.input_grid(of_weight.sides)

    def gradients(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry, want: Want
    ) -> Gradients:
        of_x, of_weight = self._ways(geometry)
        x = kept[0] if kept else None
        if of_x == of_weight:
            return of_x.backward(grad, x, weight, geometry, want)
        x_grad = weight_grad = None
        if want.x:
            x_grad = of_x.backward(grad, None, weight, geometry, Want(True, False)).x
        if want.weight:
            weight_grad = of_weight.backward(grad, x, weight, geometry, Want(False, True)).weight
        return Gradients(x_grad, weight_grad)

    def weight_gradient_tells_scale(self, module: nn.Module) -> bool:
        """Where a pixel of the output reads one of the input, patch means say all that is asked for."""
        plain = self.weight_patch is None and self.input_gradient == "coarse" and self.store == "same"
        return (
            type(self) is GradientFilter and plain and isinstance(module, nn.Conv2d) and is_pointwise(module)
        )

    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        return sum(way.macs(geometry) * asked for way, asked in zip(self._ways(geometry), want, strict=True))

    def _ways(self, geometry: ConvGeometry) -> tuple[_Way, _Way]:
        """How the gradients of input and weight are formed; asked for several times in a step."""
        known: tuple[_Way, _Way] | None = geometry.memo.get(self)
        if known is None:
            known = geometry.memo[self] = self._ways_of(geometry)
        return known

    def _ways_of(self, geometry: ConvGeometry) -> tuple[_Way, _Way]:
        if any(isinstance(getattr(self, name), ByLayer) for name in BY_LAYER):
            raise PlanError("GradientFilter's settings are given by layer; ask for_layer(name) first.")
        sides, weight_sides = (
            per_axis(patch, geometry.spatial)  # type: ignore[arg-type]
            for patch in (self.patch, self.weight_patch or self.patch)
        )
        of_x = _Way((1,) * geometry.spatial if self.input_gradient == "exact" else sides, self.taps)
        return of_x, _Way(weight_sides, self.weight_taps or self.taps)  # type: ignore[arg-type]


class _Way(NamedTuple):
    """Patches and taps of one gradient."""

    sides: tuple[int, ...]
    taps: Taps

    @property
    def is_exact(self) -> bool:
        return prod(self.sides) == 1

    def macs(self, geometry: ConvGeometry) -> int:
        return geometry.macs if self.is_exact else coarse_macs(geometry, self.sides, self.taps)

    def backward(
        self, grad: Tensor, x: Tensor | None, weight: Tensor, geometry: ConvGeometry, want: Want
    ) -> Gradients:
        if self.is_exact:
            return exact_backward(densify(grad), x, weight, geometry, want)
        means = onto(grad, geometry.output_grid(self.sides))
        found = coarse_backward(means, x, weight, geometry, self.sides, self.taps, want)
        if found.x is None:
            return found
        return Gradients(CoarseGradient(found.x, geometry.input_grid(self.sides)), found.weight)
