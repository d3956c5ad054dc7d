"""Transforms: shapes and types, pictures and masks together, random numbers of torch alone."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import gradfilter as gf
from gradfilter.data.transforms import Transform, Transformed, test_transform, train_transform
from gradfilter.pictures import MEAN, STD

pytestmark = pytest.mark.usefixtures("vision")


def scene(width: int = 60, height: int = 40) -> tuple[Image.Image, Image.Image]:
    """A picture whose red says the class of each pixel: 0, 1 or 2 in blobs."""
    coarse = np.random.default_rng(0).integers(0, 3, (height // 10, width // 10), np.uint8)
    mask = coarse.repeat(10, 0).repeat(10, 1)
    picture = np.zeros((*mask.shape, 3), np.uint8)
    picture[..., 0] = 100 * mask
    return Image.fromarray(picture), Image.fromarray(mask)


def plain(image: torch.Tensor) -> torch.Tensor:
    """Values from 0 to 255 again."""
    return 255 * (image * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1))


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("size", [(8, 8), (60, 40), (500, 30), (1, 7)])
def test_pictures_of_any_size_become_tensors_of_one(size: tuple[int, int], augment: bool) -> None:
    image, label = train_transform("classify", 32, augment)(Image.new("RGB", size), 3)
    assert image.shape == (3, 32, 32)
    assert image.dtype == torch.float32
    assert label == 3
    image, mask = train_transform("segment", 32, augment)(Image.new("RGB", size), Image.new("L", size))
    assert image.shape == (3, 32, 32)
    assert type(mask) is torch.Tensor
    assert (mask.shape, mask.dtype) == ((32, 32), torch.int64)


def test_values_are_normalised() -> None:
    image, _ = test_transform("classify", 8)(Image.new("RGB", (8, 8), (255, 0, 51)), 0)
    expected = (torch.tensor([1.0, 0.0, 0.2]) - torch.tensor(MEAN)) / torch.tensor(STD)
    assert torch.allclose(image, expected.view(3, 1, 1).expand(3, 8, 8), atol=1e-6)


def test_a_small_picture_is_scaled_up_whole_and_a_large_one_cropped() -> None:
    frame = np.zeros((8, 8, 3), np.uint8)
    frame[0] = frame[-1] = frame[:, 0] = frame[:, -1] = 255
    image, _ = test_transform("classify", 32)(Image.fromarray(frame), 0)
    assert plain(image)[:, 0].min() > 250
    large = Image.new("RGB", (320, 320), "white")
    large.paste("black", (10, 10, 310, 310))
    image, _ = test_transform("classify", 32)(large, 0)
    assert plain(image).max() < 5  # its border is cut off


@pytest.mark.parametrize("seed", range(20))
def test_masks_follow_their_pictures(seed: int) -> None:
    torch.manual_seed(seed)
    transform = train_transform("segment", 48)
    picture, mask = scene()
    # colours must say the class still, so only the geometry is random here
    transform._random.transforms[-1] = _keep
    image, ids = transform(picture, mask)
    assert set(ids.unique().tolist()) <= {0, 1, 2, 255}
    red = plain(image)[0]
    seen = ids != 255
    agreement = ((red / 100).round().long() == ids)[seen].float().mean()
    assert agreement > 0.8  # all but the borders of blobs, where colours mix
    if (~seen).any():
        assert (image[:, ~seen].abs() < 0.02).all()  # grey, which is 0 when normalised
    mirrored = ((red / 100).round().long() == ids.flip(1))[seen].float().mean()
    assert mirrored < agreement


def _keep(*sample: Any) -> Any:
    return sample


def test_a_test_mask_keeps_all_of_the_picture_beside_what_does_not_count() -> None:
    picture, mask = scene(60, 40)
    image, ids = test_transform("segment", 30)(picture, mask)
    assert (ids[20:] == 255).all()
    assert (ids[:20] != 255).all()
    assert (image[:, 20:].abs() < 0.02).all()
    agreement = ((plain(image)[0, :20] / 100).round().long() == ids[:20]).float().mean()
    assert agreement > 0.8


def test_what_must_not_be_mirrored_is_not() -> None:
    picture = Image.fromarray(np.linspace(0, 255, 32).astype(np.uint8)[None].repeat(32, 0)).convert("RGB")
    for flip in (True, False):
        torch.manual_seed(0)
        images = [train_transform("classify", 32, flip=flip)(picture, 0)[0] for _ in range(30)]
        mirrored = [bool(image[0, 16, 0] > image[0, 16, -1]) for image in images]
        assert any(mirrored) is flip


@pytest.mark.parametrize("task", ["classify", "segment"])
def test_random_numbers_are_those_of_torch_alone(task: Any) -> None:
    picture, mask = scene()
    transform = train_transform(task, 24)
    target = 1 if task == "classify" else mask

    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return transform(picture, target)[0]

    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    after = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    assert before == after


def test_without_augmentation_nothing_is_random() -> None:
    picture, mask = scene()
    state = torch.get_rng_state()
    for task, target in (("classify", 0), ("segment", mask)):
        first = train_transform(task, 24, augment=False)(picture, target)[0]  # type: ignore[arg-type]
        assert torch.equal(first, test_transform(task, 24)(picture, target)[0])  # type: ignore[arg-type]
    assert torch.equal(state, torch.get_rng_state())


def test_transformed_samples_load_in_workers_and_train() -> None:
    data = gf.open_data("digits")
    transform = train_transform("classify", 16, flip=data.flip)
    transform(*data.train[0])
    assert pickle.loads(pickle.dumps(transform)) == transform  # noqa: S301  our own
    train = Transformed(data.train, transform)
    assert len(train) == len(data.train)
    images, labels = next(iter(DataLoader(train, 8, num_workers=2)))
    assert images.shape == (8, 3, 16, 16)
    assert labels.dtype == torch.int64


def test_a_batch_of_masks_trains_whatever_the_sizes() -> None:
    samples: Any = [scene(60, 40), scene(20, 90), scene(100, 100)]
    images, masks = next(iter(DataLoader(Transformed(samples, train_transform("segment", 64)), 3)))
    assert (images.shape, masks.shape) == ((3, 3, 64, 64), (3, 64, 64))
    loss = gf.Segmentation(3).loss(torch.randn(3, 3, 16, 16), masks)
    assert loss.isfinite()


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(gf.GradFilterError, match="task must be"):
        Transform("detect", 8)  # type: ignore[arg-type]
    with pytest.raises(gf.GradFilterError, match="size must be"):
        Transform("classify", 0)
