"""Single layers: the exact backward of a convolution against the filtered one, inside the chain.

Inside the chain means that a coarse gradient comes in and a coarse gradient goes out, as between two filtered
layers. The seven plain 3x3 layers are those of the gradient-filtering paper's own latency test; the geometric
mean is over them alone, whatever else is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..coarse import CoarseGradient, onto
from ..geometry import ConvAxis, ConvGeometry
from ..methods import Exact, GradientFilter, Method
from ..ops.exact_conv import Want
from ..progress import Tell, silent
from .environment import device_named, environment, wait_for
from .timing import Interval, geometric_mean, in_turn, median_of, ratio_of, seconds

__all__ = ["ARMS", "OTHERS", "SHAPES", "WARMUP", "Shape", "lines", "measure"]


class Shape(NamedTuple):
    """A convolution with as many channels out as in, padded so that a map keeps its size or is strided."""

    channels: int
    height: int
    width: int
    kernel: int = 3
    stride: int = 1
    dilation: int = 1
    groups: int = 1

    @property
    def is_plain(self) -> bool:
        return self == Shape(*self[:3])

    def __str__(self) -> str:
        """The map, and how the layer differs from a plain 3x3.

        >>> str(Shape(64, 56, 56)), str(Shape(64, 28, 28, stride=2))
        ('64 x 56 x 56', '64 x 28 x 28, stride 2')
        """
        traits = [f"{self.kernel}x{self.kernel}"] * (self.kernel != 3)
        traits += [f"{trait} {n}" for trait in ("stride", "dilation") if (n := getattr(self, trait)) > 1]
        traits += ["depthwise"] * (self.groups == self.channels)
        return ", ".join([" x ".join(map(str, self[:3])), *traits])

    def geometry(self, batch: int) -> ConvGeometry:
        reach = self.dilation * (self.kernel - 1)
        axes = tuple(
            ConvAxis(
                size,
                (size - 1) // self.stride + 1,
                self.kernel,
                self.stride,
                self.dilation,
                reach // 2,
                reach // 2,
            )
            for size in self[1:3]
        )
        x, y = (
            (batch, self.channels, *sizes)
            for sizes in zip(*((a.size_in, a.size_out) for a in axes), strict=True)
        )
        return ConvGeometry(x, y, axes, self.groups)


SHAPES = (
    Shape(128, 120, 160),
    Shape(256, 60, 80),
    Shape(512, 30, 40),
    Shape(512, 14, 14),
    Shape(256, 14, 14),
    Shape(128, 28, 28),
    Shape(64, 56, 56),
)
OTHERS = (
    Shape(128, 56, 56, stride=2),
    Shape(256, 28, 28, dilation=2),
    Shape(192, 28, 28, groups=192),
    Shape(256, 28, 28, kernel=1),
)
ARMS: dict[str, Method] = {
    "exact": Exact(),
    "collapse 2": GradientFilter(2, "collapse"),
    "collapse 4": GradientFilter(4, "collapse"),
    "overlap 2": GradientFilter(2, "overlap"),
    "overlap 4": GradientFilter(4, "overlap"),
}
WARMUP = 2  # rounds
LEAST_SECONDS = 0.02  # per sample


def measure(
    batch: int = 8,
    rounds: int = 9,
    shapes: Sequence[tuple[int, ...]] = SHAPES + OTHERS,
    dtype: str = "float32",
    device: str = "cpu",
    tell: Tell = silent,
) -> dict[str, Any]:
    """Time both gradients of every shape with every method; times in milliseconds."""
    found = environment()
    make = partial(_channels_last, dtype=getattr(torch, dtype), device=device_named(device))
    rows = [_measure_shape(batch, rounds, Shape(*shape), make, tell) for shape in shapes]
    plain = [row for row in rows if row["plain"]]
    return {
        "benchmark": "layers",
        "environment": found,
        "batch": batch,
        "rounds": rounds,
        "dtype": dtype,
        "device": device,
        "rows": rows,
        "geometric_mean": {arm: geometric_mean([row["ratio"][arm][0] for row in plain]) for arm in ARMS},
    }


def _measure_shape(
    batch: int, rounds: int, shape: Shape, make: Callable[[tuple[int, ...]], Tensor], tell: Tell
) -> dict[str, Any]:
    geometry = shape.geometry(batch)
    x, grad = make(geometry.x_shape), make(geometry.y_shape)
    weight = make((shape.channels, shape.channels // shape.groups, shape.kernel, shape.kernel))
    arms = {
        name: partial(seconds, _backward(method, x, grad, weight, geometry), LEAST_SECONDS)
        for name, method in ARMS.items()
    }
    times = in_turn(arms, rounds, WARMUP, tell=lambda step: tell(f"layer {shape}", step, rounds + WARMUP))
    return {
        "shape": str(shape),
        "plain": shape.is_plain,
        "ms": {arm: [1e3 * t for t in median_of(taken)] for arm, taken in times.items()},
        "ratio": {arm: ratio_of(times["exact"], taken) for arm, taken in times.items()},
    }


def _channels_last(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape).to(device, dtype, memory_format=torch.channels_last)


def _backward(
    method: Method, x: Tensor, grad: Tensor, weight: Tensor, geometry: ConvGeometry
) -> Callable[[], object]:
    """Both gradients from what the layer kept. For ``Exact`` that is one aten.convolution_backward."""
    kept = method.keep(x, geometry, {})
    grid = geometry.output_grid(method.patches(geometry))
    if not grid.is_dense:
        grad = CoarseGradient(onto(grad, grid), grid)
    gradients = partial(method.gradients, grad, kept, weight, geometry, Want(x=True, weight=True))

    def call() -> object:
        made = gradients()
        wait_for(x.device)
        return made

    return call


def lines(record: dict[str, Any]) -> list[list[str]]:
    """The table: exact in milliseconds, the others as how many times faster, with the interval."""
    means = {arm: mean for arm, mean in record["geometric_mean"].items() if arm != "exact"}
    made = [[f"3x3 layer, batch {record['batch']}", "exact", *means]]
    rows = sorted(
        record["rows"], key=lambda row: not row.get("plain", True)
    )  # older records have plain ones alone
    body = [
        [
            row["shape"],
            f"{row['ms']['exact'][0]:.1f} ms",
            *(Interval(*row["ratio"][arm]).as_ratio() for arm in means),
        ]
        for row in rows
    ]
    plain = sum(row.get("plain", True) for row in rows)
    title = "geometric mean" if plain == len(rows) else f"geometric mean of these {plain}, the paper's"
    mean = [title, "", *(f"{mean:.1f}x" for mean in means.values())]
    return [*made, *body[:plain], mean, *body[plain:]]
