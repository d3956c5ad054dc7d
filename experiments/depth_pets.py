"""Depth: fine-tune all convolutions of MobileNetV2 on Oxford pets, exactly and filtered at patch 2.

    python experiments/depth_pets.py            # nine runs; each is saved when done, and not done again
    python experiments/depth_pets.py --steps 3 --output /tmp/try.json    # does it run at all?

Needs the data and weights in ../shared, torchvision and Pillow. Accuracy is on every third test image.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.bench.environment import conditions, environment
from gradfilter.plans import table

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
WEIGHTS = SHARED / "weights" / "mobilenet_v2-b0353104.pth"
METHODS = {
    "exact": gf.Exact(),
    "overlap": gf.GradientFilter(patch=2, taps="overlap"),
    "collapse": gf.GradientFilter(patch=2, taps="collapse"),
}
SEEDS = (0, 1, 2)
RECIPE = {
    "model": "mobilenet_v2",
    "layers": "all",
    "batch_norm": "fixed",
    "dropout": 0.0,
    "pixels": 96,
    "epochs": 3,
    "batch": 32,
    "learning_rate": 0.05,
    "schedule": "cosine per step, to 0",
    "momentum": 0.0,
    "weight_decay": 1e-4,
    "clip": 2.0,
    "augmentation": "horizontal flip",
    "test_images": "every third",
}
MEAN, STD = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
Images = tuple[Tensor, Tensor]


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    recipe = RECIPE | ({"steps": arguments.steps} if arguments.steps else {})
    record = _open_record(arguments.output, recipe)
    done = {(run["arm"], run["seed"]) for run in record["runs"]}
    missing = [(arm, seed) for seed in SEEDS for arm in METHODS if (arm, seed) not in done]
    if missing:
        train, test = _pets()
    for number, (arm, seed) in enumerate(missing, start=1):
        title = f"run {number} of {len(missing)}: {arm}, seed {seed}"
        record["runs"].append(_run(arm, seed, train, test, arguments.steps, title))
        _save(arguments.output, record)
    print(_table(record))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ROOT / "experiments" / "results" / "depth_pets.json"
    parser.add_argument("--output", type=Path, default=default, help="where runs are saved and looked for")
    parser.add_argument("--steps", type=int, help="stop each run early, to see whether it works")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def _open_record(file: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    if not file.exists():
        return {"experiment": "depth_pets", "recipe": recipe, "runs": []}
    record: dict[str, Any] = json.loads(file.read_text())
    if record["recipe"] != recipe:
        sys.exit(f"{file} has runs of another recipe; give another --output, or move it away.")
    return record


def _save(file: Path, record: dict[str, Any]) -> None:
    """All or nothing: a kill while writing leaves the file of before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(new, file)


def _pets() -> tuple[Images, Images]:
    for path in (WEIGHTS, SHARED / "data" / "unpack.py", SHARED / "data" / "pets160"):
        if not path.exists():
            sys.exit(f"{path} is not there; this experiment needs the data and weights in {SHARED}.")
    print("reading the pictures ...", file=sys.stderr, flush=True)
    (train, train_labels, _), (test, test_labels, _) = _unpacker().pets(str(SHARED / "data"), masks=False)
    return _prepared(train, train_labels), _prepared(test[::3], test_labels[::3])


def _unpacker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("unpack", SHARED / "data" / "unpack.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _prepared(pictures: Any, labels: Any) -> Images:
    """Bytes (N, H, W, 3) to normalised maps of the recipe's size."""
    size = RECIPE["pixels"]
    parts = [
        F.interpolate(part.permute(0, 3, 1, 2).float(), size=(size, size), mode="bilinear", antialias=True)
        for part in torch.from_numpy(pictures).split(256)
    ]
    images = (torch.cat(parts) / 255 - MEAN) / STD
    return images.contiguous(memory_format=torch.channels_last), torch.from_numpy(labels).long()


def _run(arm: str, seed: int, train: Images, test: Images, steps: int | None, title: str) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = gf.models.build(RECIPE["model"], classes=37, weights=WEIGHTS, dropout=RECIPE["dropout"])
    model = gf.apply_(model, METHODS[arm], RECIPE["layers"], example=train[0][:1], norm=RECIPE["batch_norm"])
    model = model.to(memory_format=torch.channels_last).train()
    start = time.perf_counter()
    losses = _train(model, train, steps, title)
    seconds = time.perf_counter() - start
    accuracy = _accuracy(model, test)
    print(f"{title}: {accuracy:.1%} in {seconds:.0f} s", file=sys.stderr, flush=True)
    return {
        "arm": arm,
        "method": str(METHODS[arm]),
        "seed": seed,
        "accuracy": accuracy,
        "test_images": len(test[1]),
        "steps": len(losses),
        "training_seconds": seconds,
        "losses": [round(loss, 4) for loss in losses],
        "environment": environment(),
    }


def _train(model: nn.Module, train: Images, steps: int | None, title: str) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(
        trained, RECIPE["learning_rate"], RECIPE["momentum"], weight_decay=RECIPE["weight_decay"]
    )
    total = RECIPE["epochs"] * math.ceil(len(train[1]) / RECIPE["batch"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    losses: list[float] = []
    for images, labels in _batches(train):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, RECIPE["clip"])
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if len(losses) % 20 == 0:
            print(
                f"{title}: step {len(losses)} of {total}, loss {mean(losses[-20:]):.3f}",
                file=sys.stderr,
                flush=True,
            )
        if len(losses) == steps:
            break
    return losses


def _batches(train: Images) -> Iterator[Images]:
    images, labels = train
    for _ in range(RECIPE["epochs"]):
        for index in torch.randperm(len(labels)).split(RECIPE["batch"]):
            flip = torch.rand(len(index)).lt(0.5).view(-1, 1, 1, 1)
            chosen = images[index]
            yield torch.where(flip, chosen.flip(3), chosen), labels[index]


def _accuracy(model: nn.Module, test: Images) -> float:
    model.eval()
    with torch.no_grad():
        right = [
            model(images).argmax(1) == labels
            for images, labels in zip(*(part.split(64) for part in test), strict=True)
        ]
    return torch.cat(right).float().mean().item()


def _table(record: dict[str, Any]) -> str:
    lines = [["method", *(f"seed {seed}" for seed in SEEDS), "mean"]]
    for arm, method in METHODS.items():
        found = {run["seed"]: run["accuracy"] for run in record["runs"] if run["arm"] == arm}
        cells = [f"{found[seed]:.1%}" if seed in found else "" for seed in SEEDS]
        lines.append([str(method), *cells, f"{mean(found.values()):.1%}" if found else ""])
    return f"{table(lines)}\n\n{conditions(record['runs'][-1]['environment'])}"


if __name__ == "__main__":
    main()
