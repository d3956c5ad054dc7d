"""``python -m gradfilter.native``: build the native passes, where the install could not."""

from __future__ import annotations

import sys

from .build import build

if __name__ == "__main__":
    problem = build()
    sys.exit(f"gradfilter.native: not built, {problem}; torch's operators serve instead." if problem else 0)
