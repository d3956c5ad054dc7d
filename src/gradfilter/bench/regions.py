"""Whole networks: forward, backward and kept bytes of a trained region, exact against filtered.

Exact is plain PyTorch: the model in eval mode, and gradients for the weights of the same layers.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..costs import kept_bytes, plan
from ..methods import Exact, Method
from ..models import build
from ..plans import format_bytes
from ..progress import Tell, silent
from ..surgery import apply_
from .baseline import train_plainly_
from .environment import environment
from .layers import ARMS, WARMUP
from .timing import Interval, in_turn, median_of, ratio_of

__all__ = ["CASES", "Case", "lines", "measure"]


class Case(NamedTuple):
    """A network by name, a selection of its layers, and what to call the two in a table."""

    model: str
    layers: str
    title: str


CASES = (
    Case("resnet18", "layer3,layer4", "ResNet-18, layer3 and layer4"),
    Case("mobilenet_v2", ",".join(f"features.{i}" for i in range(7, 19)), "MobileNetV2, features 7 to 18"),
    Case("resnet18", "all", "ResNet-18, all layers"),
    Case("mobilenet_v2", "all", "MobileNetV2, all layers"),
)


def measure(
    batch: int = 8,
    size: int = 224,
    rounds: int = 9,
    cases: tuple[Case, ...] = CASES,
    tell: Tell = silent,
) -> dict[str, Any]:
    """Measure every region with every method; times in milliseconds. The weights are random."""
    found = environment()
    rows = [row for case in cases for row in _measure_case(case, batch, size, rounds, tell)]
    return {
        "benchmark": "regions",
        "environment": found,
        "batch": batch,
        "size": size,
        "rounds": rounds,
        "rows": rows,
    }


def _measure_case(case: Case, batch: int, size: int, rounds: int, tell: Tell) -> list[dict[str, Any]]:
    model = build(case.model).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    models = {name: _prepared(model, case.layers, method) for name, method in ARMS.items()}
    kept = {name: _kept(arm, x) for name, arm in models.items()}
    times = in_turn(
        {name: partial(_forward_and_backward, arm, x) for name, arm in models.items()},
        rounds,
        WARMUP,
        tell=lambda step: tell(case.title, step, rounds + WARMUP),
    )
    forward = {name: [f for f, _ in taken] for name, taken in times.items()}
    backward = {name: [b for _, b in taken] for name, taken in times.items()}
    return [
        {
            "region": case.title,
            "arm": name,
            "kept": kept[name],
            "kept_share": kept[name] / kept["exact"],
            "forward_ms": [1e3 * t for t in median_of(forward[name])],
            "backward_ms": [1e3 * t for t in median_of(backward[name])],
            "backward_ratio": ratio_of(backward["exact"], backward[name]),
        }
        for name in models
    ]


def _prepared(model: nn.Module, layers: str, method: Method) -> nn.Module:
    copied = copy.deepcopy(model)
    planned = plan(copied, method, layers)
    return train_plainly_(copied, planned) if isinstance(method, Exact) else apply_(copied, planned)


def _kept(model: nn.Module, x: Tensor) -> int:
    with kept_bytes(model) as kept:
        model(x)
    return sum(kept.values())


def _forward_and_backward(model: nn.Module, x: Tensor) -> tuple[float, float]:
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    loss = model(x).sum()
    middle = time.perf_counter()
    torch.autograd.backward(loss)
    return middle - start, time.perf_counter() - middle


def lines(record: dict[str, Any]) -> list[list[str]]:
    """The table, one line per region and method."""
    title = f"region, batch {record['batch']}, {record['size']} px"
    made = [[title, "method", "kept", "of exact", "forward", "backward", "faster"]]
    for row in record["rows"]:
        made.append(
            [
                row["region"],
                row["arm"],
                format_bytes(row["kept"]),
                f"{row['kept_share']:.3f}x",
                f"{row['forward_ms'][0]:.0f} ms",
                f"{row['backward_ms'][0]:.1f} ms",
                "" if row["arm"] == "exact" else Interval(*row["backward_ratio"]).as_ratio(),
            ]
        )
    return made
