"""The epochs of a training, and which of them was the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["History"]


@dataclass
class History:
    """One entry per epoch: its number, the mean training loss, the seconds so far, and the scores.

    waited: the seconds so far in which the training waited for samples.
    """

    epochs: list[dict[str, float]] = field(default_factory=list)
    best: int = -1
    why_ended: str = ""

    @property
    def is_best(self) -> bool:
        """Whether the last epoch is the best one so far."""
        return self.best == len(self.epochs) - 1

    @property
    def best_scores(self) -> dict[str, float]:
        return self.epochs[self.best]

    @property
    def score_names(self) -> list[str]:
        """The first one is what epochs are judged by."""
        return [name for name in self.epochs[-1] if name not in ("epoch", "loss", "seconds", "waited")]

    def add(self, epoch: Mapping[str, float], scores: Mapping[str, float], patience: int = 0) -> None:
        """One more epoch; the first score judges it, or the loss where there is none.

        patience: after so many epochs without a better score the training ends, if not 0.
        """
        self.epochs.append({**epoch, **scores})
        judge = next(iter(scores), "loss")
        values = [_rank(entry[judge] if scores else -entry[judge]) for entry in self.epochs]
        ranks = [(value, _rank(-entry["loss"])) for value, entry in zip(values, self.epochs, strict=True)]
        if self.best < 0 or ranks[-1] > ranks[self.best]:  # only of the last one the weights are there
            self.best = len(ranks) - 1
        waited = len(values) - 1 - values.index(max(values))
        if patience and waited >= patience and not self.why_ended:
            self.why_ended = f"{judge} had not grown for {waited} epochs"


def _rank(value: float) -> float:
    """What is no number comes last."""
    return -math.inf if math.isnan(value) else value
