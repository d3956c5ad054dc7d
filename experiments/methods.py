"""Every method at several settings: bytes kept, step time and gradient cosine, on real weights and pictures.

    python experiments/methods.py                        all models and methods; what is there is skipped
    python experiments/methods.py --again "HOSVD(0.8)"

The settings are those that docs/methods.md names. The last 4 convolutions of ResNet-18 and MobileNetV2, batch
8, 224 px, Oxford pets; accelerated in every arm. A method takes turns with exact training, so a busy machine
slows both. Needs ../shared.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.bench import report
from gradfilter.bench.environment import environment
from gradfilter.bench.timing import in_turn, ratio_of, seconds
from gradfilter.methods.text import method_from
from gradfilter.plans import table

SHARED = Path(__file__).parents[2] / "shared"
RESULTS = Path(__file__).parent / "results" / "methods.json"
WEIGHTS = {"resnet18": "resnet18_imagenet1k.pth", "mobilenet_v2": "mobilenet_v2-b0353104.pth"}
LAYERS, BATCH, SIZE, CLASSES = "last:4", 8, 224, 37
ROUNDS, WARM = 7, 3


def families(document: str) -> list[list[str]]:
    """A line `Measured: ...` names settings from coarse to fine: the cosine has to grow with them."""
    lines = [line for line in document.splitlines() if line.startswith("Measured: ")]
    return [re.findall(r"`(.+?)`", line) for line in lines]


FAMILIES = families((Path(__file__).parents[1] / "docs" / "methods.md").read_text())
SETTINGS = [setting for settings in FAMILIES for setting in settings]

Batch = tuple[Tensor, Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", nargs="+", choices=SETTINGS, default=[], help="measure these anew")
    again = parser.parse_args().again
    if not SHARED.is_dir():
        print(f"methods: there is no {SHARED}; the experiment needs its data and weights.", file=sys.stderr)
        return 2
    torch.set_num_threads(2)
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    done = [row for row in done if row["method"] not in again and row["method"] in SETTINGS]
    batch = pictures()
    for name, file in WEIGHTS.items():
        model = gf.models.build(name, classes=CLASSES, weights=SHARED / "weights" / file)
        model = model.eval().to(memory_format=torch.channels_last)
        for method in SETTINGS:
            if not any(row["model"] == name and row["method"] == method for row in done):
                print(f"{name}, {method} ...", file=sys.stderr, flush=True)
                done.append({"model": name, "method": method} | measured(model, method, batch))
                report.write(str(RESULTS), json.dumps(done, indent=1) + "\n")
    done.sort(key=lambda row: (list(WEIGHTS).index(row["model"]), SETTINGS.index(row["method"])))
    report.write(str(RESULTS), json.dumps(done, indent=1) + "\n")
    print(table(lines(done)))
    for name, family in falling(done):
        print(f"The cosine does not grow with the setting: {name}, {family}", file=sys.stderr)
    return 0


def falling(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Models and methods whose cosine is lower at a finer setting."""
    found = []
    for name in WEIGHTS:
        cosines = {row["method"]: row["cosine"] for row in rows if row["model"] == name}
        for settings in FAMILIES:
            own = [cosines[setting] for setting in settings if cosines.get(setting) is not None]
            if own != sorted(own):
                found.append((name, ", ".join(settings)))
    return found


def pictures() -> Batch:
    """The first picture of every so many of the official training split, so that classes are mixed."""
    sys.path.insert(0, str(SHARED / "data"))
    from unpack import pets

    (images, labels, _), _ = pets(str(SHARED / "data"), masks=False)
    step = len(images) // BATCH
    x = torch.from_numpy(images[::step][:BATCH]).permute(0, 3, 1, 2).float()
    x = F.interpolate(x, size=SIZE, mode="bilinear", antialias=True) / 255
    mean_, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return ((x - mean_) / std).to(memory_format=torch.channels_last), torch.from_numpy(
        labels[::step][:BATCH]
    ).long()


def measured(model: nn.Module, text: str, batch: Batch) -> dict[str, Any]:
    method = method_from(text)
    plan = gf.plan(model, method, LAYERS, example=batch[0])
    found = gf.analyze(model, batch, F.cross_entropy, plan)
    cosines = [row.weight.cosine for row in found.rows if row.weight and row.method == method]
    steps = {"exact": step_of(model, gf.Exact(), batch), "method": step_of(model, method, batch)}
    kept = {name: step.kept for name, step in steps.items()}
    times = in_turn({name: step.take for name, step in steps.items()}, ROUNDS, WARM)
    return {
        "cosine": mean(cosines) if cosines else None,
        "layers": len(cosines),
        "kept_bytes": kept["method"],
        "exact_bytes": kept["exact"],
        "step_ms": 1e3 * ratio_of(times["method"], [1.0] * ROUNDS).median,
        "to_exact": ratio_of(times["method"], times["exact"])._asdict(),
        "environment": environment(),
    }


class step_of:  # noqa: N801  reads as what it is
    """A training step with one method, ready to be taken."""

    def __init__(self, model: nn.Module, method: gf.Method, batch: Batch) -> None:
        model = gf.accelerate_(gf.apply_(copy.deepcopy(model), method, LAYERS, example=batch[0]))
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=1e-4)
        self.loss: Callable[[], Tensor] = lambda: F.cross_entropy(model(batch[0]), batch[1])

        def step() -> None:
            self.loss().backward()
            nn.utils.clip_grad_norm_(parameters, 2)
            optimizer.step()
            optimizer.zero_grad()

        self.take = partial(seconds, step)
        step()
        with gf.kept_bytes(model) as kept:
            self.loss()
        self.kept = sum(kept.values())


def lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    made = [["model", "method", "kept, of exact", "step, of exact", "weight cosine"]]
    for row in rows:
        cosine = "-" if row["cosine"] is None else f"{row['cosine']:.4f}"
        shares = f"{row['kept_bytes'] / row['exact_bytes']:.3f}x", f"{row['to_exact']['median']:.2f}x"
        made.append([row["model"], row["method"], *shares, cosine])
    return made


if __name__ == "__main__":
    sys.exit(main())
