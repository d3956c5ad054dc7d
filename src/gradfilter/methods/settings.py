"""Settings of methods: checked choices, and values that differ from layer to layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..errors import PlanError

__all__ = [
    "ByLayer",
    "check_choice",
    "check_patch",
    "check_tokens",
    "check_variance",
    "frozen",
    "of_layer",
    "values_of",
]


class ByLayer(dict[str, Any]):
    """From layer globs to values; never changed, so that it can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def frozen(value: Any) -> Any:
    """Lists as tuples and dicts as ``ByLayer``, so that methods that hold them can be hashed.

    >>> frozen({"layer1.*": [2, 4], "*": 2})
    {'layer1.*': (2, 4), '*': 2}
    """
    if isinstance(value, Mapping):
        return ByLayer({pattern: frozen(own) for pattern, own in value.items()})
    return tuple(value) if isinstance(value, list) else value


def values_of(setting: Any) -> Iterable[Any]:
    """All values that a setting has in one layer or another."""
    return setting.values() if isinstance(setting, ByLayer) else [setting]


def of_layer(setting: Any, layer: str, name: str) -> Any:
    """The value of the setting ``name`` in one layer: that of the first pattern that matches."""
    if not isinstance(setting, ByLayer):
        return setting
    for pattern, value in setting.items():
        if fnmatchcase(layer, pattern):
            return value
    kind = name.rpartition(" ")[2].replace("_", " ")
    raise PlanError(f"{name} has no pattern that matches layer {layer}; add '*' with a default {kind}.")


def check_patch(name: str, patch: object) -> None:
    sides = patch if isinstance(patch, tuple) else (patch,)
    if not sides or not all(isinstance(side, int) and side >= 1 for side in sides):
        raise PlanError(f"{name} must be whole numbers of at least 1, not {patch!r}; 2 or 4 are usual.")


def check_tokens(tokens: object) -> None:
    if tokens is not None and not (
        isinstance(tokens, tuple)
        and len(tokens) == 2
        and all(type(side) is int and side >= 1 for side in tokens)
    ):
        raise PlanError(f"tokens must be the height and width of a map, such as (14, 14), not {tokens!r}.")


def check_variance(variance: float) -> None:
    if not 0 < variance <= 1:
        raise PlanError(f"variance must be above 0 and at most 1, not {variance!r}; 0.8 is usual.")


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise PlanError(f"{name} must be {' or '.join(map(repr, known))}, not {value!r}.")
