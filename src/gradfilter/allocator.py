"""Keep freed memory for the next step, instead of giving it back to the system and asking for it again.

Only between epochs it is given back: what was freed lies in pieces, of which not every one fits again.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

__all__ = ["give_back_freed_memory", "keep_freed_memory"]

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the numbers that glibc's malloc.h gives to them
AT_LEAST = {TRIM_THRESHOLD: 2**31 - 1, MMAP_THRESHOLD: 2**30}


@cache
def keep_freed_memory() -> bool:
    """Tell the C library so, for the whole process; returns whether it could be told.

    Every step of a training frees large maps and asks for the same again. glibc returns them to the system
    each time, and the system clears each page anew: on a small machine that takes as long as a convolution.
    The process then stays as large as it once was. Whoever has set malloc's own variables is left alone.
    """
    library = _glibc()
    if library is None or any(n.startswith(("MALLOC_", "GLIBC_TUNABLES")) for n in os.environ):
        return False
    told = [library.mallopt(name, value) for name, value in AT_LEAST.items()]
    return all(told)


def give_back_freed_memory() -> None:
    """All of it, once; without this a long training grows by some MiB now and then."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
