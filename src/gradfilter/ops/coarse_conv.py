"""The backward of a convolution on the grid: from patch means of gradient and input to patch means and weights.

With g and x constant on their patches, the exact backward, averaged over input patches, is a convolution
backward on patch values. ``overlap`` runs it as one call of torch's convolution backward with the coarse kernel
(``Convolved``), or as matrix products over gathered taps (``Gathered``), cheaper for ragged maps of few patches
and many channels. ``collapse`` counts every tap as the patch itself, so the kernel becomes 1x1 (``Collapsed``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from ..geometry import ConvGeometry
from ..grid import Grid, apply_along, pixels, pool, regrid
from .exact_conv import Gradients, Want
from .taps import tap_counts, tap_matrix, work_axis

__all__ = ["coarse_backward", "coarse_macs"]

aten = torch.ops.aten


def coarse_backward(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor,
    geometry: ConvGeometry,
    patch: tuple[int, ...],
    taps: str,
    want: Want,
) -> Gradients:
    """Gradients from the patch means ``grad`` and ``x``: patch means for x, full size for the weight."""
    return _strategy(geometry, patch, taps).backward(grad, x, weight, want)


def coarse_macs(geometry: ConvGeometry, patch: tuple[int, ...], taps: str) -> int:
    """Multiply-adds of one of the two gradients."""
    return _strategy(geometry, patch, taps).macs


def _strategy(geometry: ConvGeometry, patch: tuple[int, ...], taps: str) -> Strategy:
    known: Strategy | None = geometry.memo.get((patch, taps))
    if known is None:
        known = geometry.memo[patch, taps] = _choose(geometry, patch, taps)
    return known


def _choose(geometry: ConvGeometry, patch: tuple[int, ...], taps: str) -> Strategy:
    one_tap = all(axis.is_pointwise for axis in geometry.axes) and not geometry.transposed
    if taps == "collapse" or one_tap:
        return Collapsed(geometry, patch)
    convolved = Convolved(geometry, patch)
    if geometry.transposed or not (geometry.groups == 1 or _is_depthwise(geometry)):
        return convolved
    other = Gathered(geometry, patch) if geometry.groups == 1 else Paired(geometry, patch)
    return other if other.cost < convolved.macs else convolved


def rows(maps: Tensor) -> Tensor:
    """(N, C, spatial...) as the matrix (N * spatial, C); a view where maps are channels-last."""
    if maps.dim() == 4:
        return maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1])
    return maps.movedim(1, -1).reshape(-1, maps.shape[1])


def kernel_rows(weight: Tensor) -> Tensor:
    """(O, I, taps...) as (O, taps, I); a view where the kernel is channels-last."""
    return weight.movedim(1, -1).reshape(weight.shape[0], -1, weight.shape[1])


class Collapsed:
    """Every tap of an output patch reads the input patch of the same index."""

    def __init__(self, geometry: ConvGeometry, patch: tuple[int, ...]) -> None:
        self.geometry = geometry
        self.out_grid, self.in_grid = geometry.output_grid(patch), geometry.input_grid(patch)
        self.patch = patch
        self.aligned = self.out_grid.coarse_shape[2:] == self.in_grid.coarse_shape[2:] and not geometry.transposed
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
            weight_grad = _every_tap(self._grouped_weight(sums, x, weight), weight)
        return Gradients(x_grad, weight_grad)

    def _dense_backward(self, grad: Tensor, x: Tensor | None, weight: Tensor, want: Want) -> Gradients:
        """Matrix products over all patches at once."""
        sums = self._sums(grad)
        flat = rows(sums)
        x_grad = weight_grad = None
        if want.x:
            matrix = self._summed_kernel(weight)
            product = (rows(grad) if self.same_pixels and sums is not grad else flat) @ matrix
            shape = self.in_grid.coarse_shape
            x_grad = product.view(shape[0], *shape[2:], shape[1])
            x_grad = self._per_pixel(x_grad.permute(0, 3, 1, 2) if x_grad.dim() == 4 else x_grad.movedim(-1, 1))
        if want.weight and x is not None:
            out, into = (rows(x), flat) if self.geometry.transposed else (flat, rows(x))
            weight_grad = _every_tap(_scaled_product(out.t(), into, self.total), weight)
        return Gradients(x_grad, weight_grad)

    def _summed_kernel(self, weight: Tensor) -> Tensor:
        """(O, I), summed over taps, the way round that maps gradients of y to those of x."""
        if self.geometry.taps == 1:
            summed = weight.view(weight.shape[:2])
        else:
            summed = kernel_rows(weight).sum(1)
        return summed.t() if self.geometry.transposed else summed

    def _weighed(self, grad: Tensor, sums: Tensor) -> Tensor:
        """What the kernel is applied to: sums over patches, or means where both maps have the same patches."""
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
        if _is_depthwise(geometry):
            return grad * summed.view(1, -1, *ones)
        kernel = summed.view(*summed.shape, *ones)
        return torch.convolution(
            grad, kernel, None, ones, zeros, ones, not geometry.transposed, zeros, geometry.groups
        )

    def _grouped_weight(self, sums: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        geometry = self.geometry
        if _is_depthwise(geometry):
            return (rows(sums) * rows(x)).sum(0).unsqueeze(1).mul_(self.total)
        out, into = (x, sums) if geometry.transposed else (sums, x)
        ones, zeros = [1] * geometry.spatial, [0] * geometry.spatial
        like = weight.new_empty(*weight.shape[:2], *ones)
        arguments = (None, ones, zeros, ones, False, zeros, geometry.groups, [False, True, False])
        return aten.convolution_backward(out, into, like, *arguments)[1].flatten(1).mul_(self.total)


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    if scale == 1:
        return a @ b
    return torch.addmm(_nothing(a.dtype, a.device), a, b, beta=0, alpha=scale)  # scaling costs no pass


@lru_cache(maxsize=64)
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=dtype, device=device)


def _every_tap(flat: Tensor, weight: Tensor) -> Tensor:
    """One (O, I) gradient for every tap of the kernel, laid out channels-last."""
    taps = weight.shape[2:]
    if prod(taps) == 1:
        return flat.view(weight.shape)
    wide = flat.view(len(flat), *[1] * len(taps), flat.shape[1]).expand(-1, *taps, -1)
    return wide.contiguous().movedim(-1, 1)


def _is_depthwise(geometry: ConvGeometry) -> bool:
    return geometry.x_shape[1] == geometry.y_shape[1] == geometry.groups


def _mean_times_pixels(matrix: Tensor, source: Grid, target: Grid, dim: int) -> Tensor:
    """Turn a sum over output pixels into their mean, times the pixels of the input patch."""
    line = [Grid((g.shape[dim],), (g.patches[dim],)) for g in (source, target)]
    real, wanted = (torch.as_tensor(pixels(g, matrix)).expand(g.coarse_shape) for g in line)
    owned = (matrix * real).sum(1, keepdim=True).clamp(min=1)
    return matrix / owned * wanted[:, None]


class Convolved:
    """A convolution on the grid, refined where a ragged map asks for it."""

    def __init__(self, geometry: ConvGeometry, patch: tuple[int, ...]) -> None:
        self.geometry = geometry
        self.out_grid, self.in_grid = geometry.output_grid(patch), geometry.input_grid(patch)
        x_patch, y_patch = self.in_grid.patches[2:], self.out_grid.patches[2:]
        full = [p if geometry.transposed else p * a.stride for p, a in zip(patch, geometry.axes, strict=True)]
        near, far = (x_patch, tuple(patch)) if geometry.transposed else (y_patch, tuple(full))
        self.axes = tuple(work_axis(a, p, q) for a, p, q in zip(geometry.axes, near, far, strict=True))
        near_sides = (1, 1, *(a.out_patch for a in self.axes))
        far_sides = (1, 1, *(a.in_patch for a in self.axes))
        x_sides, y_sides = (near_sides, far_sides) if geometry.transposed else (far_sides, near_sides)
        self.work_in, self.work_out = Grid.of(geometry.x_shape, x_sides), Grid.of(geometry.y_shape, y_sides)
        self.columns = tuple(a.columns for a in self.axes)
        self.pixels_out = prod(a.out_patch for a in self.axes)
        self.matrix = tap_matrix(self.axes)
        self._matrices: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}
        near_grid, far_channels = (
            (self.work_in, geometry.y_shape[1]) if geometry.transposed else (self.work_out, geometry.x_shape[1])
        )
        self.macs = prod(near_grid.coarse_shape) * far_channels // geometry.groups * prod(self.columns)

    def backward(self, grad: Tensor, x: Tensor | None, weight: Tensor, want: Want) -> Gradients:
        grad = regrid(grad, self.out_grid, self.work_out)
        x = None if x is None else regrid(x, self.in_grid, self.work_in)
        kernel = self._coarse_kernel(weight)
        run = self._transposed if self.geometry.transposed else self._direct
        x_grad, kernel_grad = run(grad, x, kernel, want)
        if x_grad is not None:
            x_grad = self._average(x_grad)
        if kernel_grad is not None:
            kernel_grad = self._fine_kernel(kernel_grad, weight)
        return Gradients(x_grad, kernel_grad)

    def _direct(self, grad: Tensor, x: Tensor | None, kernel: Tensor, want: Want) -> Gradients:
        if x is None:
            x = grad.new_empty(self.work_in.coarse_shape)
        arguments = (None, *self._settings(), [want.x, want.weight, False])
        x_grad, kernel_grad, _ = aten.convolution_backward(grad, x, kernel, *arguments)
        if x_grad is not None:
            x_grad = self._per_pixel(x_grad)
        return Gradients(x_grad, kernel_grad)

    def _per_pixel(self, x_grad: Tensor) -> Tensor:
        share = pixels(self.work_in, x_grad)
        if isinstance(share, float):
            return x_grad if share == self.pixels_out else x_grad * (self.pixels_out / share)
        return x_grad * (self.pixels_out / share)

    def _transposed(self, grad: Tensor, x: Tensor | None, kernel: Tensor, want: Want) -> Gradients:
        """The transpose of a convolution from y to x: its input gradient is that convolution."""
        settings = self._settings()
        x_grad = torch.convolution(grad, kernel, None, *settings) if want.x else None
        kernel_grad = None
        if want.weight and x is not None:
            arguments = (None, *settings, [False, True, False])
            kernel_grad = aten.convolution_backward(x.contiguous(), grad, kernel, *arguments)[1]
        return Gradients(x_grad, kernel_grad)

    def _settings(self) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
        axes = self.axes
        zeros = [0] * len(axes)
        stride, padding = [a.stride for a in axes], [a.padding for a in axes]
        return stride, padding, [a.dilation for a in axes], False, zeros, self.geometry.groups

    def _average(self, x_grad: Tensor) -> Tensor:
        """From the work grid, whose patches are all alike, to the input grid."""
        if self.work_in.patches == self.in_grid.patches:
            return x_grad
        steps = [r // w for r, w in zip(self.in_grid.patches, self.work_in.patches, strict=True)]
        if all(r % w == 0 for r, w in zip(self.in_grid.patches, self.work_in.patches, strict=True)):
            return pool(x_grad, Grid.of(tuple(x_grad.shape), tuple(steps)))
        return regrid(x_grad, self.work_in, self.in_grid)

    def _coarse_kernel(self, weight: Tensor) -> Tensor:
        if self.matrix is None:
            return weight
        return _mix_taps(weight, self._matrix_for(weight)[0], self.columns)

    def _fine_kernel(self, kernel_grad: Tensor, weight: Tensor) -> Tensor:
        if self.matrix is None:
            return kernel_grad if self.pixels_out == 1 else kernel_grad * self.pixels_out
        return _mix_taps(kernel_grad, self._matrix_for(weight)[1], weight.shape[2:])

    def _matrix_for(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Taps to coarse kernel, and back times the pixels of an output patch."""
        key = (like.dtype, like.device)
        if key not in self._matrices and self.matrix is not None:
            matrix = self.matrix.to(dtype=like.dtype, device=like.device)
            self._matrices[key] = (matrix.t().contiguous(), matrix * self.pixels_out)
        return self._matrices[key]


def _mix_taps(kernel: Tensor, matrix: Tensor, taps: Sequence[int]) -> Tensor:
    """Multiply the taps of a kernel by a (new x old) matrix."""
    if kernel.shape[1] == 1:
        return (kernel.reshape(len(kernel), -1) @ matrix.t()).view(len(kernel), 1, *taps)
    return (matrix @ kernel_rows(kernel)).view(len(kernel), *taps, kernel.shape[1]).movedim(-1, 1)


class Gathered:
    """Matrix products over taps gathered from patches: exact for ragged maps at their own patch."""

    def __init__(self, geometry: ConvGeometry, patch: tuple[int, ...]) -> None:
        self.geometry = geometry
        self.out_grid, self.in_grid = geometry.output_grid(patch), geometry.input_grid(patch)
        p, q = self.out_grid.patches[2:], self.in_grid.patches[2:]
        self.counts = [tap_counts(a, r, s) for a, r, s in zip(geometry.axes, p, q, strict=True)]
        self._tables: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        n, channels_out, *outputs = self.out_grid.coarse_shape
        channels_in, inputs = self.in_grid.coarse_shape[1], self.in_grid.coarse_shape[2:]
        self.macs = n * prod(outputs) * geometry.taps * channels_out * channels_in
        gathering = n * prod(outputs) * geometry.taps * channels_in * max(inputs)
        self.cost = self.macs + 8 * gathering  # gathering moves memory: each of its products is dearer

    def backward(self, grad: Tensor, x: Tensor | None, weight: Tensor, want: Want) -> Gradients:
        tables, flat = self._tables_for(grad), rows(grad)
        x_grad = self._spread(flat @ kernel_rows(weight).flatten(1), tables) if want.x else None
        if x_grad is not None:
            x_grad = x_grad / pixels(self.in_grid, x_grad)
        weight_grad = None
        if want.weight and x is not None:
            product = flat.t() @ self._gather(x, tables)
            weight_grad = product.view(len(weight), *weight.shape[2:], -1).movedim(-1, 1)
        return Gradients(x_grad, weight_grad)

    def _gather(self, x: Tensor, tables: list[Tensor]) -> Tensor:
        """(N * output patches, taps * C): what each tap of each output patch reads."""
        lead, moved = x.shape[0], x.movedim(1, -1)
        tail = prod(x.shape[1:])
        for table, size in zip(tables, self.in_grid.coarse_shape[2:], strict=True):
            tail //= size
            moved = table @ moved.reshape(lead, size, tail)
            lead *= len(table)
        split = [n for c in self.counts for n in (c.shape[1], c.shape[0])]
        axes = len(tables)
        order = [0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 1]
        taken = moved.reshape(x.shape[0], *split, x.shape[1]).permute(order)
        return taken.reshape(x.shape[0] * prod(self.out_grid.coarse_shape[2:]), self.geometry.taps * x.shape[1])

    def _spread(self, products: Tensor, tables: list[Tensor]) -> Tensor:
        """The transpose of ``_gather``: back to (N, C, input patches)."""
        n, channels = self.geometry.x_shape[:2]
        axes = len(tables)
        patches = [c.shape[1] for c in self.counts]
        kernel = [c.shape[0] for c in self.counts]
        order = [0, *(i for a in range(axes) for i in (1 + a, 1 + axes + a)), 1 + 2 * axes]
        moved = products.view(n, *patches, *kernel, channels).permute(order)
        lead = n * prod(len(t) for t in tables)
        tail = channels
        for table, size in zip(reversed(tables), reversed(self.in_grid.coarse_shape[2:]), strict=True):
            lead //= len(table)
            moved = table.t() @ moved.reshape(lead, len(table), tail)
            tail *= size
        return moved.view(n, *self.in_grid.coarse_shape[2:], channels).movedim(-1, 1)

    def _tables_for(self, like: Tensor) -> list[Tensor]:
        """Per axis the (output patches * taps, input patches) matrix of counts."""
        key = (like.dtype, like.device)
        if key not in self._tables:
            self._tables[key] = [
                c.transpose(0, 1).reshape(-1, c.shape[2]).to(dtype=like.dtype, device=like.device)
                for c in self.counts
            ]
        return self._tables[key]


class Paired:
    """Depthwise, on maps of a handful of patches: every pair of an output and an input patch at once."""

    def __init__(self, geometry: ConvGeometry, patch: tuple[int, ...]) -> None:
        self.geometry = geometry
        self.out_grid, self.in_grid = geometry.output_grid(patch), geometry.input_grid(patch)
        self.pairs = (prod(self.in_grid.coarse_shape[2:]), prod(self.out_grid.coarse_shape[2:]))
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self.macs = geometry.x_shape[0] * geometry.x_shape[1] * prod(self.pairs)
        self.cost = 8 * self.macs  # elementwise work, against a tuned convolution

    def backward(self, grad: Tensor, x: Tensor | None, weight: Tensor, want: Want) -> Gradients:
        n, channels = self.geometry.x_shape[:2]
        table, (inputs, outputs) = self._table_for(grad), self.pairs
        g = rows(grad).view(n, 1, outputs, channels)
        x_grad = weight_grad = None
        if want.x:
            links = (table.t() @ weight.reshape(channels, -1).t()).view(1, inputs, outputs, channels)
            sums = (g * links).sum(2).view(n, *self.in_grid.coarse_shape[2:], channels).movedim(-1, 1)
            x_grad = sums / pixels(self.in_grid, sums)
        if want.weight and x is not None:
            products = (g * rows(x).view(n, inputs, 1, channels)).sum(0).view(inputs * outputs, channels)
            weight_grad = (table @ products).t().reshape(weight.shape)
        return Gradients(x_grad, weight_grad)

    def _table_for(self, like: Tensor) -> Tensor:
        """(taps, input patches * output patches): how often each tap links the two."""
        key = (like.dtype, like.device)
        if key not in self._tables:
            p, q = self.out_grid.patches[2:], self.in_grid.patches[2:]
            counts = [tap_counts(a, r, s) for a, r, s in zip(self.geometry.axes, p, q, strict=True)]
            table = torch.ones(1, 1, 1, dtype=torch.float64)
            for count in counts:
                table = torch.einsum("tqp,kab->tkqbpa", table, count).reshape(
                    len(table) * len(count), table.shape[1] * count.shape[2], -1
                )
            self._tables[key] = table.flatten(1).to(dtype=like.dtype, device=like.device)
        return self._tables[key]


Strategy = Collapsed | Convolved | Gathered | Paired
