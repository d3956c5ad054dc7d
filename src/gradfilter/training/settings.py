"""What a training does, as plain values: no torch here, so that command lines are read fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import GradFilterError

__all__ = ["Loop"]


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
