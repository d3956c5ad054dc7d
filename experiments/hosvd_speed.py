"""Whole steps of MobileNetV2's last four convolutions, batch 32, 224 px: HOSVD, and by torch.linalg.svd.

    python -W ignore experiments/hosvd_speed.py eager          the model as it is
    python -W ignore experiments/hosvd_speed.py accelerated    with gf.accelerate_
    python -W ignore experiments/hosvd_speed.py tail           the trained part alone, as with a feature cache

Each takes about a minute and replaces its part of the record. Arms take turns. Checked first: both ways find
the same ranks and the same gradients, and bytes kept are those of core and factors. Subspace iteration has
the ranks that gf.choose_ranks finds for a twentieth of the exact bytes. Needs ../shared (weights, Oxford
pets; or where GRADFILTER_SHARED says) and Pillow.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.bench.environment import environment
from gradfilter.bench.timing import in_turn, median_of, ratio_of, seconds

SHARED = Path(os.environ.get("GRADFILTER_SHARED", Path(__file__).parents[2] / "shared"))
RESULTS = Path(__file__).parent / "results" / "hosvd_speed.json"
WEIGHTS = SHARED / "weights" / "mobilenet_v2-b0353104.pth"
LAYERS, BATCH, SIZE, CLASSES, VARIANCE, ROUNDS = "last:4", 32, 224, 37, 0.8, 31
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


class ByFullSVD(gf.HOSVD):
    """As published: a full singular value decomposition per mode, of which only the left side is used."""

    def _factors(self, x: Tensor) -> list[Tensor]:
        factors = []
        for mode in range(x.dim()):
            left, values, _ = torch.linalg.svd(x.movedim(mode, 0).flatten(1), full_matrices=False)
            explained = values.double().square().cumsum(0)
            rank = int((explained < self.variance * explained[-1]).sum()) + 1
            factors.append(left[:, :rank].clone(memory_format=torch.contiguous_format))
        return factors


def main() -> None:
    mode = sys.argv[1]
    prepare = {"eager": eager, "accelerated": accelerated, "tail": tail}[mode]
    torch.set_num_threads(2)
    images, labels = pictures()
    inputs = layer_inputs(images)
    raw = sum(4 * x.numel() for x in inputs.values())
    ranks = gf.choose_ranks(model(), (images, labels), F.cross_entropy, LAYERS, raw // 20)
    arms = {
        "exact": gf.Exact(),
        "HOSVD": gf.HOSVD(VARIANCE),
        "HOSVD, sequential": gf.HOSVD(VARIANCE, sequential=True),
        "HOSVD by torch.linalg.svd": ByFullSVD(VARIANCE),
        "subspace iteration": gf.SubspaceIteration(rank=ranks),
    }
    facts = check(arms, images, labels, inputs)
    print(json.dumps(facts, indent=1))
    steps = {name: prepare(applied(method, images), images, labels) for name, method in arms.items()}
    times = in_turn({name: partial(seconds, step) for name, step in steps.items()}, rounds=ROUNDS)
    rows = []
    for name in arms:
        ms, of_exact = median_of(times[name]), ratio_of(times[name], times["exact"])
        by_svd = ratio_of(times["HOSVD by torch.linalg.svd"], times[name])
        rows.append({"arm": name, "ms": 1e3 * ms.median, "of_exact": of_exact, "faster_than_svd": by_svd})
        print(f"{name:28}{1e3 * ms.median:8.1f} ms   {of_exact.median:.2f} of exact   {by_svd.as_ratio()}")
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    record[mode] = {"environment": environment(), "checks": facts, "rows": rows}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def pictures() -> tuple[Tensor, Tensor]:
    """A batch of Oxford pets, spread over the training split."""
    from PIL import Image

    packed = np.load(SHARED / "data" / "pets160" / "trainval_images.npz")
    chosen = np.linspace(0, len(packed["offsets"]) - 2, BATCH).astype(int)
    files, ends = packed["webp"], packed["offsets"]
    images = [np.array(Image.open(io.BytesIO(files[ends[i] : ends[i + 1]].tobytes()))) for i in chosen]
    maps = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
    maps = F.interpolate(maps, size=SIZE, mode="bilinear", antialias=True)
    maps = (maps - MEAN.view(1, 3, 1, 1)) / STD.view(1, 3, 1, 1)
    return maps.contiguous(memory_format=torch.channels_last), torch.from_numpy(
        packed["labels"][chosen]
    ).long()


def model() -> nn.Module:
    torch.manual_seed(0)  # the new head
    return gf.models.build("mobilenet_v2", classes=CLASSES, weights=str(WEIGHTS)).eval()


def applied(method: gf.Method, images: Tensor) -> nn.Module:
    return gf.apply_(model(), method, LAYERS, example=images)


def layer_inputs(images: Tensor) -> dict[str, Tensor]:
    """What each trained layer reads."""
    net, found = model(), {}
    for name in gf.plan(net, gf.Exact(), LAYERS, example=images).trained:

        def note(_: nn.Module, args: Any, name: str = name) -> None:
            found[name] = args[0].detach()

        net.get_submodule(name).register_forward_pre_hook(note)
    with torch.no_grad():
        net(images)
    return found


def check(
    arms: dict[str, gf.Method], images: Tensor, labels: Tensor, inputs: dict[str, Tensor]
) -> dict[str, Any]:
    kept, gradients = {}, {}
    for name, method in arms.items():
        net = applied(method, images)
        with gf.kept_bytes(net) as counted:
            output = net(images)
        kept[name] = sum(counted.values())
        F.cross_entropy(output, labels).backward()
        gradients[name] = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    ours, theirs = ({n: ranks(arms[arm], x) for n, x in inputs.items()} for arm in list(arms)[1:4:2])
    assert ours == theirs, f"other ranks: {ours}, {theirs}"
    ways = list(gradients["HOSVD"])
    off = max(
        float((gradients["HOSVD"][n] - g).norm() / g.norm())
        for n, g in gradients["HOSVD by torch.linalg.svd"].items()
    )
    assert off < 1e-3, f"gradients differ by {off}"
    raw = sum(4 * x.numel() for x in inputs.values())
    theory = sum(4 * elements(x, ours[n]) for n, x in inputs.items())
    layers = {name: raw - (kept["exact"] - bytes_) for name, bytes_ in kept.items()}  # all else is the same
    assert abs(layers["HOSVD"] / theory - 1) < 0.05, f"{layers['HOSVD']} bytes kept, {theory} expected"
    assert layers["subspace iteration"] <= raw // 20
    errors = {
        name: {n: float((gradients[name][n] - g).norm() / g.norm()) for n, g in gradients["exact"].items()}
        for name in arms
    }
    return {
        "ranks": ours,
        "ranks of subspace iteration": arms["subspace iteration"].rank,  # type: ignore[attr-defined]
        "largest relative difference of gradients to torch.linalg.svd": off,
        "bytes kept by the layers": layers,
        "bytes of core and factors": theory,
        "bytes kept by the model": kept,
        "relative error of weight gradients": {k: {n: e[n] for n in ways} for k, e in errors.items()},
    }


def ranks(method: Any, x: Tensor) -> list[int]:
    """What the method finds for an input; the sizes themselves where it keeps that whole."""
    core, *factors = method.keep(x, None, {})
    return list(core.shape) if factors else list(x.shape)


def elements(x: Tensor, found: list[int]) -> int:
    if found == list(x.shape):
        return x.numel()
    return prod(found) + sum(size * rank for size, rank in zip(x.shape, found, strict=True))


def eager(net: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    return partial(step, net, net, images, labels)


def accelerated(net: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    return eager(gf.accelerate_(net), images, labels)


def tail(net: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    parts = gf.split(gf.accelerate_(net))
    with torch.no_grad():
        features = parts.prefix(images)
    return partial(step, net, parts.tail, features, labels)


def step(net: nn.Module, run: Callable[[Any], Tensor], inputs: Any, labels: Tensor) -> None:
    net.zero_grad()
    F.cross_entropy(run(inputs), labels).backward()


if __name__ == "__main__":
    main()
