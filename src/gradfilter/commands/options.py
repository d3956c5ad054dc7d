"""Options that several commands share, and what they stand for."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import GradFilterError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..plans import Plan

__all__ = [
    "add_command",
    "add_model",
    "add_planning",
    "add_run",
    "check_writable",
    "count",
    "model_of",
    "plan_of",
]


def add_command(commands: Any, name: str, help_: str, examples: str) -> argparse.ArgumentParser:
    """A command whose --help ends with examples, as they are written."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help_, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return parser


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="the folder of the run")
    parser.add_argument("--weights", choices=["best", "last"], default="best", help="default: best")


def add_planning(parser: argparse.ArgumentParser, *, size: int) -> None:
    add_model(parser, size=size)
    add = parser.add_argument
    add("--norm", choices=["fixed", "affine", "batch"], default="fixed", help="batch norms (default: fixed)")
    add("--batch", type=count, default=8, help="pictures in a batch (default: 8)")


def add_model(parser: argparse.ArgumentParser, *, size: int) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a name; `gradfilter models` lists most")
    add("--layers", default="last:4", help='which train: "last:4" (default), "all", "layer4.*" ...')
    add("--patch", type=count, default=2, help="gradient filtering: side of the patches (default: 2)")
    add("--taps", choices=["overlap", "collapse"], default="overlap", help="default: overlap")
    add("--method", help='another method, as in docs/methods.md: "Quantized(bits=4)" ...')
    add("--size", type=count, default=size, help=f"side of the pictures (default: {size})")
    add("--classes", type=count, help="outputs of the model (default: as usual)")
    add("--weights", metavar="FILE", help="weights, .safetensors or .pth (default: random)")


def model_of(arguments: argparse.Namespace) -> nn.Module:
    from ..models import build

    return build(arguments.model, classes=arguments.classes, weights=arguments.weights)


def plan_of(arguments: argparse.Namespace, model: nn.Module, example: Tensor) -> Plan:
    from ..costs import plan
    from ..methods import GradientFilter
    from ..methods.text import method_from

    patch, taps = arguments.patch, arguments.taps
    method = method_from(arguments.method) if arguments.method else GradientFilter(patch, taps)
    return plan(model, method, arguments.layers, norm=arguments.norm, example=example)


def check_writable(file: str | None) -> None:
    """Before the measuring, so that a wrong name does not cost its minutes."""
    if file and (Path(file).is_dir() or not os.access(Path(file).parent, os.W_OK)):
        raise GradFilterError(f"{file} cannot be written; give a file in a folder that exists.")


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)
