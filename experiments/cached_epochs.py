"""Ten epochs with a feature cache, its making included, against exact training of the same layers without.

    python experiments/cached_epochs.py

Random pictures, 224 px, batch 8, last 4 convolutions, patch 2. Exact is plain PyTorch, and runs two epochs,
which are counted five times; the cache is built from nothing, in memory and float32. Needs torchvision.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import gradfilter as gf
from gradfilter.bench.baseline import train_plainly_
from gradfilter.bench.environment import environment

RESULTS = Path(__file__).parent / "results" / "cached_epochs.json"
MODELS, EPOCHS, TIMED, PICTURES, BATCH, SIZE = ("mobilenet_v2", "resnet18"), 10, 2, 128, 8, 224


def main() -> None:
    torch.set_num_threads(2)
    rows = []
    for name in MODELS:
        torch.manual_seed(0)
        pictures = [(torch.randn(3, SIZE, SIZE), label % 10) for label in range(PICTURES)]
        exact = exact_epochs(name, pictures)
        build, cached = cached_epochs(name, pictures)
        rows.append({"model": name, "exact_s": exact, "build_s": build, "cached_s": cached})
        print(f"{name}: exact {exact:.1f} s, cache {build:.1f} s + epochs {cached:.1f} s,"
              f" {(build + cached) / exact:.2f}x", flush=True)  # fmt: skip
    settings = {"epochs": EPOCHS, "pictures": PICTURES, "batch": BATCH, "size": SIZE}
    record = {"environment": environment(), "settings": settings, "rows": rows}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def exact_epochs(name: str, pictures: list[Any]) -> float:
    model = plain(name)
    train_plainly_(model, gf.plan(model, gf.Exact(), "last:4"))
    loader = DataLoader(pictures, batch_size=BATCH, shuffle=True)

    def forward(images: Tensor) -> Tensor:
        made: Tensor = model(images.to(memory_format=torch.channels_last))
        return made

    epoch(model, forward, loader)
    start = time.perf_counter()
    for _ in range(TIMED):
        epoch(model, forward, loader)
    return (time.perf_counter() - start) / TIMED * EPOCHS


def cached_epochs(name: str, pictures: list[Any]) -> tuple[float, float]:
    model = gf.accelerate_(gf.apply_(plain(name), gf.GradientFilter(patch=2), "last:4"))
    start = time.perf_counter()
    cache = gf.FeatureCache(model, pictures, batch=BATCH)
    built = time.perf_counter()
    loader = DataLoader(cache, batch_size=BATCH, shuffle=True)
    for _ in range(EPOCHS):
        epoch(model, cache.tail, loader)
    return built - start, time.perf_counter() - built


def plain(name: str) -> nn.Module:
    model: Any = gf.models.build(name, classes=10)
    made: nn.Module = model.eval().to(memory_format=torch.channels_last)
    return made


def epoch(model: nn.Module, forward: Callable[[Any], Tensor], loader: Iterable[Any]) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-4)
    for inputs, labels in loader:
        cross_entropy(forward(inputs), labels).backward()
        clip_grad_norm_(trained, 2.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
