"""Products of matrices as torch runs them, and as ops/matmul.py does.

    python experiments/products.py

Of a 1x1 convolution on the grid of MobileNetV2 and ResNet-18 at 224 px, batch 8, patch 2: rows times weight,
and gradients of the weight. The last is a 3x3 kernel of ResNet-18, gathered. Times are medians, in turn.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch

from gradfilter.bench.environment import environment
from gradfilter.bench.timing import in_turn, median_of, seconds
from gradfilter.ops.matmul import product, transposed_product

RESULTS = Path(__file__).parent / "results" / "products.json"
# rows, channels of x, channels of y
SHAPES = [
    (25088, 16, 96),
    (6272, 24, 144),
    (1568, 32, 192),
    (392, 96, 576),
    (128, 320, 1280),
    (128, 4608, 512),
]


def main() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES:
        count, inputs, outputs = shape
        x, grad, weight = (
            torch.randn(count, inputs),
            torch.randn(count, outputs),
            torch.randn(inputs, outputs),
        )
        ways = {
            "torch, x w": partial(torch.mm, x, weight),
            "chosen, x w": partial(product, x, weight),
            "torch, g^T x": partial(torch.mm, grad.t(), x),
            "chosen, g^T x": partial(transposed_product, grad, x),
        }
        times = in_turn({name: partial(seconds, way, 0.02) for name, way in ways.items()}, rounds=31)
        for name in ways:
            ms = 1e3 * median_of(times[name]).median
            rows.append({"shape": shape, "way": name, "ms": ms})
            print(shape, name, f"{ms:.2f} ms", flush=True)
    RESULTS.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
