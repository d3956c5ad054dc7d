"""A data set read so that the same place gives the same image each time, and is known by a digest."""

from __future__ import annotations

from collections.abc import Sized
from hashlib import blake2b
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from .errors import GradFilterError
from .feature_store import digest
from .seeding import seeded

__all__ = ["Reader", "kind_of", "length_of", "number_of", "sample_of"]


class Reader(Dataset[tuple[Any, bytes]]):
    """Each view of each image, drawn from the same random numbers whenever it is read, with its digest."""

    def __init__(self, dataset: Any, views: int, key: str) -> None:
        self._dataset, self._views, self._key = dataset, views, key

    def __len__(self) -> int:
        return len(self._dataset) * self._views

    def __getitem__(self, place: int) -> tuple[Any, bytes]:
        index, view = divmod(place, self._views)
        with seeded(number_of(index, view)):
            item = self._dataset[index]
        if not _is_sample(item):
            return item, b""  # the caller says so; from a worker it would be a traceback
        return item, digest(self._key, f"{index} {view}") if self._key else digest(item[0])


def _is_sample(item: Any) -> bool:
    return isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Tensor)


def sample_of(item: Any, index: int) -> tuple[Tensor, Any]:
    if _is_sample(item):
        return item[0], item[1]
    seen = type(item).__name__
    if isinstance(item, tuple | list):
        seen += f" of {', '.join(type(part).__name__ for part in item) or 'nothing'}"
    raise GradFilterError(
        f"Item {index} of the data set is a {seen}; a cache needs (image, label) with the image a tensor, "
        "as a transform such as torchvision's ToTensor makes it."
    )


def number_of(*parts: int) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


def kind_of(x: Tensor) -> str:
    return f"{'x'.join(map(str, x.shape)) or 'a number'} of {str(x.dtype).removeprefix('torch.')}"


def length_of(dataset: Any) -> int:
    by_number = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
    if not by_number or isinstance(dataset, IterableDataset):
        raise GradFilterError(
            f"A cache looks images up by number, which {type(dataset).__name__} does not offer: "
            "give a data set with __len__ and __getitem__."
        )
    if not len(dataset):
        raise GradFilterError("The data set has no images, so there is nothing to cache.")
    return len(dataset)
