"""Compile the C++ sources here. At install the build hook does; later, ``python -m gradfilter.native``.

Needs a C++ compiler and nothing else. Without one gradfilter works all the same, with torch's operators.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["HERE", "LIBRARY", "WIDE", "build"]

HERE = Path(__file__).parent
SOURCES = sorted(HERE.glob("*.cpp"))
HEADERS = sorted(HERE.glob("*.h"))
_TEXT = b"".join(path.read_bytes() for path in (*SOURCES, *HEADERS))
# Named after its sources: a library of another version is never loaded. ctypes takes ".so" everywhere.
LIBRARY = f"kernels-{hashlib.sha256(_TEXT).hexdigest()[:8]}.so"
WIDE = LIBRARY.replace(".so", "-wide.so")  # for processors with AVX-512: twice as many floats in a vector
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=fast")
WIDE_FLAGS = (*FLAGS, "-march=x86-64-v4", "-mprefer-vector-width=512")


def build(folder: Path = HERE) -> str | None:
    """Compile into ``folder``; returns why that was not possible, or None."""
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None
    )
    if compiler is None:
        return "there is no C++ compiler"
    problem = _compile(compiler, FLAGS, folder / LIBRARY)
    if problem is None and platform.machine() in ("x86_64", "AMD64"):
        _compile(compiler, WIDE_FLAGS, folder / WIDE)  # an old compiler may not know such processors: no harm
    return problem


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> str | None:
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            command = [compiler, *flags, *map(str, SOURCES), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)  # noqa: S603
            if done.returncode:
                return f"{compiler} failed: {done.stderr.strip()[-300:]}"
            made.replace(target)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None
