"""Items of a user's own set, as pairs (image, target)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from ..errors import GradFilterError
from ..seeding import seeded
from .settings import shown

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


def as_pairs(samples: Any, name: str) -> tuple[Any, tuple[Any, Any]]:
    """A set whose items are dictionaries, as those of Hugging Face's datasets, as pairs; others as they are.

    And its first pair.

    >>> as_pairs([{"label": 3, "image": "a picture"}], "train")[1]
    ('a picture', 3)
    """
    _check_map_style(samples, name)
    with seeded(0):
        first = samples[0]
    if isinstance(first, Mapping):
        image, target = (next((key for key in keys if key in first), None) for keys in (IMAGES, TARGETS))
        if image is None or target is None:
            raise GradFilterError(
                f"The items of {name} have the fields {', '.join(map(str, first))}; name the image one of "
                f"{', '.join(IMAGES)}, and its target one of {', '.join(TARGETS)}."
            )
        return _Pairs(samples, image, target), (first[image], first[target])
    if not isinstance(first, tuple | list) or len(first) != 2:
        kind = f"a {type(first).__name__} of {len(first)}" if isinstance(first, tuple) else shown(first)
        raise GradFilterError(
            f"An item of {name} must be a pair (image, target), or a dictionary of the two, not {kind}."
        )
    return samples, (first[0], first[1])


def _check_map_style(samples: Any, name: str) -> None:
    kind = type(samples)
    is_map = (
        hasattr(kind, "__len__") and hasattr(kind, "__getitem__") and not issubclass(kind, IterableDataset)
    )
    if not is_map or (isinstance(samples, Mapping) and 0 not in samples):
        raise GradFilterError(
            f"{name} must be a map-style set, with a length and items by number, not {shown(samples)}; give "
            "a Dataset or a list of pairs (image, target)."
        )
    if not len(samples):
        without = "; give None to train without tests" if name == "test" else ""
        raise GradFilterError(f"The {name if name == 'test' else 'training'} set is empty{without}.")
