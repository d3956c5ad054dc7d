"""Arrays of numbers in MATLAB 5 files: all that Flowers-102 and SBD need of them, without scipy."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import GradFilterError

__all__ = ["read_mat"]

_HEADER = 128
_MATRIX, _COMPRESSED = 14, 15
_STRUCT, _NUMBERS = 2, range(6, 16)  # classes of matrices; cells, text and sparse ones are left out
_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}


def read_mat(file: Path) -> dict[str, Any]:
    """The numeric arrays of a file by name; those of a struct by its name, a dot, and theirs."""
    try:
        content = file.read_bytes()
        if content[126:128] != b"IM":
            raise ValueError("it is not a little-endian MATLAB 5 file")
        return dict(_arrays(content[_HEADER:]))
    except (OSError, ValueError, KeyError, struct.error, zlib.error) as error:
        raise GradFilterError(f"{file} cannot be read ({error}); fetch it again.") from error


def _arrays(content: bytes) -> Iterator[tuple[str, Any]]:
    for kind, data in _elements(content):
        if kind == _COMPRESSED:
            yield from _arrays(zlib.decompress(data))
        elif kind == _MATRIX:
            yield from _matrix(data)


def _matrix(content: bytes, name: str = "") -> Iterator[tuple[str, Any]]:
    (_, flags), (_, shape), (_, own_name), *rest = _elements(content)
    name, group = name or own_name.decode(), flags[0]
    if group in _NUMBERS:
        stored, values = rest[0]
        yield (
            name,
            np.frombuffer(values, f"<{_TYPES[stored]}").reshape(np.frombuffer(shape, "<i4"), order="F"),
        )
    elif group == _STRUCT:
        (_, length), (_, names), *fields = rest
        width = int.from_bytes(length[:4], "little")
        for number, (_, field) in enumerate(fields):
            label = names[number * width : (number + 1) * width].rstrip(b"\0").decode()
            yield from _matrix(field, f"{name}.{label}")


def _elements(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and bytes of one element after the other; short ones have both in eight bytes."""
    at = 0
    while at + 8 <= len(content):
        kind, size = struct.unpack_from("<II", content, at)
        if kind >> 16:
            kind, size = kind & 0xFFFF, kind >> 16
            yield kind, content[at + 4 : at + 4 + size]
            at += 8
            continue
        if at + 8 + size > len(content):
            raise ValueError("it is cut short")
        yield kind, content[at + 8 : at + 8 + size]
        at += 8 + (size if kind == _COMPRESSED else -(-size // 8) * 8)
