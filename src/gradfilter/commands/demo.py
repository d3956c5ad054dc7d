"""gradfilter demo: exact and filtered training, side by side."""

from __future__ import annotations

import argparse
from typing import Any

from .options import count

__all__ = ["add"]


def add(commands: Any) -> None:
    demo = commands.add_parser("demo", help="train a small network exactly and filtered, side by side")
    demo.add_argument("--steps", type=count, default=80, help="training steps per method (default: 80)")
    demo.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from ..demo import compare
    from ..progress import Progress

    with Progress() as tell:
        made = compare(steps=arguments.steps, tell=tell)
    print(made)
