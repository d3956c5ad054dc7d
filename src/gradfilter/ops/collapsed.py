"""collapse: every tap of an output patch counts as reading the input patch of the same index."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..geometry import ConvGeometry
from ..grid import Grid, apply_along, pixels
from .exact_conv import Gradients, Want
from .layout import kernel_rows, rows
from .matmul import product, transposed_product

__all__ = ["Collapsed", "every_tap"]


class Collapsed:
    """Every tap of an output patch reads the input patch of the same index."""

    def __init__(self, geometry: ConvGeometry, patch: tuple[int, ...]) -> None:
        self.geometry = geometry
        self.out_grid, self.in_grid = geometry.output_grid(patch), geometry.input_grid(patch)
        self.patch = patch
        self.aligned = (
            self.out_grid.coarse_shape[2:] == self.in_grid.coarse_shape[2:] and not geometry.transposed
        )
        self.even = self.aligned and self.out_grid.is_even and self.in_grid.is_even
        self.total = float(prod(self.out_grid.patches)) if self.even else 1.0
        self.same_pixels = self.aligned and all(
            a.size_in == a.size_out and a.stride == 1 for a in geometry.axes
        )
        channels = geometry.x_shape[1] * geometry.y_shape[1] // geometry.groups
        self.macs = self.in_grid.coarse_shape[0] * prod(self.in_grid.coarse_shape[2:]) * channels

    def backward(self, grad: Tensor, x: Tensor | None, weight: Tensor, want: Want) -> Gradients:
        if self.geometry.groups == 1:
            return self._dense_backward(grad, x, weight, want)
        sums = self._sums(grad)
        x_grad = self._per_pixel(self._times_kernel(self._weighed(grad, sums), weight)) if want.x else None
        weight_grad = None
        if want.weight and x is not None:
            weight_grad = every_tap(self._grouped_weight(sums, x, weight), weight)
        return Gradients(x_grad, weight_grad)

    def _dense_backward(self, grad: Tensor, x: Tensor | None, weight: Tensor, want: Want) -> Gradients:
        """Matrix products over all patches at once."""
        sums = self._sums(grad)
        flat = rows(sums)
        x_grad = weight_grad = None
        if want.x:
            matrix = self._summed_kernel(weight)
            found = product(rows(grad) if self.same_pixels and sums is not grad else flat, matrix)
            shape = self.in_grid.coarse_shape
            x_grad = found.view(shape[0], *shape[2:], shape[1])
            x_grad = self._per_pixel(
                x_grad.permute(0, 3, 1, 2) if x_grad.dim() == 4 else x_grad.movedim(-1, 1)
            )
        if want.weight and x is not None:
            out, into = (rows(x), flat) if self.geometry.transposed else (flat, rows(x))
            weight_grad = every_tap(_times(self.total, out, into), weight)
        return Gradients(x_grad, weight_grad)

    def _summed_kernel(self, weight: Tensor) -> Tensor:
        """(O, I), summed over taps, the way round that maps gradients of y to those of x."""
        summed = weight.view(weight.shape[:2]) if self.geometry.taps == 1 else kernel_rows(weight).sum(1)
        return summed.t() if self.geometry.transposed else summed

    def _weighed(self, grad: Tensor, sums: Tensor) -> Tensor:
        """What the kernel is applied to: sums, or means where both maps have the same patches."""
        return grad if self.same_pixels else sums

    def _per_pixel(self, x_grad: Tensor) -> Tensor:
        if self.same_pixels:
            return x_grad
        if self.even:
            return x_grad * (prod(self.out_grid.patches) / prod(self.in_grid.patches))
        return x_grad / pixels(self.in_grid, x_grad)

    def _sums(self, grad: Tensor) -> Tensor:
        """The sum of the gradient over the output patches that belong to each input patch."""
        if self.even:
            return grad
        sums = grad * pixels(self.out_grid, grad)
        if self.aligned:
            return sums
        counts, wanted = self.out_grid.coarse_shape, self.in_grid.coarse_shape
        for i, axis in enumerate(self.geometry.axes):
            d = i + 2
            owner = torch.arange(counts[d])
            if self.geometry.transposed:
                owner = owner * self.out_grid.patches[d] // (axis.stride * self.in_grid.patches[d])
            matrix = torch.zeros(wanted[d], counts[d], dtype=torch.float64)
            matrix[owner.clamp(max=wanted[d] - 1), torch.arange(counts[d])] = 1
            if self.geometry.transposed:
                matrix = _mean_times_pixels(matrix, self.out_grid, self.in_grid, d)
            sums = apply_along(sums, matrix, d)
        return sums

    def _times_kernel(self, grad: Tensor, weight: Tensor) -> Tensor:
        geometry = self.geometry
        ones, zeros = [1] * geometry.spatial, [0] * geometry.spatial
        summed = kernel_rows(weight).sum(1)
        if geometry.is_depthwise:
            return grad * summed.view(1, -1, *ones)
        kernel = summed.view(*summed.shape, *ones)
        return torch.convolution(
            grad, kernel, None, ones, zeros, ones, not geometry.transposed, zeros, geometry.groups
        )

    def _grouped_weight(self, sums: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        geometry = self.geometry
        if geometry.is_depthwise:
            return (rows(sums) * rows(x)).sum(0).unsqueeze(1).mul_(self.total)
        out, into = (x, sums) if geometry.transposed else (sums, x)
        ones, zeros = [1] * geometry.spatial, [0] * geometry.spatial
        like = weight.new_empty(*weight.shape[:2], *ones)
        arguments = (None, ones, zeros, ones, False, zeros, geometry.groups, [False, True, False])
        kernel_grad: Tensor = torch.ops.aten.convolution_backward(out, into, like, *arguments)[1]
        return kernel_grad.flatten(1).mul_(self.total)


def _times(factor: float, a: Tensor, b: Tensor) -> Tensor:
    """a.t() @ b * factor, which is applied where there are fewer numbers."""
    if factor == 1:
        return transposed_product(a, b)
    if len(a) < b.shape[1]:
        return transposed_product(a * factor, b)
    return transposed_product(a, b).mul_(factor)


def every_tap(flat: Tensor, weight: Tensor) -> Tensor:
    """One (O, I) gradient for every tap of the kernel, laid out channels-last."""
    taps = weight.shape[2:]
    if prod(taps) == 1:
        return flat.view(weight.shape)
    wide = flat.view(len(flat), *[1] * len(taps), flat.shape[1]).expand(-1, *taps, -1)
    return wide.contiguous().movedim(-1, 1)


def _mean_times_pixels(matrix: Tensor, source: Grid, target: Grid, dim: int) -> Tensor:
    """Turn a sum over output pixels into their mean, times the pixels of the input patch."""
    line = [Grid((g.shape[dim],), (g.patches[dim],)) for g in (source, target)]
    real, wanted = (torch.as_tensor(pixels(g, matrix)).expand(g.coarse_shape) for g in line)
    owned = (matrix * real).sum(1, keepdim=True).clamp(min=1)
    return matrix / owned * wanted[:, None]
