"""Items of a user's own set, as pairs (image, target)."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, cast

from torch.utils.data import Dataset

from ..errors import GradFilterError
from ..seeding import seeded

__all__ = ["as_pairs"]

IMAGES = ("pixel_values", "image", "img")
TARGETS = ("label", "labels", "fine_label", "mask", "annotation")


class _Pairs(Dataset[tuple[Any, Any]]):
    def __init__(self, samples: Any, image: str, target: str) -> None:
        self.samples, self.image, self.target = samples, image, target

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        item = self.samples[index]
        return item[self.image], item[self.target]


def as_pairs(samples: Any) -> Any:
    """A set whose items are dictionaries, as those of Hugging Face's datasets, as pairs; others as they are.

    >>> as_pairs([{"label": 3, "image": "a picture"}])[0]
    ('a picture', 3)
    """
    if not len(cast(Sized, samples)):
        return samples
    with seeded(0):
        first = samples[0]
    if not isinstance(first, Mapping):
        return samples
    image, target = (next((name for name in names if name in first), None) for names in (IMAGES, TARGETS))
    if image is None or target is None:
        raise GradFilterError(
            f"The items of the set have the fields {', '.join(map(str, first))}; name the image one of "
            f"{', '.join(IMAGES)}, and its target one of {', '.join(TARGETS)}."
        )
    return _Pairs(samples, image, target)
