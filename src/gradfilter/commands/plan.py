"""gradfilter plan: what would change in a model, and what that saves."""

from __future__ import annotations

import argparse
from typing import Any

from .options import add_planning, model_of, plan_of

__all__ = ["add"]


def add(commands: Any) -> None:
    plan = commands.add_parser("plan", help="show what would change in a model, and what that saves")
    add_planning(plan, size=224)
    plan.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    import torch

    model = model_of(arguments)
    print(plan_of(arguments, model, torch.empty(arguments.batch, 3, arguments.size, arguments.size)))
