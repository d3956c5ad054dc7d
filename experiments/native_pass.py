"""Four ways to write the pooled pass: patch means of a channels-last map, and the open pixels of its gate.

    pip install numba                       # only here; without it that row says so
    python experiments/native_pass.py

Torch's operators; the same under torch.compile; Numba; the C++ of src/gradfilter/native. Times are medians,
taken in turn; the first call of each, with its compiling, is given apart.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from gradfilter import native
from gradfilter.bench.environment import environment
from gradfilter.bench.timing import in_turn, median_of, seconds

RESULTS = Path(__file__).parent / "results" / "native_pass.json"
SHAPES = ((8, 96, 112, 112), (8, 144, 56, 56), (8, 384, 14, 14), (8, 960, 7, 7))
BOUNDS = (0.0, 6.0)
Pass = Callable[[Tensor], Any]


def main() -> None:
    torch.set_num_threads(2)
    ways: dict[str, Pass] = {"torch operators": with_torch, "torch.compile": torch.compile(with_torch)}
    ways["C++"] = with_native
    try:
        ways["Numba"] = with_numba()
    except ImportError as missing:
        print(f"Numba: {missing}")
    rows = []
    for shape in SHAPES:
        y = torch.rand(shape).mul_(8).sub_(1).clamp_(*BOUNDS).to(memory_format=torch.channels_last)
        first = {name: once(way, y) for name, way in ways.items()}
        calls = {name: partial(seconds, partial(way, y), 0.02) for name, way in ways.items()}
        times = in_turn(calls, rounds=9)
        for name in ways:
            ms = 1e3 * median_of(times[name]).median
            rows.append({"shape": shape, "way": name, "ms": ms, "first_s": first[name]})
            print(shape, name, f"{ms:.2f} ms, first call {first[name]:.2f} s", flush=True)
    RESULTS.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


def once(way: Pass, y: Tensor) -> float:
    start = time.perf_counter()
    way(y)
    return time.perf_counter() - start


def with_torch(y: Tensor) -> tuple[Tensor, Tensor]:
    pool = {"kernel_size": 2, "ceil_mode": True, "count_include_pad": False}
    is_open = ((y > BOUNDS[0]) & (y < BOUNDS[1])).to(y.dtype)
    total = avg_pool2d(torch.ones_like(y[:1, :1]), 2, ceil_mode=True, divisor_override=1)
    return avg_pool2d(y, **pool), (avg_pool2d(is_open, **pool) * total).round().to(torch.uint8)


def with_native(y: Tensor) -> tuple[Tensor, Tensor]:
    coarse = (*y.shape[:2], *(math.ceil(n / 2) for n in y.shape[2:]))
    return native.open_pixels_and_means(y, (2, 2), coarse, BOUNDS)


def with_numba() -> Pass:
    import numba
    import numpy as np

    numba.set_num_threads(2)

    @numba.njit(parallel=True, fastmath=True)
    def sweep(y: Any, means: Any, count: Any, low: float, high: float) -> None:
        batch, height, width, channels = y.shape
        rows = (height + 1) // 2
        for item in numba.prange(batch * rows):
            n, i = item // rows, item % rows
            for j in range((width + 1) // 2):
                pixels = 0
                for h in range(2 * i, min(2 * i + 2, height)):
                    for w in range(2 * j, min(2 * j + 2, width)):
                        pixels += 1
                        for c in range(channels):
                            means[n, i, j, c] += y[n, h, w, c]
                            count[n, i, j, c] += (y[n, h, w, c] > low) & (y[n, h, w, c] < high)
                for c in range(channels):
                    means[n, i, j, c] /= pixels

    def run(y: Tensor) -> tuple[Any, Any]:
        maps = y.permute(0, 2, 3, 1).numpy()
        shape = (maps.shape[0], -(-maps.shape[1] // 2), -(-maps.shape[2] // 2), maps.shape[3])
        means, count = np.zeros(shape, np.float32), np.zeros(shape, np.uint8)
        sweep(maps, means, count, *BOUNDS)
        return means, count

    return run


if __name__ == "__main__":
    main()
