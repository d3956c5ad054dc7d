"""What gf.fit refuses before it trains, each with one sentence, and what it still takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import gradfilter as gf
from gradfilter.training.settings import Config, Loop
from test_processes import run_together

pytestmark = pytest.mark.usefixtures("vision")  # torchmetrics imports torchvision, which may warn

IMAGE = torch.zeros(3, 8, 8)
PAIRS = [(torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(i)), i % 2) for i in range(8)]
MASKS = [(image, (image[0] > 0).long()) for image, _ in PAIRS]
PICTURE = Image.new("RGB", (8, 8))


class Stream(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield from PAIRS

    def __len__(self) -> int:
        return len(PAIRS)


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


def segmenter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))


def fit(**given: Any) -> Any:
    usual = {"model": classifier(), "train": PAIRS, "test": None, "task": gf.Classification(2)}
    return gf.fit(**{**usual, "epochs": 1, "batch": 4, **given})


def labelled(*labels: Any) -> list[Any]:
    return [(image, labels[i % len(labels)]) for i, (image, _) in enumerate(PAIRS)]


def imaged(image: Any) -> list[Any]:
    return [(image, i % 2) for i in range(8)]


def assert_refused(sentence: str, **given: Any) -> None:
    with pytest.raises(gf.GradFilterError) as caught:
        fit(**given)
    said = str(caught.value)
    assert sentence in said
    assert said[-1] == "."
    assert "\n" not in said


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"optimizer": "lion"}, "optimizer must be sgd or adamw, not 'lion'."),
        ({"schedule": "foo"}, "schedule must be cosine or constant, not 'foo'."),
        ({"precision": "fp16"}, "precision must be float32 or bf16, not 'fp16'."),
        ({"epochs": 1.5}, "epochs must be a whole number, not 1.5."),
        ({"epochs": "3"}, "epochs must be a whole number, not '3'."),
        ({"batch": 2.5}, "batch must be a whole number, not 2.5."),
        ({"patience": True}, "patience must be a whole number, not True."),
        ({"seed": None}, "seed must be a whole number, not None."),
        ({"lr": "x"}, "lr must be a number, not 'x'."),
        ({"lr": [0.1]}, "lr must be a number, not a list."),
        ({"clip": torch.zeros(2, 2)}, "clip must be a number, not a Tensor."),
        ({"seed": 10**23}, f"seed must be from -2**63 to 2**63 - 1, not {10**23}."),
        ({"batch": 2**63}, f"batch must be from 1 to 2**63 - 1, not {2**63}."),
        ({"label_smoothing": 0.1}, "fit leaves label_smoothing to the task"),
        ({"workers": -1}, "workers must be at least 0, not -1."),
        ({"workers": 1.5}, "workers must be a whole number, not 1.5."),
        ({"folder": 3}, "folder must be a path, not 3."),
        ({"resume": True}, "resume needs the folder of the training to go on with."),
    ],
)
def test_settings_that_are_none(change: dict[str, Any], sentence: str) -> None:
    assert_refused(sentence, **change)


def test_settings_may_be_numbers_of_other_kinds() -> None:
    fit(lr=0, epochs=numpy.int64(1), batch=numpy.int64(4), momentum=numpy.float32(0.5), clip=1)
    assert Loop(seed=2**63 - 1).seed == 2**63 - 1


def test_every_config_is_checked_and_says_where_it_comes_from() -> None:
    with pytest.raises(gf.GradFilterError, match=r"^seed must be from -2"):
        Config(seed=10**23)
    with pytest.raises(gf.GradFilterError, match=r"^config\.json: seed must be from -2"):
        Config.of({"seed": 10**23}, "config.json")


@pytest.mark.parametrize(
    ("classes", "sentence"),
    [(0, "at least 2, not 0"), (1, "at least 2, not 1"), ("2", "a whole number, not '2'"), (2.0, "not 2.0")],
)
@pytest.mark.parametrize("task", [gf.Classification, gf.Segmentation])
def test_numbers_of_classes_that_are_none(task: Any, classes: Any, sentence: str) -> None:
    with pytest.raises(gf.GradFilterError, match=f"^classes must be .*{sentence}"):
        task(classes)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, str(file), file / "below"):
        assert_refused(f"{folder} cannot be a folder, as {file} is a file", folder=folder)


def test_no_folder_is_made_where_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    place = tmp_path / "nowhere"
    assert_refused(f"There is no checkpoint in {place} to go on from", folder=place, resume=True)
    assert not place.exists()


def test_an_earlier_training_is_not_written_over(tmp_path: Path) -> None:
    fit(folder=tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert_refused(f"{tmp_path} holds the checkpoint of an earlier training", folder=tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert len(fit(folder=tmp_path, resume=True, epochs=2).epochs) == 2


TWICE = """
import gradfilter as gf
from test_fit_input import fit
mine = folder / "kept" if rank == 0 else None  # only the first one writes
fit(folder=mine)
try:
    fit(folder=mine)
except gf.GradFilterError as error:
    (folder / f"{rank}.txt").write_text(str(error))
"""


def test_all_processes_refuse_what_the_first_would_write_over(tmp_path: Path) -> None:
    run_together(tmp_path, TWICE)
    for rank in range(2):
        assert "holds the checkpoint of an earlier training" in (tmp_path / f"{rank}.txt").read_text()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": None}, "model must be a torch.nn.Module, not None."),
        ({"model": "resnet18"}, "model must be a torch.nn.Module, not 'resnet18'."),
        ({"model": nn.Linear}, "model must be a torch.nn.Module, not a type."),
        ({"task": None}, "or have loss, count as they do; it is None."),
        ({"task": "classify"}, "task must be gf.Classification(classes) or gf.Segmentation(classes), or"),
        ({"task": gf.Classification}, "as they do; it is a type."),
        ({"train": None}, "train must be a map-style set, with a length and items by number, not None;"),
        ({"train": iter(PAIRS)}, "train must be a map-style set"),
        ({"train": DataLoader(PAIRS)}, "not a DataLoader;"),  # type: ignore[arg-type]
        ({"train": Stream()}, "not a Stream;"),
        ({"train": {"train": PAIRS}}, "not a dict;"),
        ({"train": list}, "not a type;"),
        ({"test": 3}, "test must be a map-style set"),
        ({"train": []}, "The training set is empty."),
        ({"test": []}, "The test set is empty; give None to train without tests."),
    ],
)
def test_parts_that_are_something_else(change: dict[str, Any], sentence: str) -> None:
    assert_refused(sentence, **change)


@pytest.mark.parametrize("name", ["train", "test"])
@pytest.mark.parametrize(
    ("samples", "sentence"),
    [
        (
            [(IMAGE, 0, 1)] * 4,
            "must be a pair (image, target), or a dictionary of the two, not a tuple of 3.",
        ),
        ([IMAGE] * 4, "must be a pair (image, target), or a dictionary of the two, not a Tensor."),
        ([None] * 4, "must be a pair (image, target), or a dictionary of the two, not None."),
        (imaged(PICTURE), "is an Image; give the set a transform that makes float32 tensors."),
        (imaged(None), "is None; give the set a transform that makes float32 tensors."),
        (imaged(IMAGE.byte()), "is of uint8; give the set a transform that makes float32 tensors."),
        (imaged(IMAGE.double()), "is of float64; give the set a transform that makes float32 tensors."),
        (imaged(IMAGE.double().numpy()), "is of float64; give the set"),
        ([{"image": PICTURE, "label": 0}], "is an Image; give the set a transform"),
        (labelled("cat"), "A label must be one whole number, not 'cat'."),
        (labelled(0.5), "A label must be one whole number, not float64."),
        (labelled(None), "A label must be one whole number, not None."),
        (labelled(True), "A label must be one whole number, not bool."),
        (labelled(torch.tensor([1])), "A label must be one whole number, not int64 of shape (1,)."),
        (labelled(5), "A label is 5, but there are 2 classes, 0 to 1; correct the labels"),
        (labelled(0, 0, 0, 7), "A label is 7, but there are 2 classes, 0 to 1; correct the labels"),
        (labelled(0, -1), "A label is -1, but there are 2 classes, 0 to 1; correct the labels"),
    ],
)
def test_items_that_are_none(name: str, samples: Any, sentence: str) -> None:
    assert_refused(sentence, **{name: samples})


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (PICTURE, "A mask must be a tensor (H, W) of whole numbers, not an Image."),
        (1, "A mask must be a tensor (H, W) of whole numbers, not int64."),
        (torch.zeros(1, 8, 8).long(), "gives (4, 2, 8, 8) for masks (4, 1, 8, 8), but Segmentation needs"),
        (torch.zeros(8, 8), "of whole numbers, not float32 of shape (8, 8)."),
        (
            torch.full((8, 8), 2),
            "A mask has 2, but there are 2 classes, 0 to 1, and 255 for pixels that do not",
        ),
    ],
)
def test_masks_that_are_none(mask: Any, sentence: str) -> None:
    assert_refused(sentence, model=segmenter(), train=labelled(mask), task=gf.Segmentation(2))


@pytest.mark.parametrize("name", ["train", "test"])
def test_a_mask_that_is_wrong_later(name: str) -> None:
    later = [*MASKS[:-1], (IMAGE, torch.full((8, 8), -1))]
    given = {"model": segmenter(), "train": MASKS, "task": gf.Segmentation(2), name: later}
    assert_refused("A mask has -1, but there are 2 classes", **given)


def test_models_of_another_task() -> None:
    assert_refused(
        "The model gives (4, 2) for masks (4, 8, 8), but Segmentation needs one class per pixel",
        train=MASKS,
        task=gf.Segmentation(2),
    )
    assert_refused(
        "The model gives (4, 2, 8, 8), but Classification needs one class per picture, (4, 2)",
        model=segmenter(),
    )


class Both(nn.Module):
    """Takes a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.part = classifier()

    def forward(self, given: dict[str, Tensor]) -> Any:
        return self.part(given["image"] * given["scale"].view(-1, 1, 1, 1))


class Bytes(nn.Module):
    """Takes pictures of bytes, without a trace of the first look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.part = nn.BatchNorm2d(3), classifier()

    def forward(self, x: Tensor) -> Any:
        return self.part(self.norm(x.float() / 255))


@pytest.mark.parametrize(
    ("model", "samples"),
    [
        (classifier(), labelled(numpy.int64(1))),
        (classifier(), labelled(torch.tensor(1), torch.tensor(0))),
        (classifier(), labelled(torch.tensor(1, dtype=torch.int32))),
        (classifier(), imaged(IMAGE.numpy())),
        (classifier().double(), imaged(IMAGE.double())),
        (Bytes(), imaged(IMAGE.byte())),
        (Both(), imaged({"image": IMAGE, "scale": torch.tensor(2.0)})),
        (nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 2)), imaged(torch.tensor([1, 4]))),
        (classifier(), [list(pair) for pair in PAIRS]),
    ],
)
def test_what_is_taken(model: nn.Module, samples: Any) -> None:
    assert len(fit(model=model, train=samples, test=samples).epochs) == 1


def test_targets_that_only_training_takes() -> None:
    """Shares of all classes, and labels of -100, which torch's cross entropy leaves out."""
    for samples in (labelled(torch.tensor([0.3, 0.7])), labelled(0, -100)):
        assert len(fit(train=samples).epochs) == 1
        assert_refused("A label", test=samples)


def test_masks_may_be_bytes_with_pixels_that_do_not_count() -> None:
    mask = torch.tensor([0, 1, 255, 0], dtype=torch.uint8).expand(8, 4).repeat(1, 2)
    task = gf.Segmentation(2)
    assert len(fit(model=segmenter(), train=labelled(mask), test=labelled(mask), task=task).epochs) == 1


def test_lines_and_volumes_may_be_segmented_too() -> None:
    for shape, layer in (((8,), nn.Conv1d), ((4, 4, 4), nn.Conv3d)):
        pairs = [(torch.randn(3, *shape), torch.zeros(shape, dtype=torch.uint8))] * 4
        found = fit(model=layer(3, 2, 1), train=pairs, test=pairs, task=gf.Segmentation(2))
        assert "mean_iou" in found.best_scores


def test_parameters_that_nothing_uses_may_be_anything() -> None:
    model = classifier()
    model.register_parameter("unused", nn.Parameter(torch.tensor([0.0, -torch.inf])))
    assert fit(model=model, seed=-1).epochs


def test_pictures_may_be_of_the_kind_that_autocast_takes() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert fit(train=imaged(IMAGE.bfloat16())).epochs


def test_a_task_that_is_never_tested_needs_no_score() -> None:
    task = SimpleNamespace(loss=gf.Classification(2).loss, count=len)
    assert fit(task=task).epochs
    assert_refused("or have loss, count, score", task=task, test=PAIRS)


def test_tasks_of_the_user_learn_from_anything() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output[:, 0] - target).square().mean()

    def score(outputs: Iterator[tuple[Tensor, Tensor]]) -> dict[str, float]:
        return {"fit": -float(sum(loss(*pair) for pair in outputs))}

    task = SimpleNamespace(loss=loss, score=score, count=len)
    assert "fit" in fit(train=labelled(0.5), test=labelled(0.25), task=task).best_scores


class Counted(Dataset[tuple[Tensor, int]]):
    """Draws from all that can be drawn from, and counts."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        random.random(), numpy.random.rand(), torch.rand(1)  # noqa: S311
        return IMAGE, "cat"


def test_the_first_item_is_read_once_and_no_random_number_is_used_up() -> None:
    found, model = [], classifier()
    for samples in (Counted(), None):
        torch.manual_seed(0)
        numpy.random.seed(0)
        random.seed(0)
        if samples is not None:
            with pytest.raises(gf.GradFilterError, match="A label must be"):
                gf.fit(model, samples, None, gf.Classification(2))
            assert samples.reads == 1
        found.append((random.random(), numpy.random.rand(), float(torch.rand(1))))  # noqa: S311
    assert found[0] == found[1]
