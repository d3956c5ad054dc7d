"""torchvision, timm and segmentation_models_pytorch, imported when first needed.

The torchvision wheel on PyPI is built against CUDA. Beside a CPU build of torch its compiled operators do not
load, and then `import torchvision` fails, because it describes an operator (`nms`) that does not exist. Its
classification and segmentation models never call that operator: declaring its signature is enough for them.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from gradfilter.errors import ModelError

__all__ = ["library", "torchvision"]

_SYMPTOM = "operator torchvision::nms does not exist"


def torchvision(extra: str = "vision") -> ModuleType:
    """Import torchvision, also where its compiled operators cannot load."""
    try:
        return _import("torchvision", extra)
    except RuntimeError as error:
        if _SYMPTOM not in str(error):
            raise
    _declare_missing_operators()
    _forget_half_imported()
    module = _import("torchvision", extra)
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
    return _import(name, extra)


def _import(name: str, extra: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModelError(f'{name} is not installed: pip install "gradfilter[{extra}]".') from None


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
