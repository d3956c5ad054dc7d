"""Decoded pictures: the same pixels, without the files."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import gradfilter as gf
from gradfilter.data.decoded import Decoded, bounded
from gradfilter.data.images import class_ids
from gradfilter.data.samples import Masked, Pictures

SIZES = [(200, 100), (90, 300), (20, 30), (64, 64), (1, 1)]


@pytest.fixture
def pictures(tmp_path: Path) -> Pictures:
    items = []
    for label, (width, height) in enumerate(SIZES):
        pixels = np.random.default_rng(label).integers(0, 256, (height, width, 3), np.uint8)
        path = tmp_path / "pictures" / f"{label}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
        items.append((path, label))
    return Pictures(items)


@pytest.fixture
def masked(pictures: Pictures, tmp_path: Path) -> Masked:
    items = []
    for path, label in pictures.items:
        width, height = SIZES[label]
        mask = np.random.default_rng(label).integers(0, 4, (height, width), np.uint8)
        Image.fromarray(mask).save(tmp_path / "pictures" / f"{label}.png")
        items.append((path, tmp_path / "pictures" / f"{label}.png"))
    return Masked(items, class_ids(4, 255))


def same(found: Any, expected: Any) -> bool:
    return bool(found.size == expected.size and (np.asarray(found) == np.asarray(expected)).all())


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_pixels_are_those_of_direct_decoding_and_files_are_not_read_again(
    pictures: Pictures, tmp_path: Path, where: str
) -> None:
    expected = [(bounded(picture, 46), label) for picture, label in pictures]  # 1.15 * 40
    decoded = Decoded(pictures, 40, tmp_path / "kept" if where == "disk" else None)
    shutil.rmtree(tmp_path / "pictures")
    for _ in range(2):
        for index, (picture, label) in enumerate(expected):
            assert same(decoded[index][0], picture)
            assert decoded[index][1] == label
    assert [decoded[i][0].size for i in range(5)] == [(92, 46), (46, 153), (20, 30), (46, 46), (1, 1)]
    assert decoded.labels == [0, 1, 2, 3, 4]
    assert same(decoded[-1][0], expected[-1][0])
    with pytest.raises(IndexError):
        decoded[5]
    with pytest.raises(gf.GradFilterError, match="does not exist"):
        pictures[0]  # what it would be without


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_masks_are_kept_with_their_pictures(masked: Masked, tmp_path: Path, where: str) -> None:
    decoded = Decoded(masked, 40, tmp_path / "kept" if where == "disk" else None)
    for index in range(len(masked)):
        picture, mask = masked[index]
        assert same(decoded[index][0], bounded(picture, 46))
        assert same(decoded[index][1], bounded(mask, 46, is_mask=True))
        assert set(np.unique(np.asarray(decoded[index][1]))) <= {0, 1, 2, 3}
        assert decoded[index][1].mode == "L"


def as_tensor(samples: list[tuple[Any, int]]) -> list[tuple[torch.Tensor, int]]:
    return [(torch.from_numpy(np.array(picture)), label) for picture, label in samples]


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read_the_same(pictures: Pictures, tmp_path: Path, where: str, start: str) -> None:
    if start == "spawn":
        copied = pickle.loads(pickle.dumps(Decoded(pictures, 40, tmp_path / "k")))  # noqa: S301  our own
        assert same(copied[1][0], Decoded(pictures, 40)[1][0])
    decoded = Decoded(pictures, 40, tmp_path / "kept" if where == "disk" else None, workers=2)
    loader = DataLoader(
        decoded,
        batch_size=1,
        num_workers=1 if start == "spawn" else 2,
        collate_fn=as_tensor,
        multiprocessing_context=start,
    )
    for index, [(pixels, label)] in enumerate(loader):
        assert (pixels.numpy() == np.asarray(decoded[index][0])).all()
        assert label == index


def test_a_folder_is_used_again_if_nothing_changed(pictures: Pictures, tmp_path: Path) -> None:
    told: list[int] = []

    def build(samples: Pictures, size: int = 40) -> int:
        told.clear()
        Decoded(samples, size, tmp_path / "kept", tell=lambda task, step, steps: told.append(step))
        return len(told)

    assert build(pictures) == 5
    assert build(pictures) == 0
    assert build(pictures, size=30) == 5
    assert build(Pictures([(path, label + 1) for path, label in pictures.items])) == 5  # other labels
    os.utime(pictures.items[0][0], (1, 1))
    assert build(pictures) == 5  # a file has changed
    for file in (tmp_path / "kept").glob("*.safetensors"):
        file.write_text("damaged")
    assert build(pictures) == 5
    for file in (tmp_path / "kept").glob("*.bin"):
        os.truncate(file, 100)
    assert build(pictures) == 5


def test_a_budget_that_is_too_small_says_what_would_do(pictures: Pictures, tmp_path: Path) -> None:
    with pytest.raises(
        gf.GradFilterError, match=r"take about .* more than 20.0 KiB; give a folder on a disk"
    ):
        Decoded(pictures, 40, budget=20 << 10)
    with pytest.raises(gf.GradFilterError, match="give a larger budget or a smaller size"):
        Decoded(pictures, 40, tmp_path / "kept", budget=20 << 10)
    assert list((tmp_path / "kept").iterdir()) == []
    Decoded(pictures, 40, budget=64 << 10)


def test_a_folder_that_cannot_be_written_is_a_sentence(pictures: Pictures, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(gf.GradFilterError, match="cannot be written"):
        Decoded(pictures, 40, tmp_path / "file")


def test_a_broken_picture_is_named(pictures: Pictures, tmp_path: Path) -> None:
    path = pictures.items[3][0]
    path.write_bytes(path.read_bytes()[:-40])
    for workers in (0, 1):
        with pytest.raises(gf.GradFilterError, match=r"3\.jpg is broken"):
            Decoded(pictures, 40, tmp_path / "kept", workers=workers)
    assert list((tmp_path / "kept").iterdir()) == []


def test_sets_of_other_people_are_taken_too(tmp_path: Path) -> None:
    other: Any = [(Image.new("L", (10, 8), 7), np.int64(3)), (Image.new("RGBA", (8, 8)), torch.tensor(1))]
    for folder in (None, tmp_path):
        decoded = Decoded(other, 40, folder)
        assert decoded.labels == [3, 1]
        assert (np.asarray(decoded[0][0]) == 7).all()


def test_random_numbers_are_left_alone(pictures: Pictures) -> None:
    state = torch.get_rng_state()
    Decoded(pictures, 40)
    assert torch.equal(state, torch.get_rng_state())
