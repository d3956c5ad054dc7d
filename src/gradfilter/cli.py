"""The command ``gradfilter``. Everything else, torch above all, is imported when a command needs it."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from .commands import analyze, bench, demo, evaluate, export, models, plan, predict, recipes, train
from .errors import GradFilterError

__all__ = ["main"]

COMMANDS = (train, evaluate, predict, export, recipes, demo, plan, analyze, bench, models)
EXAMPLES = """\
examples:
  gradfilter train --data pictures/                        fine-tune on a folder per class; all else by itself
  gradfilter train --recipe pets --layers last:2 --minutes 10
  gradfilter train --resume runs/1                         go on with a run that was stopped
  gradfilter predict runs/1 new/*.jpg                      labels or masks of pictures
  gradfilter export runs/1 model.onnx                      for other programs
  gradfilter demo                                          exact and filtered training, side by side
  gradfilter plan resnet18 --layers last:4 --patch 4       what would change, and the bytes it saves
  gradfilter plan mcunet-5fps --size 128 --batch 32 --layers all --taps collapse
  gradfilter analyze mobilenet_v2 --weights mobilenet_v2.pth --size 96
  gradfilter bench layers --json layers.json               single layers, exact against filtered
  gradfilter bench step resnet18 --layers last:4           whole training steps, inference to filtered
  gradfilter models                                        names for MODEL
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 2 for what the user can put right, or 130 if interrupted."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch says so; nothing here needs it
    try:
        arguments = _parser().parse_args(argv)
        arguments.run(arguments)
        sys.stdout.flush()
    except GradFilterError as error:
        print(f"gradfilter: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        print("gradfilter: the memory does not suffice; try a smaller --batch or --size.", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"gradfilter: {stop.args[0] if stop.args else 'interrupted'}", file=sys.stderr)
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
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """One sentence for a wrong command line, like every other error, instead of the whole usage.

    read: takes all arguments of a command that has a way of its own to read them.
    """

    read: Callable[[Sequence[str]], argparse.Namespace] | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.read is not None:
            return self.read(args), []
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")
