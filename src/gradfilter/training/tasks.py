"""What is learned: classes of pictures, or of their pixels. Scores come from torchmetrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate

from ..errors import GradFilterError
from ..models._torchvision import library
from ..outputs import scores_of

__all__ = ["Classification", "Segmentation", "class_scores", "task_of"]


@dataclass
class Classification:
    """One class per picture. Scores: accuracy in percent.

    confusion: counts of the last scoring; rows are true classes, columns found ones.
    """

    classes: int
    label_smoothing: float = 0.0
    confusion: list[list[int]] | None = field(default=None, init=False, repr=False, compare=False)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(class_scores(output, self.classes), target, label_smoothing=self.label_smoothing)

    def count(self, target: Tensor) -> int:
        return len(target)

    def score(self, outputs: Iterator[tuple[Any, Tensor]]) -> dict[str, float]:
        metric = _metric("MulticlassConfusionMatrix", num_classes=self.classes)
        for output, target in outputs:
            metric.update(class_scores(output, self.classes), target)
        counts = metric.compute()
        self.confusion = counts.tolist()
        return {"accuracy": 100 * float(counts.trace() / counts.sum())}


@dataclass(frozen=True)
class Segmentation:
    """One class per pixel; those of class ``ignore`` do not count. Scores: mean IoU, accuracy, in percent."""

    classes: int
    ignore: int = 255
    label_smoothing: float = 0.0
    confusion: None = field(default=None, init=False, repr=False, compare=False)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        scores = _as_large(output, target, self.classes)
        smoothing = self.label_smoothing
        return cross_entropy(scores, target, ignore_index=self.ignore, label_smoothing=smoothing)

    def count(self, target: Tensor) -> int:
        return int((target != self.ignore).sum())

    def score(self, outputs: Iterator[tuple[Any, Tensor]]) -> dict[str, float]:
        settings = {"num_classes": self.classes, "ignore_index": self.ignore}
        iou = _metric("MulticlassJaccardIndex", **settings)
        accuracy = _metric("MulticlassAccuracy", average="micro", **settings)
        for output, target in outputs:
            found = _as_large(output, target, self.classes).argmax(1)
            iou.update(found, target)
            accuracy.update(found, target)
        return {"mean_iou": 100 * float(iou.compute()), "pixel_accuracy": 100 * float(accuracy.compute())}


def task_of(
    kind: str, classes: int, ignore: int, label_smoothing: float = 0.0
) -> Classification | Segmentation:
    """The task of data that is there to ``classify`` or to ``segment``."""
    if kind == "classify":
        return Classification(classes, label_smoothing)
    return Segmentation(classes, ignore, label_smoothing)


def class_scores(output: Any, classes: int) -> Tensor:
    """One score per class, from what a model gives."""
    output = scores_of(output)
    if not isinstance(output, Tensor) or output.dim() < 2 or output.shape[1] != classes:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise GradFilterError(
            f"The model gives {shape}, but there are {classes} classes, one score each; build it with "
            f"classes={classes}."
        )
    return output


def _as_large(output: Any, target: Tensor, classes: int) -> Tensor:
    scores = class_scores(output, classes)
    if scores.shape[2:] == target.shape[1:]:
        return scores
    return interpolate(scores, size=target.shape[1:], mode="bilinear", align_corners=False)


def _metric(name: str, **settings: Any) -> Any:
    kind = getattr(library("torchmetrics", "train").classification, name)
    return kind(sync_on_compute=False, **settings)  # each of several processes sees all outputs
