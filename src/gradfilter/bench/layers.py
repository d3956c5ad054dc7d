"""Single layers: the exact backward of a convolution against the filtered one, inside the chain.

Inside the chain means that a coarse gradient comes in and a coarse gradient goes out, as between two filtered
layers. The seven 3x3 layers are those of the gradient-filtering paper's own latency test.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..coarse import CoarseGradient, onto
from ..geometry import ConvAxis, ConvGeometry
from ..methods import Exact, GradientFilter, Method
from ..ops.exact_conv import Want
from ..progress import Tell, silent
from .environment import environment
from .timing import Interval, geometric_mean, in_turn, median_of, ratio_of, seconds

__all__ = ["ARMS", "SHAPES", "WARMUP", "lines", "measure"]

Shape = tuple[int, int, int]  # channels, height, width

SHAPES: tuple[Shape, ...] = (
    (128, 120, 160),
    (256, 60, 80),
    (512, 30, 40),
    (512, 14, 14),
    (256, 14, 14),
    (128, 28, 28),
    (64, 56, 56),
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
    batch: int = 8, rounds: int = 9, shapes: tuple[Shape, ...] = SHAPES, tell: Tell = silent
) -> dict[str, Any]:
    """Time both gradients of every shape with every method; times in milliseconds."""
    found = environment()
    rows = [_measure_shape(batch, rounds, shape, tell) for shape in shapes]
    return {
        "benchmark": "layers",
        "environment": found,
        "batch": batch,
        "rounds": rounds,
        "rows": rows,
        "geometric_mean": {arm: geometric_mean([row["ratio"][arm][0] for row in rows]) for arm in ARMS},
    }


def _measure_shape(batch: int, rounds: int, shape: Shape, tell: Tell) -> dict[str, Any]:
    channels, height, width = shape
    maps = (batch, channels, height, width)
    axes = tuple(ConvAxis(size, size, kernel=3, pad=1, pad_end=1) for size in (height, width))
    geometry = ConvGeometry(maps, maps, axes)
    x, grad, weight = _channels_last(maps), _channels_last(maps), _channels_last((channels, channels, 3, 3))
    arms = {
        name: partial(seconds, _backward(method, x, grad, weight, geometry), LEAST_SECONDS)
        for name, method in ARMS.items()
    }
    name = f"{channels} x {height} x {width}"
    times = in_turn(arms, rounds, WARMUP, tell=lambda step: tell(f"layer {name}", step, rounds + WARMUP))
    return {
        "shape": name,
        "ms": {arm: [1e3 * t for t in median_of(taken)] for arm, taken in times.items()},
        "ratio": {arm: ratio_of(times["exact"], taken) for arm, taken in times.items()},
    }


def _channels_last(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


def _backward(
    method: Method, x: Tensor, grad: Tensor, weight: Tensor, geometry: ConvGeometry
) -> Callable[[], object]:
    """Both gradients from what the layer kept. For ``Exact`` that is one aten.convolution_backward."""
    kept = method.keep(x, geometry)
    grid = geometry.output_grid(method.patches(geometry))
    if not grid.is_dense:
        grad = CoarseGradient(onto(grad, grid), grid)
    return partial(method.gradients, grad, kept, weight, geometry, Want(x=True, weight=True))


def lines(record: dict[str, Any]) -> list[list[str]]:
    """The table: exact in milliseconds, the others as how many times faster, with the interval."""
    means = {arm: mean for arm, mean in record["geometric_mean"].items() if arm != "exact"}
    made = [[f"3x3 layer, batch {record['batch']}", "exact", *means]]
    for row in record["rows"]:
        ratios = [Interval(*row["ratio"][arm]).as_ratio() for arm in means]
        made.append([row["shape"], f"{row['ms']['exact'][0]:.1f} ms", *ratios])
    return [*made, ["geometric mean", "", *(f"{mean:.1f}x" for mean in means.values())]]
