"""From a model's name to the model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeGuard

from torch import nn

from gradfilter.errors import ModelError, nearest
from gradfilter.models._fcn import FCN
from gradfilter.models._nets import NETS
from gradfilter.models._pretrained import find_weights
from gradfilter.models._smp import make_traceable_
from gradfilter.models._torchvision import library, torchvision
from gradfilter.models._weights import load_weights

__all__ = ["build", "names"]

Options = Mapping[str, Any]


def build(
    name: str,
    *,
    classes: int | None = None,
    weights: str | os.PathLike[str] | None = None,
    **options: Any,
) -> nn.Module:
    """Build a model by name; nothing is ever downloaded.

    >>> import torch
    >>> model = build("tiny", classes=3)
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 3])

    A name is one of

    - `mcunet-5fps`, `proxyless-w0.3`, `mbv2-w0.35`, `tiny`: networks of gradfilter itself;
    - a classification or segmentation model of torchvision, such as `resnet18` or `deeplabv3_resnet50`;
    - `timm:NAME`, a model of timm;
    - `smp:HEAD/ENCODER`, such as `smp:DeepLabV3/mobilenet_v2`, of segmentation_models_pytorch, and
      `smp:FCN/ENCODER`, our own head on its encoders;
    - `package.module:factory`, a function or class of your own that returns the model.

    `classes` is the number of outputs; without it the model keeps its usual number. `weights` is a file for
    `load_weights`, or "auto" for the usual ones where they are on this machine already, from an installed
    package or an earlier download; if `classes` differs from the file's, the classifier starts afresh.
    The usual weights of `smp:HEAD/ENCODER` are the encoder's.
    `options` go to the model's constructor.
    """
    if classes is not None and classes < 1:
        raise ModelError(f"{name} needs at least one class, not {classes}.")
    model = _construct(name, classes, options)
    if weights is not None:
        file = find_weights(name) if weights == "auto" else weights
        load_weights(model, file, new_head=classes is not None)
    return model


def names() -> list[str]:
    """Name our own models and, where torchvision is installed, its classification and segmentation models."""
    try:
        classifiers, segmenters = _torchvision_names()
    except ModelError:
        return list(NETS)
    return [*NETS, *classifiers, *segmenters]


def _construct(name: str, classes: int | None, options: Options) -> nn.Module:
    source, colon, rest = name.partition(":")
    if name in NETS:
        return _call(name, NETS[name], _named("classes", classes), options)
    if not colon:
        return _from_torchvision(name, classes, options)
    if source == "timm":
        return _from_timm(rest, classes, options)
    if source == "smp":
        return _from_smp(rest, classes, options)
    return _from_factory(source, rest, classes, options)


def _from_torchvision(name: str, classes: int | None, options: Options) -> nn.Module:
    try:
        classifiers, segmenters = _torchvision_names()
    except ModelError as missing:
        raise ModelError(
            f"{name} is not among the models that need no other library ({', '.join(NETS)}), and {missing}"
        ) from None
    if name not in classifiers + segmenters:
        raise ModelError(f"There is no model {name}.{nearest(name, [*NETS, *classifiers, *segmenters])}")
    fixed = {"name": name, "weights": None, **_named("num_classes", classes)}
    if name in segmenters:
        fixed["weights_backbone"] = None  # its default is a download
    return _call(name, torchvision().models.get_model, fixed, options)


def _torchvision_names() -> tuple[list[str], list[str]]:
    models = torchvision().models
    return models.list_models(module=models), models.list_models(module=models.segmentation)


def _from_timm(name: str, classes: int | None, options: Options) -> nn.Module:
    timm = library("timm", "vision")
    if not timm.is_model(name):
        raise ModelError(f"timm has no model {name}.{nearest(name, timm.list_models())}")
    fixed = {"model_name": name, "pretrained": False, **_named("num_classes", classes)}
    return _call(f"timm:{name}", timm.create_model, fixed, options)


def _from_smp(name: str, classes: int | None, options: Options) -> nn.Module:
    smp = library("segmentation_models_pytorch", "seg")
    head, _, encoder = name.partition("/")
    heads = {kind.__name__: kind for kind in (*smp.MODEL_ARCHITECTURES_MAPPING.values(), FCN)}
    encoders = smp.encoders.get_encoder_names()
    if head not in heads:
        raise ModelError(f"smp has no head {head!r} (smp:HEAD/ENCODER).{nearest(head, heads)}")
    if encoder not in encoders and not _is_timm_encoder(encoder):
        raise ModelError(f"smp has no encoder {encoder!r} (smp:HEAD/ENCODER).{nearest(encoder, encoders)}")
    fixed = {"encoder_name": encoder, "encoder_weights": None, **_named("classes", classes)}
    model = _call(f"smp:{name}", heads[head], fixed, options)
    make_traceable_(model)
    return model


def _is_timm_encoder(encoder: str) -> bool:
    return encoder.startswith("tu-") and bool(library("timm", "seg").is_model(encoder.removeprefix("tu-")))


def _from_factory(module: str, attribute: str, classes: int | None, options: Options) -> nn.Module:
    name = f"{module}:{attribute}"
    factory = _find_factory(module, attribute)
    argument = _class_argument(factory) if classes is not None else None
    # The user's own code: what it raises is theirs to see, unchanged.
    model = factory(**({argument: classes} if argument else {}), **options)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} returned a {type(model).__name__}, not a torch.nn.Module.")
    return model if classes is None or argument else _with_outputs(name, model, classes)


def _find_factory(module: str, attribute: str) -> Callable[..., Any]:
    name = f"{module}:{attribute}"
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ModelError(
            f"{name} is no model name: with a colon, it is timm:NAME, smp:HEAD/ENCODER "
            "or package.module:factory."
        )
    if module.partition(".")[0] == "torchvision":
        library("torchvision", "vision")  # which may need help to be imported
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ModelError(f"{name} names a module that Python does not find: {error.name}.") from None
    factory: Callable[..., Any] | None = getattr(found, attribute, None)
    if not callable(factory):
        raise ModelError(f"{module} has no function {attribute}.{nearest(attribute, vars(found))}")
    return factory


def _class_argument(factory: Callable[..., Any]) -> str | None:
    parameters = inspect.signature(factory).parameters
    return next((name for name in ("num_classes", "classes") if name in parameters), None)


def _with_outputs(name: str, model: nn.Module, classes: int) -> nn.Module:
    """Give a model that takes no number of classes a new last layer."""
    heads = [(path, layer) for path, layer in model.named_modules() if _may_be_head(layer)]
    if not heads:
        raise ModelError(f"{name} takes no num_classes and has no linear or 1x1 layer to replace.")
    path, layer = heads[-1]
    head = _like(layer, classes)
    if not path:
        return head
    parent, _, child = path.rpartition(".")
    setattr(model.get_submodule(parent), child, head)
    return model


def _may_be_head(layer: nn.Module) -> TypeGuard[nn.Linear | nn.Conv2d]:
    return isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1))


def _like(layer: nn.Linear | nn.Conv2d, outputs: int) -> nn.Module:
    bias, device, dtype = layer.bias is not None, layer.weight.device, layer.weight.dtype
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, outputs, bias=bias, device=device, dtype=dtype)
    return nn.Conv2d(layer.in_channels, outputs, 1, bias=bias, device=device, dtype=dtype)


def _named(argument: str, classes: int | None) -> dict[str, Any]:
    return {} if classes is None else {argument: classes}


def _call(name: str, constructor: Callable[..., Any], fixed: Options, options: Options) -> nn.Module:
    clash = sorted(fixed.keys() & options.keys())
    if clash:
        raise ModelError(f"{name} does not take {', '.join(clash)} as an option; use classes= and weights=.")
    try:
        model: nn.Module = constructor(**fixed, **options)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{name} cannot be built with {dict(options)}: {error}") from error
    return model
