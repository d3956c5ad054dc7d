"""A folder that one process at a time writes to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from .errors import GradFilterError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK", "held"]

LOCK = ".lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Refused while another process holds the folder. It lets go when it ends, even if it is killed."""
    if fcntl is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise GradFilterError(
            f"{folder} cannot be written ({error.strerror or error}); change its access rights, or make room."
        ) from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, not held by its workers too
        except (BlockingIOError, PermissionError):
            raise GradFilterError(
                f"{folder} is in use by {_noted(file)}; wait for its end, or end it first."
            ) from None
        except OSError:  # some network disks know no locks
            yield
            return
        with suppress(OSError):  # a full disk
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        yield


def _noted(file: TextIO) -> str:
    with suppress(OSError):  # where locked files cannot be read
        file.seek(0)
        return f"process {file.read().strip()}"
    return "another process"
