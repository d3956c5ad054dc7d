"""What is learned: classes of pictures, or of their pixels. Scores come from torchmetrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate

from ..errors import GradFilterError
from ..models._torchvision import library
from ..outputs import scores_of
from .settings import check_kind
from .targets import labels_in, masks_in

__all__ = ["Classification", "Segmentation", "class_scores", "task_of"]


@dataclass
class Classification:
    """One class per picture. Scores: accuracy in percent.

    confusion: counts of the last scoring; rows are true classes, columns found ones.
    """

    classes: int
    label_smoothing: float = 0.0
    confusion: list[list[int]] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_classes(self.classes)

    def targets(self, given: Any, training: bool) -> Tensor:
        """Those of a batch, checked; in training also shares of all classes, or torch's -100 for none."""
        is_shared = isinstance(given, Tensor) and given.is_floating_point() and given.dim() == 2
        if training and is_shared and given.shape[1] == self.classes:
            return cast(Tensor, given)
        return labels_in(given, self.classes, -100 if training else None)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        scores, labels = self._scores(output), self.targets(target, training=True)
        return cross_entropy(scores, labels, label_smoothing=self.label_smoothing)

    def count(self, target: Tensor) -> int:
        return len(target)

    def score(self, outputs: Iterator[tuple[Any, Tensor]]) -> dict[str, float]:
        metric = _metric("MulticlassConfusionMatrix", num_classes=int(self.classes))
        for output, target in outputs:
            metric.update(self._scores(output), self.targets(target, training=False))
        counts = metric.compute()
        self.confusion = counts.tolist()
        return {"accuracy": 100 * float(counts.trace() / counts.sum())}

    def _scores(self, output: Any) -> Tensor:
        scores = class_scores(output, self.classes)
        if scores.dim() != 2:
            raise GradFilterError(
                f"The model gives {tuple(scores.shape)}, but Classification needs one class per picture, "
                f"{tuple(scores.shape[:2])}; take gf.Segmentation({self.classes}) if pixels have classes."
            )
        return scores


@dataclass(frozen=True)
class Segmentation:
    """One class per pixel; those of class ``ignore`` do not count. Scores: mean IoU, accuracy, in percent."""

    classes: int
    ignore: int = 255
    label_smoothing: float = 0.0
    confusion: None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_classes(self.classes)

    def targets(self, given: Any, training: bool) -> Tensor:
        """The masks of a batch, checked."""
        return masks_in(given, self.classes, self.ignore)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        masks, smoothing = self.targets(target, training=True), self.label_smoothing
        scores = self._as_large(output, masks)
        return cross_entropy(scores, masks, ignore_index=self.ignore, label_smoothing=smoothing)

    def count(self, target: Tensor) -> int:
        return int((target != self.ignore).sum())

    def score(self, outputs: Iterator[tuple[Any, Tensor]]) -> dict[str, float]:
        settings = {"num_classes": int(self.classes), "ignore_index": self.ignore}
        iou = _metric("MulticlassJaccardIndex", **settings)
        accuracy = _metric("MulticlassAccuracy", average="micro", **settings)
        for output, target in outputs:
            masks = self.targets(target, training=False)
            found = self._as_large(output, masks).argmax(1)
            iou.update(found, masks)
            accuracy.update(found, masks)
        return {"mean_iou": 100 * float(iou.compute()), "pixel_accuracy": 100 * float(accuracy.compute())}

    def _as_large(self, output: Any, masks: Tensor) -> Tensor:
        scores = class_scores(output, self.classes)
        if scores.shape[2:] == masks.shape[1:]:  # also of lines and volumes
            return scores
        if scores.dim() != 4 or masks.dim() != 3:
            raise GradFilterError(
                f"The model gives {tuple(scores.shape)} for masks {tuple(masks.shape)}, but Segmentation "
                f"needs one class per pixel, (N, {self.classes}, H, W) for (N, H, W); take "
                f"gf.Classification({self.classes}) if pictures have classes."
            )
        return interpolate(scores, size=masks.shape[1:], mode="bilinear", align_corners=False)


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


def _check_classes(classes: Any) -> None:
    check_kind("classes", classes, int)
    if classes < 2:
        raise GradFilterError(f"classes must be at least 2, not {classes}.")


def _metric(name: str, **settings: Any) -> Any:
    kind = getattr(library("torchmetrics", "train").classification, name)
    return kind(sync_on_compute=False, **settings)  # each of several processes sees all outputs
