"""gradfilter recipes: the settings that come with the package."""

from __future__ import annotations

import argparse
from typing import Any

from .options import add_command

__all__ = ["add"]

EXAMPLES = """\
examples:
  gradfilter recipes                                  all names
  gradfilter recipes cvpr2023-cifar10-mobilenet_v2    what is in one
  gradfilter train --recipe pets --epochs 3           use it; any field can be given anew
"""


def add(commands: Any) -> None:
    parser = add_command(commands, "recipes", "list the recipes for train, or show one", EXAMPLES)
    parser.add_argument("name", nargs="?", help="the one to show")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from ..plans import table
    from ..training.recipes import read_text, recipe_names, title_of

    if arguments.name:
        print(read_text(arguments.name), end="")
    else:
        print(table([["recipe", "what"], *([name, title_of(name)] for name in recipe_names())]))
