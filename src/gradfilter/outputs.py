"""What models give: a tensor of class scores, or something that has one in it."""

from __future__ import annotations

from typing import Any

__all__ = ["scores_of"]


def scores_of(output: Any) -> Any:
    """The class scores among what a model gives; torchvision's segmentation models give a dict.

    >>> scores_of({"out": 1, "aux": 2}), scores_of(3)
    (1, 3)
    """
    return output.get("out", next(iter(output.values()), None)) if isinstance(output, dict) else output
