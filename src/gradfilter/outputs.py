"""What models give: a tensor of class scores, or something that has one in it."""

from __future__ import annotations

from typing import Any

__all__ = ["scores_of"]


def scores_of(output: Any) -> Any:
    """The class scores among what a model gives.

    torchvision's segmentation models give a dict, its inception networks a tuple in training.

    >>> scores_of({"out": 1, "aux": 2}), scores_of((1, 2)), scores_of(3)
    (1, 1, 3)
    """
    if isinstance(output, dict):
        return output.get("out", next(iter(output.values()), None))
    return output[0] if isinstance(output, tuple) and output else output
