"""How far does a run of two processes part from the same run of one, and how much faster is it?

    python experiments/processes.py

`gradfilter train` on the digits, in float32, 40 steps of 32 samples: by one process with one thread, by two
such processes, and by one process with two threads, where nothing but the order of some sums differs.
Takes half an hour.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file
from torch import Tensor

from gradfilter.bench.environment import environment
from gradfilter.progress import Progress
from gradfilter.training.report import read_report

RESULTS = Path(__file__).parent / "results" / "processes.json"
CASES = {
    "filtered": "",
    "exact": "--method Exact()",
    "HOSVD": "--method HOSVD(variance=0.8)",
    "filtered, cached features": "--augment false",
    "filtered, all layers": "--layers all",
    "filtered, all layers, `--batch 16 --accumulate 2`": "--layers all --batch 16 --accumulate 2",
    "filtered, all layers, `--norm batch`": "--layers all --norm batch",
}
STEPS, SEEDS = 40, range(3)


def main() -> None:
    cases = list(itertools.product(CASES, SEEDS))
    rows = []
    with Progress() as progress:
        for done, (case, seed) in enumerate(cases, 1):
            options = ["--steps", str(STEPS), "--seed", str(seed), *CASES[case].split()]
            alone = trained(options)
            ways = {
                "two_processes": trained(options, processes=2),
                "two_threads": trained(options, threads=2),
            }
            distances = {way: distance(alone.weights, run.weights) for way, run in ways.items()}
            seconds = {way: run.seconds for way, run in (ways | {"alone": alone}).items()}
            rows.append({"case": case, "seed": seed} | distances | {"seconds": seconds})
            progress("runs", done, len(cases))
    record = {"environment": environment(), "steps": STEPS, "rows": rows}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


class Run(NamedTuple):
    weights: dict[str, Tensor]
    seconds: float  # of steps and tests


def trained(options: list[str], processes: int = 1, threads: int = 1) -> Run:
    together = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    launcher = together if processes > 1 else []
    command = [sys.executable, "-m", *launcher, "gradfilter", "train", "--data", "digits", "--shots", "20"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*command, *options, "--out", f"{folder}/run"],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        epochs = read_report(f"{folder}/run/report.json").epochs
        return Run(load_file(f"{folder}/run/last.safetensors"), epochs[-1]["seconds"])


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any number in them."""
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


if __name__ == "__main__":
    main()
