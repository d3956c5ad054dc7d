"""Peak memory of a step of all layers of MobileNetV2, batch 32, 224 px: exact, and methods that keep less.

    python experiments/peaks.py

Fresh processes, above model, gradients and optimizer (see gradfilter/bench/memory.py). Takes some minutes.
Needs torchvision and MobileNetV2's weights on this machine; pictures are noise, which compresses worst.
"""

from __future__ import annotations

import json
from pathlib import Path

from gradfilter.bench import report
from gradfilter.bench.arm import Settings
from gradfilter.bench.environment import environment
from gradfilter.bench.memory import peak_of_step
from gradfilter.plans import format_bytes

RESULTS = Path(__file__).parent / "results" / "peaks.json"
METHODS = ("GradientFilter(2)", "Quantized(4)", "SubspaceIteration(rank=8)", "HOSVD(0.8)")


def main() -> None:
    settings = {"layers": "all", "batch": 32, "weights": "auto"}
    rows = [{"method": "exact", "peak_bytes": peak_of_step(Settings("mobilenet_v2", **settings), "exact")}]
    for method in METHODS:
        peak = peak_of_step(Settings("mobilenet_v2", method=method, **settings), "filter")
        rows.append({"method": method, "peak_bytes": peak})
        print(method, format_bytes(peak), f"{peak / rows[0]['peak_bytes']:.3f} of exact", flush=True)
    record = {"environment": environment(), "settings": settings, "rows": rows}
    report.write(str(RESULTS), json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
