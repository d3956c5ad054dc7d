"""What can go wrong, as one family: every message says what, where, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["GradFilterError", "MissingLibraryError", "ModelError", "PlanError", "WeightsError", "nearest"]


class GradFilterError(Exception):
    """Base of every error that gradfilter raises on purpose."""


class PlanError(GradFilterError):
    """A selection, a method or a plan does not fit the model."""


class ModelError(GradFilterError):
    """A model name is unknown, or the library that has it is missing."""


class MissingLibraryError(ModelError, ImportError):
    """A library that is no part of the core is asked for and not installed."""


class WeightsError(GradFilterError):
    """A weight file cannot be read or does not fit the model."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Say which known names come closest, ready to be put behind a sentence.

    >>> nearest("layer4.cnv1", ["layer4.conv1", "fc"])
    ' Did you mean layer4.conv1?'
    >>> nearest("zzz", ["fc"])
    ''
    """
    close = get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""
