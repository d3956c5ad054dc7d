"""What a DataLoader reads, with errors as they were raised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from .errors import GradFilterError

__all__ = ["read"]


def read(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of a loader; of an error in its processes, which is a whole traceback, the sentence."""
    try:
        yield from loader
    except GradFilterError as error:
        kind = type(error)
        raise kind(str(error).rpartition(f"{kind.__name__}: ")[2].strip()) from None
