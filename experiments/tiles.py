"""A frozen 3x3 convolution with its ReLU, two ways: oneDNN with packed weights, and in tiles (winograd.cpp).

    python experiments/tiles.py

ResNet-18's convolutions at 224 px, batch 8 and 1. Times are medians, taken in turn; errors are against
float64, of the largest value.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from gradfilter.bench.environment import environment
from gradfilter.bench.timing import in_turn, median_of, seconds
from gradfilter.native import winograd

RESULTS = Path(__file__).parent / "results" / "tiles.json"
# batch, channels, side
SHAPES = [
    (8, 64, 56),
    (8, 128, 28),
    (8, 256, 14),
    (8, 512, 7),
    (1, 64, 56),
    (1, 256, 14),
]
ONES = [1, 1]


def main() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    rows = []
    for batch, channels, side in SHAPES:
        shape = (batch, channels, side, side)
        x = torch.randn(shape).relu_().contiguous(memory_format=torch.channels_last)
        weight, bias = torch.randn(channels, channels, 3, 3) / channels, torch.randn(channels)
        exact = conv2d(x.double(), weight.double(), bias.double(), padding=1).relu_()
        ways = {"oneDNN": with_one_dnn(x, weight, bias), "tiles": in_tiles(x, weight, bias)}
        times = in_turn({name: partial(seconds, way, 0.02) for name, way in ways.items()}, rounds=31)
        for name, way in ways.items():
            ms = 1e3 * median_of(times[name]).median
            error = float((way() - exact).abs().max() / exact.abs().max())
            rows.append({"shape": shape, "way": name, "ms": ms, "error": error})
            print(shape, name, f"{ms:.2f} ms, error {error:.1e}", flush=True)
    RESULTS.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


def with_one_dnn(x: Tensor, weight: Tensor, bias: Tensor) -> partial[Tensor]:
    reorder = torch._C._nn.mkldnn_reorder_conv2d_weight
    packed = reorder(weight.to_mkldnn(), ONES, ONES, ONES, 1, list(x.shape))
    run = torch.ops.mkldnn._convolution_pointwise
    return partial(run, x, packed, bias, ONES, ONES, ONES, 1, "relu", [], "")


def in_tiles(x: Tensor, weight: Tensor, bias: Tensor) -> partial[Tensor]:
    return partial(winograd.run, x, winograd.pack(weight, bias), (1, 1), (0.0, float("inf")))


if __name__ == "__main__":
    main()
