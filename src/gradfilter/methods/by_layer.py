"""A setting that differs by layer: a dict from globs to values, of which the first that matches counts."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from ..errors import PlanError

__all__ = ["ByLayer"]

Value = TypeVar("Value")


class ByLayer(dict[str, Value]):
    """A dict that is never changed, so that the method that has it can be hashed.

    >>> ByLayer({"layer4.*": 4, "*": 2}).of("layer4.0.conv1", "GradientFilter", "patch")
    4
    """

    def __init__(self, values: Mapping[str, Value]) -> None:
        super().__init__(values)

    def of(self, name: str, method: str, setting: str) -> Value:
        for pattern, value in self.items():
            if fnmatchcase(name, pattern):
                return value
        raise PlanError(
            f"{method}'s {setting} has no pattern that matches layer {name}; "
            f"add '*' with a default {setting}."
        )

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))
