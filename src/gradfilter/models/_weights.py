"""Weight files: opened without running code, compared with the whole model, and only then copied into it."""

from __future__ import annotations

import os
import pickle
import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gradfilter.errors import WeightsError

__all__ = ["load_weights"]

Tensors = Mapping[str, Tensor]

_PICKLES = (".pth", ".pt", ".th")
_WRAPPERS = ("state_dict", "model")
_BODIES = ("encoder", "backbone")
# Torchvision's published files for DenseNets and vision transformers still have the old names of some layers.
_RENAMED = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)"), r"\1\2"),
    (re.compile(r"\bmlp\.linear_1\."), "mlp.0."),
    (re.compile(r"\bmlp\.linear_2\."), "mlp.3."),
)


def load_weights(model: nn.Module, path: str | os.PathLike[str], *, new_head: bool = True) -> tuple[str, ...]:
    """Copy a weight file (.safetensors, or a state dict in .pth, .pt or .th) into a model, or change nothing.

    The file must fit, with two exceptions. If only the number of classes differs, the model's classifier is
    left as it is (with `new_head=False`, that is an error too). If the model has an encoder or a backbone and
    the file is that of a classification network, it goes into that part. Returns the names of the file's
    tensors that were not used.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file(nn.Linear(4, 10).state_dict(), f"{folder}/ten.safetensors")
    ...     load_weights(nn.Linear(4, 10), f"{folder}/ten.safetensors")
    ...     load_weights(nn.Linear(4, 3), f"{folder}/ten.safetensors")
    ()
    ('bias', 'weight')
    """
    file = Path(path).expanduser()
    found = _read(file)
    part = _part_meant(model, found)
    own: Tensors = part.state_dict()
    found = _current_names(found, own)
    unused = _other_head(model, found, own) if part is model else _surplus_classifier(found, own)
    if part is model and unused and not new_head:
        raise WeightsError(_other_classes(file, model, len(found[unused[0]]), len(own[unused[0]])))
    found = _without(found, unused)
    _check_fit(file, part, found, _without(own, unused))
    for name, tensor in found.items():
        own[name].copy_(tensor)
    return tuple(sorted(unused))


def _read(file: Path) -> Tensors:
    if not os.path.exists(file):  # Path.exists raises for names that are too long
        raise WeightsError(f"{file} does not exist.")
    if file.is_dir():
        raise WeightsError(f"{file} is a directory, not a weight file.")
    if file.suffix not in (".safetensors", *_PICKLES):
        raise WeightsError(f"{file} must end in .safetensors, {', '.join(_PICKLES)} to be a weight file.")
    return _state_dict(file, _content(file))


def _content(file: Path) -> Any:
    try:
        return load_file(file) if file.suffix == ".safetensors" else _unpickle_tensors(file)
    except Exception as error:  # a damaged file can break its reader anywhere, and with any error
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            # Without the cause: torch's own message recommends to load the file all the same.
            raise WeightsError(
                f"{file} holds more than tensors and was not loaded, because unpickling it could run any "
                "code: save the state dict alone, best as .safetensors."
            ) from None
        raise WeightsError(f"{file} is damaged or not a weight file ({type(error).__name__}).") from error


def _unpickle_tensors(file: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the pickle protocol of files that are then refused
        return torch.load(file, map_location="cpu", weights_only=True)


def _state_dict(file: Path, content: Any) -> Tensors:
    for wrapper in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not (isinstance(content, Mapping) and content and all(map(_is_entry, content.items()))):
        raise WeightsError(f"{file} holds no state dict, that is named dense tensors and nothing else.")
    parallel = all(name.startswith("module.") for name in content)
    return {name.removeprefix("module.") if parallel else name: tensor for name, tensor in content.items()}


def _is_entry(item: tuple[Any, Any]) -> bool:
    name, value = item
    return (
        isinstance(name, str)
        and isinstance(value, Tensor)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_meta or value.is_complex())
    )


def _part_meant(model: nn.Module, found: Tensors) -> nn.Module:
    for name in _BODIES:
        part = getattr(model, name, None)
        if isinstance(part, nn.Module) and not any(key.startswith(f"{name}.") for key in found):
            return part
    return model


def _current_names(found: Tensors, own: Tensors) -> Tensors:
    return {_current_name(name, own): tensor for name, tensor in found.items()}


def _current_name(name: str, own: Tensors) -> str:
    if name in own:
        return name
    candidates = (pattern.sub(new, name) for pattern, new in _RENAMED)
    return next((candidate for candidate in candidates if candidate in own), name)


def _other_head(model: nn.Module, found: Tensors, own: Tensors) -> list[str]:
    """Name the tensors that do not fit, if what differs is the number of outputs of the last layers.

    A layer inside the network cannot pass for a last one: whatever reads its output would not fit either, and
    differ in more than its outputs.
    """
    unlike = _unlike(found, own)
    layers = [model.get_submodule(name.rpartition(".")[0]) for name in unlike]
    is_head = (
        all(isinstance(layer, nn.Linear | nn.Conv2d) for layer in layers)
        and all(found[name].shape[1:] == own[name].shape[1:] for name in unlike)
        and len({(len(found[name]), len(own[name])) for name in unlike}) == 1
    )
    return unlike if is_head else []


def _surplus_classifier(found: Tensors, own: Tensors) -> list[str]:
    surplus = [name for name in found if name not in own]
    return surplus if len({name.partition(".")[0] for name in surplus}) == 1 else []


def _unlike(found: Tensors, own: Tensors) -> list[str]:
    return [name for name in found if name in own and found[name].shape != own[name].shape]


def _without(tensors: Tensors, names: Collection[str]) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def _check_fit(file: Path, part: nn.Module, found: Tensors, own: Tensors) -> None:
    # Files older than torch 0.4.1 lack the counters, which only a batch norm without momentum reads.
    missing = [name for name in own if name not in found and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in found if name not in own]
    unlike = [f"{name} {_size(found[name])} for {_size(own[name])}" for name in _unlike(found, own)]
    problems = [
        _first_three(kind, names)
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", unlike))
        if names
    ]
    if problems:
        raise WeightsError(f"{file} does not fit {type(part).__name__}: {'; '.join(problems)}.")


def _other_classes(file: Path, model: nn.Module, theirs: int, ours: int) -> str:
    return (
        f"{file} has {theirs} classes and {type(model).__name__} has {ours}: ask for classes={theirs} to "
        f"keep the file's classifier, or for classes={ours} to train a new one."
    )


def _first_three(kind: str, names: list[str]) -> str:
    return f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
