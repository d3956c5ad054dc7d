"""gradfilter models: the names that MODEL may have."""

from __future__ import annotations

import argparse
import sys
from typing import Any

__all__ = ["add"]


def add(commands: Any) -> None:
    models = commands.add_parser("models", help="list the models that MODEL may name")
    models.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from ..models import names

    print("\n".join(names()))
    print(
        "Also timm:NAME, smp:HEAD/ENCODER such as smp:FPN/mobilenet_v2, package.module:factory.",
        file=sys.stderr,
    )
