"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import GradFilterError

__all__ = ["replacing", "sync", "write"]


@contextmanager
def replacing(file: str | os.PathLike[str]) -> Iterator[Path]:
    """Another name to write under: what is there takes the file's place if the block ends well, else nothing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/a.txt") as partial:
    ...         _ = partial.write_text("all of it")
    ...     Path(folder, "a.txt").read_text()
    'all of it'
    """
    target = Path(file)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.touch()  # what cannot be written is refused before the work is done
        mode = partial.stat().st_mode
        yield partial
        with suppress(OSError):  # not all disks know modes
            partial.chmod(mode)  # safetensors makes files that nobody else may read
        sync(partial)  # else a power cut can leave the new name with nothing in it
        partial.replace(target)
    except OSError as error:
        raise GradFilterError(
            f"{file} cannot be written ({error.strerror or error}); make room, or choose another place."
        ) from None
    finally:
        with suppress(OSError):  # what lies in the way may be the folder itself
            partial.unlink(missing_ok=True)


def write(file: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file whole or not at all."""
    with replacing(file) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
