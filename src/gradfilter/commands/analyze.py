"""gradfilter analyze: filtered gradients against exact ones, layer by layer."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..errors import GradFilterError
from .options import add_planning, model_of, plan_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["add"]


def add(commands: Any) -> None:
    analyze = commands.add_parser("analyze", help="compare filtered gradients with exact ones by layer")
    add_planning(analyze, size=96)
    analyze.add_argument("--data", metavar="FOLDER", help="pictures, one folder per class (default: noise)")
    analyze.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    import torch

    from ..analysis import analyze
    from ..pictures import batch_from_folder

    torch.manual_seed(0)
    model = model_of(arguments).eval()
    if arguments.data:
        images, labels = batch_from_folder(arguments.data, arguments.batch, arguments.size)
    else:
        images = torch.randn(arguments.batch, 3, arguments.size, arguments.size)
        labels = torch.arange(arguments.batch) % 2
    print(analyze(model, (images, labels), _classification_loss, plan_of(arguments, model, images)))


def _classification_loss(output: Tensor, labels: Tensor) -> Tensor:
    from torch.nn.functional import cross_entropy

    classes = output.shape[1] if hasattr(output, "shape") and len(output.shape) == 2 else 0
    if int(labels.max()) >= classes:
        raise GradFilterError(
            f"The model does not tell {int(labels.max()) + 1} classes apart, as this command needs here; "
            "gradfilter.analyze in Python takes any model and loss."
        )
    return cross_entropy(output, labels)
