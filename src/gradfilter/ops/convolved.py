"""overlap: one call of torch's convolution backward, on a grid where one coarse kernel serves every patch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..geometry import ConvGeometry
from ..grid import Grid, pixels, pool, regrid
from ..native import kernel_gradient, winograd
from .exact_conv import Gradients, Settings, Want, convolution_backward, stand_in
from .layout import kernel_rows
from .taps import tap_matrix, work_axis

__all__ = ["Convolved"]


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
        sizes = zip(self.axes, self.work_in.coarse_shape[2:], self.work_out.coarse_shape[2:], strict=True)
        self.native_axes = [
            kernel_gradient.Axis(size, outputs, a.columns, a.stride, a.padding, a.dilation)
            for a, size, outputs in sizes
        ]
        # Of the convolution that the input gradient is.
        self.padding_back: Any = tuple(a.columns - 1 - a.padding for a in self.axes)
        self.pixels_out = prod(a.out_patch for a in self.axes)
        self.matrix = tap_matrix(self.axes)
        self._matrices: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}
        near_grid, far_channels = (
            (self.work_in, geometry.y_shape[1])
            if geometry.transposed
            else (self.work_out, geometry.x_shape[1])
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
        x = stand_in(grad, self.work_in.coarse_shape) if x is None else x
        x_grad = kernel_grad = None
        native = want.weight and self.geometry.groups == 1 and kernel_gradient.fits(grad, x, self.native_axes)
        if native:
            kernel_grad = kernel_gradient.kernel_gradient(grad, x, self.native_axes)
        in_tiles = want.x and self._runs_in_tiles(grad)
        if in_tiles:
            back = winograd.pack(kernel.transpose(0, 1).flip(2, 3), None)
            x_grad = winograd.run(grad, back, self.padding_back)
        by_torch = Want(want.x and not in_tiles, want.weight and not native)
        if any(by_torch):
            found = convolution_backward(grad, x, kernel, self._settings(), by_torch)
            x_grad = x_grad if in_tiles else found.x
            kernel_grad = kernel_grad if native else found.weight
        return Gradients(None if x_grad is None else self._per_pixel(x_grad), kernel_grad)

    def _runs_in_tiles(self, grad: Tensor) -> bool:
        """Whether the input gradient is a 3x3 convolution that winograd.cpp is faster at."""
        plain = all(a.columns == 3 and a.stride == a.dilation == 1 for a in self.axes)
        return (
            plain
            and len(self.axes) == 2
            and self.geometry.groups == 1
            and winograd.fits(grad, self.geometry.x_shape[1], self.padding_back)
        )

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
            wanted = Want(False, True)
            kernel_grad = convolution_backward(x.contiguous(), grad, kernel, settings, wanted).weight
        return Gradients(x_grad, kernel_grad)

    def _settings(self) -> Settings:
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
