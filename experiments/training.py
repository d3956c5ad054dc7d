"""Fine-tuning on real data from one command: exact, filtered (overlap, collapse), HOSVD; official tests.

    python experiments/training.py                     all cases; runs that are there are skipped
    python experiments/training.py pets cifar10        some of them
    python experiments/training.py pets --seeds 0 1 2

Every run is `gradfilter train` with the options below; what it leaves is summed up in
results/training/CASE.json with its command, its curve and its conditions. Needs ../shared (data and weights).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from gradfilter.bench import report
from gradfilter.plans import table

SHARED = Path(__file__).parents[2] / "shared"
RESULTS = Path(__file__).parent / "results" / "training"
ARMS = {
    "exact": "--method Exact()",
    "overlap": "--patch 2 --taps overlap",
    "collapse": "--patch 2 --taps collapse",
    "HOSVD": "--method HOSVD(variance=0.8)",
}
SGD = "--optimizer sgd --momentum 0.9 --weight-decay 1e-4 --clip 2"
CASES = {
    "pets": f"--data {{pets}} --task classify --size 128 --model mobilenet_v2 --weights {{mobilenet_v2}} "
    f"--layers last:4 --augment false --epochs 6 --batch 32 --lr 0.01 {SGD}",
    "cifar10": f"--data {{cifar10}} --size 224 --model resnet18 --weights {{resnet18}} --shots 500 "
    f"--layers last:4 --augment false --epochs 16 --batch 64 --lr 0.02 {SGD}",
    "camvid_deeplabv3_mobilenet_v2": f"--data {{camvid}} --size 128 --model smp:DeepLabV3/mobilenet_v2 "
    f"--weights {{mobilenet_v2}} --layers last:8 --norm batch --epochs 4 --batch 8 --lr 0.02 {SGD}",
    "camvid_upernet_resnet18": f"--data {{camvid}} --size 128 --model smp:UPerNet/resnet18 "
    f"--weights {{resnet18}} --layers last:8 --epochs 4 --batch 8 --lr 0.02 {SGD}",
}
WEIGHTS = {"mobilenet_v2": "mobilenet_v2-b0353104.pth", "resnet18": "resnet18_imagenet1k.pth"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    arguments = parser.parse_args()
    if not SHARED.is_dir():
        print(f"training: there is no {SHARED}; the experiment needs its data and weights.", file=sys.stderr)
        return 2
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.cases or CASES:
            run_case(case, arguments.arms, arguments.seeds, Path(folder))
    return 0


def run_case(case: str, arms: list[str], seeds: list[int], folder: Path) -> None:
    file = RESULTS / f"{case}.json"
    runs = json.loads(file.read_text()) if file.exists() else []
    for seed in seeds:
        for arm in arms:
            if any((run["arm"], run["seed"]) == (arm, seed) for run in runs):
                continue
            print(f"{case}, {arm}, seed {seed}", file=sys.stderr, flush=True)
            runs.append({"arm": arm, "seed": seed} | trained(case, arm, seed, folder))
            report.write(str(file), json.dumps(runs, indent=1) + "\n")
    print(table(lines(runs)), flush=True)


def trained(case: str, arm: str, seed: int, folder: Path) -> dict[str, Any]:
    files = {name: str(SHARED / "weights" / weights) for name, weights in WEIGHTS.items()}
    files |= {
        name: str(unpacked(name, folder))
        for name in ("pets", "cifar10", "camvid")
        if f"{{{name}}}" in CASES[case]
    }
    out = folder / f"{case}-{arm}-{seed}"
    options = f"{CASES[case]} {ARMS[arm]} --seed {seed}"
    command = options.format(**files).split()
    command += ["--cache-folder", str(folder / "features")] if "--augment false" in options else []
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "gradfilter", "train", *command, "--out", str(out)]
    )
    assert done.returncode == 0
    found = json.loads((out / "report.json").read_text())
    costs = {cost["name"]: cost["values"] for cost in found["costs"]}
    return {
        "command": f"gradfilter train {options}",
        "scores": found["scores"],
        "best": found["epochs"][found["best"]],
        "last": found["epochs"][-1],
        "epochs": found["epochs"],
        "costs": costs,
        "environment": found["environment"],
    }


def unpacked(name: str, folder: Path) -> Path:
    """The packed data set as plain arrays."""
    file = folder / f"{name}.npz"
    if file.exists():
        return file
    sys.path.insert(0, str(SHARED / "data"))
    import unpack

    root = str(SHARED / "data")
    if name == "cifar10":
        (a, b), (c, d) = unpack.cifar10(root)
        arrays = {"x_train": a, "y_train": b, "x_test": c, "y_test": d, "classes": unpack.CIFAR10_CLASSES}
    elif name == "pets":
        (a, b, _), (c, d, _) = unpack.pets(root, masks=False)
        arrays = {"x_train": a, "y_train": b, "x_test": c, "y_test": d}
    else:
        found = unpack.camvid(root)
        (a, b), (c, d) = found["train"], found["test"]
        arrays = {"x_train": a, "m_train": b, "x_test": c, "m_test": d, "ignore": 11}
        arrays["classes"] = unpack.CAMVID_CLASSES[:11]
    np.savez(file, **arrays)
    return file


def lines(runs: list[dict[str, Any]]) -> list[list[str]]:
    made = [["arm", "seed", "score", "best", "last", "kept", "step"]]
    for run in runs:
        score = run["scores"][0]
        kept, step = (
            next(v for k, v in run["costs"].items() if k.startswith(what)) for what in ("kept", "step")
        )
        shares = f"{kept['this run'] / kept['exact']:.3f}x", f"{step['this run']:.0f} ms"
        scores = f"{run['best'][score]:.2f} %", f"{run['last'][score]:.2f} %"
        made.append([run["arm"], str(run["seed"]), score, *scores, *shares])
    return made


if __name__ == "__main__":
    sys.exit(main())
