"""gradfilter demo: MobileNetV2 adapts to digits, exactly and filtered, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .options import count

__all__ = ["add"]


def add(commands: Any) -> None:
    parser = commands.add_parser("demo", help="fine-tune MobileNetV2 exactly and filtered, side by side")
    parser.add_argument("--epochs", type=count, default=5, help="of each training (default: 5)")
    parser.add_argument("--out", default="runs/demo", help="folder of the runs (default: runs/demo)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from ..bench.charts import check_matplotlib
    from ..demo import compare
    from ..models._pretrained import find_weights

    check_matplotlib()
    find_weights("mobilenet_v2")  # before the work: says what to install if they are not there
    folder = Path(arguments.out)
    print(compare(folder, arguments.epochs))
    print(f"Curves, costs and plan: {folder / 'report.html'}; pictures beside it.")
