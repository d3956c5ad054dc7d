"""Libraries that are no part of the core: imported where they are used, named where they are missing."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from .errors import MissingLibraryError

__all__ = ["import_optional"]


def import_optional(name: str, extra: str) -> ModuleType:
    """Import a library, or say which extra has it.

    >>> import_optional("json", "vision").__name__
    'json'
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # it is there, but something that it needs is not
            raise
        library = name.partition(".")[0]
        raise MissingLibraryError(f'{library} is not installed: pip install "gradfilter[{extra}]".') from None
