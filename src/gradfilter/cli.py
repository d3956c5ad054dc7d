"""The command ``gradfilter``. Everything else, torch above all, is imported when a command needs it."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import GradFilterError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .plans import Plan

__all__ = ["main"]

EXAMPLES = """\
examples:
  gradfilter demo                                          exact and filtered training, side by side
  gradfilter plan resnet18 --layers last:4 --patch 4       what would change, and the bytes it saves
  gradfilter plan mcunet-5fps --size 128 --batch 32 --layers all --taps collapse
  gradfilter analyze mobilenet_v2 --weights mobilenet_v2.pth --size 96
  gradfilter bench layers --json layers.json               single layers, exact against filtered
  gradfilter models                                        names for MODEL
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 2 for what the user can put right, or 130 if interrupted."""
    arguments = _parser().parse_args(argv)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch says so; nothing here needs it
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except GradFilterError as error:
        print(f"gradfilter: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gradfilter: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `gradfilter models | head`: nobody reads on, and that is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gradfilter",
        description="Train convolutional networks on small devices: the backward runs on patches.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_plan(commands)
    _add_analyze(commands)
    _add_bench(commands)
    models = commands.add_parser("models", help="list the models that MODEL may name")
    models.set_defaults(run=_models)
    return parser


class _Parser(argparse.ArgumentParser):
    """One sentence for a wrong command line, like every other error, instead of the whole usage."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class _Version(argparse.Action):
    """The metadata is read only if someone asks."""

    def __call__(self, *_: Any, **__: Any) -> None:
        from importlib.metadata import version

        print(version("gradfilter"))
        raise SystemExit(0)


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="train a small network exactly and filtered, side by side")
    demo.add_argument("--steps", type=_count, default=120, help="training steps per method (default: 120)")
    demo.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> None:
    from .demo import compare
    from .progress import Progress

    with Progress() as tell:
        made = compare(steps=arguments.steps, tell=tell)
    print(made)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="show what would change in a model, and what that saves")
    _add_planning(plan, batch=8, size=224)
    plan.set_defaults(run=_show_plan)


def _add_analyze(commands: Any) -> None:
    analyze = commands.add_parser("analyze", help="compare filtered gradients with exact ones, layer by layer")
    _add_planning(analyze, batch=8, size=96)
    analyze.add_argument("--data", metavar="FOLDER", help="folder of pictures, one folder per class (default: noise)")
    analyze.set_defaults(run=_analyze)
