"""What several test files need."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from gradfilter import native
from gradfilter.errors import ModelError
from gradfilter.models import _torchvision

# accelerate_ leaves malloc alone if one of its variables is set, though malloc does not know this one: tests
# that look at memory must not depend on those before them
os.environ["MALLOC_IS_LEFT_ALONE"] = "1"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """pytest-xdist runs one process per core; threads that wait for each other make tests far slower."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Whichever tests ran before, and in whichever process: a test that fails once fails again."""
    torch.manual_seed(0)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def vision() -> None:
    """Import what the names need once, so that the warning about a broken torchvision stays here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _torchvision.library("timm", "vision")
            _torchvision.library("segmentation_models_pytorch", "seg")
        except ModelError as missing:
            pytest.skip(str(missing))


@pytest.fixture
def use_native(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Turn the compiled passes off, or leave them on where they were built."""

    def choose(on: bool) -> None:
        if not on:
            monkeypatch.setattr(native, "_functions", dict)

    return choose
