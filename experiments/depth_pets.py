"""Depth: fine-tune every convolution of MobileNetV2 on Oxford pets, exact and filtered.

    python experiments/depth_pets.py                    all arms and seeds; runs that are there are skipped
    python experiments/depth_pets.py --arms overlap --seeds 0 1

Needs ../shared (weights and data). Recipe: 96 px, 3 epochs, batch 32, SGD at 0.05 with a cosine to 0, no
momentum, weight decay 1e-4, gradients clipped at 2, horizontal flips, batch norm fixed and not trained; every
third test image.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.bench.environment import environment
from gradfilter.plans import table

SHARED = Path(__file__).parents[2] / "shared"
RESULTS = Path(__file__).parent / "results" / "depth_pets.json"
ARMS = {
    "exact": gf.Exact(),
    "overlap": gf.GradientFilter(patch=2, taps="overlap"),
    "collapse": gf.GradientFilter(patch=2, taps="collapse"),
}
EPOCHS, BATCH, SIZE, CLASSES = 3, 32, 96, 37


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="stop each run after so many steps; nothing is written")
    arguments = parser.parse_args()
    if not SHARED.is_dir():
        print(
            f"depth_pets: there is no {SHARED}; the experiment needs its data and weights.", file=sys.stderr
        )
        return 2
    torch.set_num_threads(2)
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    data = load_pets()
    for seed in arguments.seeds:
        for arm in arguments.arms:
            if not any(run["arm"] == arm and run["seed"] == seed for run in done):
                run = train(arm, seed, data, arguments.steps)
                if arguments.steps is None:
                    done.append(run)
                    write(done)
    print(table(summary(done)))
    return 0


def load_pets() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images as bytes at 96 px, and labels: training, then every third of the official test split."""
    sys.path.insert(0, str(SHARED / "data"))
    from unpack import pets

    (train_x, train_y, _), (test_x, test_y, _) = pets(str(SHARED / "data"), masks=False)
    return (
        *(smaller(torch.from_numpy(train_x)), torch.from_numpy(train_y).long()),
        *(smaller(torch.from_numpy(test_x[::3])), torch.from_numpy(test_y[::3]).long()),
    )


def smaller(images: Tensor) -> Tensor:
    maps = images.permute(0, 3, 1, 2).float()
    return F.interpolate(maps, size=SIZE, mode="bilinear", antialias=True).round().clamp(0, 255).byte()


def normalised(images: Tensor) -> Tensor:
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
    return ((images / 255 - mean) / std).to(memory_format=torch.channels_last)


def train(arm: str, seed: int, data: tuple[Tensor, ...], limit: int | None) -> dict[str, object]:
    images, labels, test_images, test_labels = data
    torch.manual_seed(seed)
    weights = SHARED / "weights" / "mobilenet_v2-b0353104.pth"
    model = gf.models.build("mobilenet_v2", classes=CLASSES, weights=weights)
    model = gf.apply_(model.to(memory_format=torch.channels_last), ARMS[arm], layers="all")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05, weight_decay=1e-4)
    steps = EPOCHS * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.cat([torch.randperm(len(images))[: steps // EPOCHS * BATCH] for _ in range(EPOCHS)])
    losses, start = [], time.perf_counter()
    model.train()
    for step, chosen in enumerate(order.split(BATCH)[:limit], 1):
        x = normalised(images[chosen])
        flipped = torch.rand(len(x)) < 0.5
        x[flipped] = x[flipped].flip(3)
        loss = F.cross_entropy(model(x), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 2)
        optimizer.step()
        schedule.step()
        losses.append(round(loss.item(), 4))
        if step % 50 == 0:
            print(
                f"{arm}, seed {seed}: step {step} of {steps}, loss {losses[-1]}", file=sys.stderr, flush=True
            )
    seconds = time.perf_counter() - start
    return {
        "arm": arm,
        "method": str(ARMS[arm]),
        "seed": seed,
        "test_accuracy": evaluate(model, test_images, test_labels),
        "test_images": len(test_images),
        "train_seconds": round(seconds, 1),
        "losses": losses[::20],
        "environment": environment(),
    }


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = 0
    for x, y in zip(images.split(128), labels.split(128), strict=True):
        right += int((model(normalised(x)).argmax(1) == y).sum())
    return round(100 * right / len(images), 2)


def write(runs: list[dict[str, object]]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    partial = RESULTS.with_suffix(".tmp")
    partial.write_text(json.dumps(runs, indent=1) + "\n")
    partial.replace(RESULTS)


def summary(runs: list[dict[str, object]]) -> list[list[str]]:
    lines = [["arm", "seeds", "test accuracy (%)", "mean"]]
    for arm in ARMS:
        found = {run["seed"]: run["test_accuracy"] for run in runs if run["arm"] == arm}
        if found:
            seeds = sorted(found)
            mean = sum(found.values()) / len(found)
            lines.append(
                [arm, " ".join(map(str, seeds)), " ".join(str(found[s]) for s in seeds), f"{mean:.1f}"]
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
