"""torchvision, and libraries that import it, imported when first needed.

The torchvision wheel on PyPI is built against CUDA. Beside a CPU build of torch its compiled operators do not
load, and then `import torchvision` fails, because it describes an operator (`nms`) that does not exist. Its
classification and segmentation models never call that operator: declaring its signature is enough for them.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from functools import cache
from types import ModuleType

import torch

from gradfilter.errors import MissingLibraryError
from gradfilter.optional import import_optional

__all__ = ["library", "neighbour", "torchvision"]

_SYMPTOM = "operator torchvision::nms does not exist"


def torchvision(extra: str = "vision") -> ModuleType:
    """Import torchvision, also where its compiled operators cannot load."""
    try:
        return import_optional("torchvision", extra)
    except RuntimeError as error:
        if _SYMPTOM not in str(error):
            raise
    _declare_missing_operators()
    _forget_half_imported()
    module = import_optional("torchvision", extra)
    warnings.warn(
        "The compiled part of this torchvision does not load beside this torch: detection operators and "
        "image codecs are off, models and transforms work. The real cure is the matching wheel, for a CPU "
        "torch the one from https://download.pytorch.org/whl/cpu.",
        RuntimeWarning,
        stacklevel=2,
    )
    return module


def library(name: str, extra: str) -> ModuleType:
    """Import a library that itself imports torchvision."""
    torchvision(extra)
    return import_optional(name, extra)


def neighbour(name: str, extra: str) -> ModuleType:
    """Import a library that itself imports torchvision if it is there."""
    with suppress(MissingLibraryError):
        torchvision(extra)
    return import_optional(name, extra)


@cache  # a Library takes its operators with it when it is collected: the cache keeps it
def _declare_missing_operators() -> torch.library.Library:
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        schema = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        operators.define(schema)
    return operators


def _forget_half_imported() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
