"""The gradient of a 3x3 kernel on the coarse grid, three ways: torch's, one product of copies, the C++ pass.

    python experiments/kernel_gradient.py

ResNet-18's convolutions at 224 px, batch 8, patch 2; and the same at full size, which nobody uses the pass
for. Times are medians, taken in turn. Where there is AVX-512, the pass serves maps of few patches only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import unfold

from gradfilter.bench.environment import environment
from gradfilter.bench.timing import in_turn, median_of, seconds
from gradfilter.native import kernel_gradient as native

RESULTS = Path(__file__).parent / "results" / "kernel_gradient.json"
BATCH = 8
SHAPES = [(64, 28), (128, 14), (256, 7), (512, 4), (64, 56), (128, 28), (256, 14)]  # channels, side


def main() -> None:
    torch.set_num_threads(2)
    rows = []
    for channels, side in SHAPES:
        grad, x = (
            torch.randn(BATCH, channels, side, side).contiguous(memory_format=torch.channels_last)
            for _ in range(2)
        )
        ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "oneDNN, through torch": with_torch,
            "one product": with_product,
            "C++": with_native,
        }
        for way in ways.values():
            torch.testing.assert_close(way(grad, x), with_torch(grad, x), rtol=1e-3, atol=1e-2)
        times = in_turn({n: partial(seconds, partial(w, grad, x), 0.02) for n, w in ways.items()}, rounds=15)
        for name in ways:
            ms = 1e3 * median_of(times[name]).median
            rows.append({"shape": (BATCH, channels, side, side), "way": name, "ms": ms})
            print((BATCH, channels, side, side), name, f"{ms:.2f} ms", flush=True)
    RESULTS.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


def with_torch(grad: Tensor, x: Tensor) -> Tensor:
    weight = torch.empty(grad.shape[1], x.shape[1], 3, 3).to(memory_format=torch.channels_last)
    settings = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    found: Tensor = torch.ops.aten.convolution_backward(grad, x, weight, *settings)[1]
    return found


def with_product(grad: Tensor, x: Tensor) -> Tensor:
    columns = unfold(x, 3, padding=1).transpose(0, 1).flatten(1)
    return (grad.transpose(0, 1).flatten(1) @ columns.t()).view(grad.shape[1], x.shape[1], 3, 3)


def with_native(grad: Tensor, x: Tensor) -> Tensor:
    axes = [native.Axis(size, size, 3, 1, 1, 1) for size in x.shape[2:]]
    return native.kernel_gradient(grad, x, axes)


if __name__ == "__main__":
    main()
