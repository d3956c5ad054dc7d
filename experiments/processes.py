"""How far does a run part from the same run with its batches shared out to two processes?

    python experiments/processes.py

`gradfilter train` on the digits, in float32, with steps of 32 samples: by one process with one thread, by two
such processes, and by one process with two threads. The last is the yardstick: nothing but the order of some
sums differs there. And by one and two processes with steps of two batches of 16, of which each has one.
Takes a quarter of an hour.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from gradfilter.bench.environment import environment
from gradfilter.progress import Progress

RESULTS = Path(__file__).parent / "results" / "processes.json"
METHODS = {"filtered": [], "exact": ["--method", "Exact()"]}
STEPS, SEEDS = (14, 40), range(3)
WHOLE_BATCHES = ["--batch", "16", "--accumulate", "2"]


def main() -> None:
    cases = list(itertools.product(METHODS, STEPS, SEEDS))
    rows = []
    with Progress() as progress:
        for done, (method, steps, seed) in enumerate(cases, 1):
            options = ["--steps", str(steps), "--seed", str(seed), *METHODS[method]]
            alone, alone_whole = trained(options), trained([*options, *WHOLE_BATCHES])
            distances = {
                "two_processes": distance(alone, trained(options, processes=2)),
                "two_threads": distance(alone, trained(options, threads=2)),
                "whole_batches": distance(alone_whole, trained([*options, *WHOLE_BATCHES], processes=2)),
            }
            rows.append({"method": method, "steps": steps, "seed": seed} | distances)
            progress("runs", done, len(cases))
    RESULTS.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


def trained(options: list[str], processes: int = 1, threads: int = 1) -> dict[str, Tensor]:
    """The weights that a run ends with."""
    launcher = ["torch.distributed.run", "--nproc-per-node", str(processes), "-m"] if processes > 1 else []
    command = [sys.executable, "-m", *launcher, "gradfilter", "train", "--data", "digits", "--shots", "20"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*command, "--batch", "32", *options, "--out", f"{folder}/run"],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return load_file(f"{folder}/run/last.safetensors")


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any number in them."""
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


if __name__ == "__main__":
    main()
