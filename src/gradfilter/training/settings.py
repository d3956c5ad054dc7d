"""What a training does, as plain values: no torch here, so that command lines are read fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..errors import GradFilterError

__all__ = ["Config", "Loop"]


@dataclass(frozen=True)
class Loop:
    """The loop: how long, how fast, and with which safeguards.

    Args:
        epochs: how often the training set is seen.
        batch: samples per step; with ``accumulate`` N, N such batches make one step of the optimizer.
        lr: the highest learning rate; reached after ``warmup`` epochs, then a cosine leads to 0.
        clip: the longest gradient, or 0 for no limit.
        minutes: stop after this time, with the schedule as it stands; 0 for no limit.
        patience: stop when the test score has not grown for so many epochs; 0 for never.
    """

    epochs: int = 10
    batch: int = 32
    accumulate: int = 1
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 1e-4
    warmup: float = 0.0
    schedule: Literal["cosine", "constant"] = "cosine"
    clip: float = 2.0
    label_smoothing: float = 0.0
    precision: Literal["float32", "bf16"] = "float32"
    minutes: float = 0.0
    patience: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "accumulate"):
            if getattr(self, name) < 1:
                raise GradFilterError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("lr", "momentum", "weight_decay", "warmup", "clip", "minutes", "patience"):
            if not getattr(self, name) >= 0:
                raise GradFilterError(f"{name} must not be negative, but is {getattr(self, name)}.")
        if not 0 <= self.label_smoothing < 1:
            raise GradFilterError(f"label_smoothing must be from 0 to below 1, not {self.label_smoothing}.")


@dataclass(frozen=True)
class Config(Loop):
    """All of ``gradfilter train``: the data, the model, what of it trains and how, and the loop.

    Args:
        data: "digits", a folder, a file, or KIND:PATH; docs/data.md lists the kinds.
        task: "classify" or "segment"; found out from the data if not said.
        model: a name as ``gradfilter models`` lists them.
        weights: a file, "auto" for what is on this machine, "none" for random ones.
        size: side of the pictures in pixels.
        method: how the layers train, as text; docs/methods.md has all.
        methods: another method for some layers, by glob; the first that matches counts.
        layers: which layers train: "last:4", "all", globs; docs/usage.md.
        norm: batch norms: "fixed", "affine" or "batch".
        augment: crop, flip and colour the training pictures at random.
        cache: features of the frozen layers, computed once: "auto" where that changes nothing.
        workers: processes that read pictures.
        download: fetch a public data set that is not there.
        out: the run's folder; a new one below runs/ if not said.
    """

    data: str = "digits"
    task: Literal["auto", "classify", "segment"] = "auto"
    model: str = "mobilenet_v2"
    weights: str = "auto"
    size: int = 128
    method: str = "GradientFilter(patch=2)"
    methods: dict[str, str] = field(default_factory=dict)
    layers: str = "last:4"
    norm: Literal["fixed", "affine", "batch"] = "fixed"
    augment: bool = True
    cache: Literal["auto", "on", "off"] = "auto"
    workers: int = 1
    threads: int = 0
    download: bool = False
    out: str = ""
