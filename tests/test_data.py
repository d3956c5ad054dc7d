"""Data sets: every kind from generated files, and one clear sentence for each kind of bad input."""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import pickle
import re
import struct
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import gradfilter as gf
from gradfilter.data.check import check
from gradfilter.data.kinds import KINDS
from gradfilter.data.samples import Data

pytestmark = pytest.mark.usefixtures("vision")
ROOT = Path(__file__).resolve().parents[1]


def put_picture(path: Path, value: int = 100, size: tuple[int, int] = (12, 10)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value // 2, 0)).save(path)


def put_mask(path: Path, *values: Any, size: tuple[int, int] = (12, 10), dtype: Any = np.uint8) -> None:
    """Vertical stripes of values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = np.array(values)[np.arange(size[0]) * len(values) // size[0]]
    Image.fromarray(np.broadcast_to(columns, (size[1], *columns.shape)).astype(dtype).copy()).save(path)


def put_text(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def values_of(samples: Any) -> list[list[int]]:
    """The values that the masks of samples have, each with the sizes checked."""
    for picture, mask in samples:
        assert picture.mode == "RGB"
        assert mask.mode == "L"
        assert picture.size == mask.size
    return [np.unique(np.asarray(mask)).tolist() for _, mask in samples]


def labels_of(samples: Any) -> list[int]:
    for picture, label in samples:
        assert picture.mode == "RGB"
        assert type(label) is int
    return [label for _, label in samples]


def read_all(spec: object, **options: Any) -> None:
    data = gf.open_data(str(spec), **options)
    for samples in (data.train, data.test):
        for index in range(len(samples)):
            samples[index]


def refusal(spec: object, **options: Any) -> str:
    with pytest.raises(gf.GradFilterError) as caught:
        read_all(spec, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith((".", "?"))
    return text


# Digits


def test_digits_need_nothing_and_are_always_split_alike() -> None:
    data = gf.open_data("digits", seed=5, holdout=0.5)
    assert (data.name, data.task, len(data.classes), data.flip) == ("digits", "classify", 10, False)
    assert len(data.train) + len(data.test) == 1797
    assert Counter(labels_of(data.test)) == {i: round(0.2 * n) for i, n in Counter(all_labels(data)).items()}
    picture, label = data.train[0]
    assert picture.size == (8, 8)
    assert np.asarray(picture).max() == round(15 * 255 / 16)
    assert label == 0
    assert data.train.labels[:3] == gf.open_data("digits").train.labels[:3]  # type: ignore[attr-defined]


def all_labels(data: Data) -> list[int]:
    return labels_of(data.train) + labels_of(data.test)


# Folders of class folders


def put_classes(root: Path, count: int = 5, classes: tuple[str, ...] = ("cat", "dog", "owl")) -> None:
    for label, name in enumerate(classes):
        for index in range(count):
            put_picture(root / name / f"{index}.png", 50 * label + index)


def test_a_folder_of_class_folders_holds_out_part_of_every_class(tmp_path: Path) -> None:
    put_classes(tmp_path)
    (tmp_path / "cat" / "Thumbs.db").write_bytes(b"no picture")
    (tmp_path / ".hidden").mkdir()
    data = gf.open_data(str(tmp_path))
    assert data.classes == ("cat", "dog", "owl")
    assert Counter(labels_of(data.train)) == {0: 4, 1: 4, 2: 4}
    assert Counter(labels_of(data.test)) == {0: 1, 1: 1, 2: 1}


def test_the_hold_out_depends_on_seed_and_names_alone(tmp_path: Path) -> None:
    def held(root: Path, seed: int) -> list[str]:
        test: Any = gf.open_data(str(root), seed=seed, holdout=0.4).test
        return [path.relative_to(root).as_posix() for path, _ in test.items]

    put_classes(tmp_path / "a", 10)
    put_classes(tmp_path / "b", 10)
    assert held(tmp_path / "a", 1) == held(tmp_path / "b", 1) != held(tmp_path / "a", 2)


def test_a_class_of_one_picture_is_trained_on(tmp_path: Path) -> None:
    put_classes(tmp_path)
    put_picture(tmp_path / "rare" / "only.jpg")
    data = gf.open_data(str(tmp_path))
    assert labels_of(data.train).count(3) == 1
    assert labels_of(data.test).count(3) == 0


@pytest.mark.parametrize("test", ["test", "val"])
def test_train_and_test_folders_are_taken_as_they_are(tmp_path: Path, test: str) -> None:
    put_classes(tmp_path / "train", 3)
    put_classes(tmp_path / test, 2)
    data = gf.open_data(f"folder:{tmp_path}")
    assert data.classes == ("cat", "dog", "owl")
    assert (len(data.train), len(data.test)) == (9, 6)
    put_picture(tmp_path / test / "eel" / "1.jpg")
    assert str(tmp_path / test / "eel") in refusal(tmp_path)


def test_imagenet_is_known_by_its_class_folders(tmp_path: Path) -> None:
    wordnet = ("n01440764", "n01443537")
    put_classes(tmp_path / "train", 3, wordnet)
    put_classes(tmp_path / "val", 1, wordnet)
    for spec in (f"imagenet:{tmp_path}", str(tmp_path)):
        data = gf.open_data(spec)
        assert data.classes == wordnet
        assert labels_of(data.test) == [0, 1]
    assert "imagenet" in refusal(f"imagenet:{tmp_path / 'train'}")


def test_folders_that_cannot_be_classified_are_refused(tmp_path: Path) -> None:
    assert "neither a file or folder nor a known data set" in refusal(tmp_path / "nowhere")
    assert "does not exist" in refusal(f"folder:{tmp_path / 'nowhere'}")
    text = refusal(tmp_path)
    assert "Looked for folder (a folder per class" in text
    assert all(kind in text for kind in KINDS if kind != "digits")
    assert len(text) < 600 + len(str(tmp_path)) * 2
    put_classes(tmp_path, classes=("only",))
    assert "one class only, 'only'" in refusal(tmp_path)
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path / 'empty'} has no pictures" in refusal(tmp_path)
    assert "cifar10" in refusal("cifr10")


def test_the_hold_out_must_be_a_part(tmp_path: Path) -> None:
    put_classes(tmp_path)
    assert "holdout must lie between 0 and 1" in refusal(tmp_path, holdout=1.5)


def test_a_task_must_be_one_that_the_data_serves(tmp_path: Path) -> None:
    put_classes(tmp_path)
    assert "not to segment" in refusal(f"folder:{tmp_path}", task="segment")
    assert "not to segment" in refusal("digits", task="segment")
    told = refusal(tmp_path, task="segment")
    assert "no data to segment that is known; it is folder, data to classify" in told


# Broken files


def put_broken(root: Path, how: str) -> Path:
    put_classes(root)
    path = root / "dog" / "2.png"
    if how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("hello")
    elif how == "header":
        path.write_bytes(path.read_bytes()[:20])
    elif how == "gone":
        path.unlink()
        path.symlink_to("nowhere")
    return path


@pytest.mark.parametrize("how", ["empty", "text", "header", "gone"])
def test_broken_files_are_named_before_training_and_while_reading(tmp_path: Path, how: str) -> None:
    path = put_broken(tmp_path, how)
    data = gf.open_data(str(tmp_path))
    with pytest.raises(gf.GradFilterError, match="1 of 15 samples cannot be read") as caught:
        check(data)
    assert str(path) in str(caught.value)
    assert str(path) in refusal(tmp_path)


def test_a_picture_that_is_cut_short_is_named_when_it_is_read(tmp_path: Path) -> None:
    put_classes(tmp_path)
    path = tmp_path / "dog" / "long.jpg"
    random = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(random).save(path)
    path.write_bytes(path.read_bytes()[:-500])
    check(gf.open_data(str(tmp_path)))  # its header is whole
    assert f"{path} is broken" in refusal(tmp_path)


def test_no_permission_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_classes(tmp_path)
    data = gf.open_data(str(tmp_path))

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(gf.GradFilterError, match="no permission; change its access rights"):
        data.train[0]


def test_check_shows_the_first_and_tells_how_far_it_is(tmp_path: Path) -> None:
    put_classes(tmp_path)
    told: list[tuple[str, int, int]] = []
    check(gf.open_data(str(tmp_path)), lambda *step: told.append(step))
    assert told[-1] == ("checking files", 15, 15)
    for path in tmp_path.rglob("*.png"):
        path.write_text("")
    with pytest.raises(gf.GradFilterError, match=r"15 of 15 samples .* And 10 more."):
        check(gf.open_data(str(tmp_path)))
    check(gf.open_data("digits"))  # has no files


# CSV


def put_csv(root: Path, *lines: str) -> Path:
    put_classes(root)
    put_text(root / "list.csv", *lines)
    return root / "list.csv"


def test_a_csv_names_pictures_and_labels(tmp_path: Path) -> None:
    lines = [f"{name}/{i}.png,{label}" for name, label in (("cat", "10"), ("dog", "9")) for i in range(5)]
    file = put_csv(tmp_path, "Path, label", *lines)
    data = gf.open_data(str(file))
    assert data.classes == ("9", "10")  # numbers by value
    assert Counter(labels_of(data.train)) == {0: 4, 1: 4}
    file = put_csv(tmp_path, "path,label,split", "cat/0.png,a,train", "dog/0.png,b,train", "dog/1.png,b,test")
    data = gf.open_data(f"csv:{file}")
    assert (labels_of(data.train), labels_of(data.test)) == ([0, 1], [1])


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (("file,label", "cat/0.png,a"), "has no column path"),
        (("path,name", "cat/0.png,a"), "has no column label"),
        (("",), "has no column path"),
        (("path,label",), "has no lines"),
        (("path,label", "cat/0.png,"), "line 2: a value is missing"),
        (("path,label", "cat/0.png"), "line 2: a value is missing"),
        (("path,label", "cat/0.png,a", "cat/99.png,b"), "line 3: the file"),
        (("path,label,split", "cat/0.png,a,maybe"), "split must be train or test"),
        (("path,label", "cat/0.png,a", "cat/1.png,a"), "one class only"),
    ],
)
def test_a_wrong_csv_is_refused(tmp_path: Path, lines: tuple[str, ...], complaint: str) -> None:
    text = refusal(put_csv(tmp_path, *lines))
    assert complaint in text
    assert "list.csv" in text


# CIFAR


def cifar_rows(count: int, classes: int) -> tuple[Any, Any]:
    random = np.random.default_rng(count)
    return random.integers(0, 256, (count, 3072), np.uint8), np.arange(count) % classes


def cifar_files(name: str, form: str) -> dict[str, bytes]:
    ten = name == "cifar10"
    parts = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"] if ten else ["train", "test"]
    classes = [f"c{i}" for i in range(10 if ten else 100)]
    files = {}
    for number, part in enumerate(parts):
        pixels, labels = cifar_rows(20 + number, len(classes))
        if form == "binary":
            columns = [labels[:, None]] if ten else [labels[:, None] // 5, labels[:, None]]
            rows = np.concatenate([*columns, pixels], 1).astype(np.uint8)
            files[f"{part}.bin"] = rows.tobytes()
        else:
            key = b"labels" if ten else b"fine_labels"
            batch = {b"data": pixels, key: labels.tolist(), b"coarse_labels": [0]}
            files[part] = pickle.dumps(batch, protocol=2)
    if form == "binary":
        files["batches.meta.txt" if ten else "fine_label_names.txt"] = "\n".join(classes).encode()
    else:
        key = b"label_names" if ten else b"fine_label_names"
        files["batches.meta" if ten else "meta"] = pickle.dumps({key: classes}, protocol=2)
    return files


def put_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def put_tar(file: Path, folder: str, files: dict[str, bytes]) -> None:
    with tarfile.open(file, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("form", ["python", "binary"])
def test_cifar_in_all_its_forms(tmp_path: Path, name: str, form: str) -> None:
    files, official = cifar_files(name, form), name.replace("cifar", "cifar-")
    unpacked = {"cifar10python": "cifar-10-batches-py", "cifar10binary": "cifar-10-batches-bin"}
    folder = unpacked.get(name + form, f"{official}-{form}")
    put_files(tmp_path / "a" / folder, files)
    (tmp_path / "b").mkdir()
    put_tar(tmp_path / "b" / f"{official}-{form}.tar.gz", folder, files)
    places = [
        tmp_path / "a",
        tmp_path / "a" / folder,
        tmp_path / "b",
        tmp_path / "b" / f"{official}-{form}.tar.gz",
    ]
    for spec in [*map(str, places), f"{name}:{places[0]}"]:
        data = gf.open_data(spec)
        assert (data.name, len(data.classes)) == (name, 10 if name == "cifar10" else 100)
        pixels, labels = cifar_rows(20, len(data.classes))
        assert len(data.train) == (110 if name == "cifar10" else 20)
        assert labels_of(data.train)[:20] == labels.tolist()
        planes = np.asarray(data.train[7][0]).transpose(2, 0, 1)
        assert (planes.reshape(-1) == pixels[7]).all()


def test_a_damaged_cifar_is_refused(tmp_path: Path) -> None:
    files = cifar_files("cifar10", "binary")
    files["data_batch_2.bin"] = files["data_batch_2.bin"][:-1]
    put_files(tmp_path / "cut", files)
    assert "not of pictures of 3073" in refusal(f"cifar10:{tmp_path / 'cut'}")
    files = cifar_files("cifar10", "binary")
    files["test_batch.bin"] = bytes([10]) + files["test_batch.bin"][1:]
    put_files(tmp_path / "label", files)
    assert "label 10, out of range" in refusal(f"cifar10:{tmp_path / 'label'}")
    files = cifar_files("cifar10", "python")
    del files["data_batch_4"]
    put_files(tmp_path / "less", files)
    assert "lacks the file data_batch_4" in refusal(f"cifar10:{tmp_path / 'less'}")
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"nothing")
    assert "not a whole tar archive" in refusal(tmp_path / "cifar-10-python.tar.gz")
    assert "--download" in refusal(f"cifar10:{tmp_path / 'nowhere'}")


class _Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("true",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    files = cifar_files("cifar10", "python") | {"data_batch_1": pickle.dumps({b"data": _Evil()})}
    put_files(tmp_path, files)
    assert "system" in refusal(f"cifar10:{tmp_path}")


# MNIST


def put_idx(folder: Path, *, packed: bool = True, labels: int = 10) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for side, count in (("train", 30), ("t10k", 10)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28), np.uint8)
        for name, array in (
            ("images-idx3", pixels),
            ("labels-idx1", (np.arange(count) % labels).astype(np.uint8)),
        ):
            head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            content, file = head + array.tobytes(), folder / f"{side}-{name}-ubyte"
            if packed:
                content, file = gzip.compress(content), file.with_name(f"{file.name}.gz")
            file.write_bytes(content)


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_are_read_packed_or_not(tmp_path: Path, packed: bool) -> None:
    put_idx(tmp_path / "digits", packed=packed)
    data = gf.open_data(str(tmp_path / "digits"))
    assert (data.name, len(data.train), len(data.test), data.flip) == ("mnist", 30, 10, False)
    expected = np.random.default_rng(30).integers(0, 256, (30, 28, 28), np.uint8)
    assert (np.asarray(data.train[3][0])[..., 1] == expected[3]).all()
    assert labels_of(data.test) == list(range(10))
    put_idx(tmp_path / "FashionMNIST" / "raw", packed=packed)
    data = gf.open_data(str(tmp_path / "FashionMNIST"))
    assert (data.name, data.classes[1]) == ("fashion-mnist", "Trouser")


def test_the_package_of_the_system_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS["fashion-mnist"]
    assert kind.places == ("/usr/share/datasets/fashion-mnist",)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(
        KINDS, "fashion-mnist", dataclasses.replace(kind, places=(str(tmp_path / "fashion"),))
    )
    text = refusal("fashion-mnist")
    assert str(tmp_path / "cache" / "gradfilter" / "fashion-mnist") in text
    assert "--download" in text
    put_idx(tmp_path / "fashion")
    assert len(gf.open_data("fashion-mnist").train) == 30


def test_damaged_idx_files_are_refused(tmp_path: Path) -> None:
    put_idx(tmp_path / "label", labels=30)
    assert "label 29, out of range" in refusal(f"mnist:{tmp_path / 'label'}")
    put_idx(tmp_path / "cut", packed=False)
    file = tmp_path / "cut" / "t10k-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file} is damaged" in refusal(f"mnist:{tmp_path / 'cut'}")
    file.unlink()
    assert f"{file} is missing" in refusal(f"mnist:{tmp_path / 'cut'}")
    put_idx(tmp_path / "gz")
    file = tmp_path / "gz" / "train-labels-idx1-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-9])
    assert f"{file} is damaged" in refusal(f"mnist:{tmp_path / 'gz'}")


# Known photographs


def put_pets(root: Path) -> None:
    lists: dict[str, list[str]] = {"trainval": [], "test": []}
    for side, lines in lists.items():
        for label, breed in enumerate(("Abyssinian", "american_bulldog"), 1):
            stem = f"{breed}_{1 if side == 'test' else 2}"
            put_picture(root / "images" / f"{stem}.jpg")
            put_mask(root / "annotations" / "trimaps" / f"{stem}.png", 1, 2, 3)
            lines.append(f"{stem} {label} 1 1")
        put_text(root / "annotations" / f"{side}.txt", *lines)


@pytest.mark.parametrize("inside", ["", "oxford-iiit-pet"])
def test_pets(tmp_path: Path, inside: str) -> None:
    put_pets(tmp_path / inside)
    data = gf.open_data(str(tmp_path))
    assert (data.name, data.classes) == ("pets", ("Abyssinian", "american bulldog"))
    assert labels_of(data.train) == labels_of(data.test) == [0, 1]
    data = gf.open_data(f"pets:{tmp_path}", task="segment")
    assert data.classes == ("pet", "background", "border")
    assert values_of(data.test) == [[0, 1, 2]] * 2
    put_text(tmp_path / inside / "annotations" / "test.txt", "Abyssinian_1 38 1 1")
    assert "label 38, out of range" in refusal(tmp_path)


def mat_file(*arrays: tuple[str, Any], compress: bool) -> bytes:
    """A MATLAB 5 file, as its format is described."""
    content = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    for name, values in arrays:
        matrix = mat_matrix(name, values)
        packed = zlib.compress(matrix)
        content += struct.pack("<II", 15, len(packed)) + packed if compress else matrix
    return content


def mat_matrix(name: str, values: Any) -> bytes:
    if isinstance(values, dict):
        head = element(6, struct.pack("<II", 2, 0)) + element(5, struct.pack("<ii", 1, 1))
        names = element(5, struct.pack("<i", 32)) + element(
            1, b"".join(k.encode().ljust(32, b"\0") for k in values)
        )
        fields = b"".join(mat_matrix("", value) for value in values.values())
        return element(14, head + element(1, name.encode()) + names + fields)
    kinds, shape = {"u1": 2, "u2": 4, "f8": 9}, values.shape if values.ndim == 2 else (1, len(values))
    return element(
        14,
        element(6, struct.pack("<II", 6, 0))
        + element(5, struct.pack("<ii", *shape))
        + element(1, name.encode())
        + element(kinds[values.dtype.str[1:]], values.tobytes("F")),
    )


def element(kind: int, data: bytes) -> bytes:
    if len(data) <= 4:
        return struct.pack("<HH", kind, len(data)) + data.ljust(4, b"\0")
    return struct.pack("<II", kind, len(data)) + data + b"\0" * (-len(data) % 8)


def put_flowers(root: Path, *, compress: bool, highest: int = 102) -> None:
    put_files(
        root,
        {
            "imagelabels.mat": mat_file(("labels", np.array([1, highest, 2, 1], "u1")), compress=compress),
            "setid.mat": mat_file(
                ("trnid", np.array([1, 2], "u2")),
                ("valid", np.array([3.0], "f8")),
                ("tstid", np.array([4], "u2")),
                compress=compress,
            ),
        },
    )
    for number in range(1, 5):
        put_picture(root / "jpg" / f"image_{number:05d}.jpg")


@pytest.mark.parametrize("compress", [True, False])
def test_flowers(tmp_path: Path, compress: bool) -> None:
    put_flowers(tmp_path, compress=compress)
    data = gf.open_data(str(tmp_path))
    assert (data.name, len(data.classes)) == ("flowers102", 102)
    assert labels_of(data.train) == [0, 101, 1]
    assert labels_of(data.test) == [0]
    put_flowers(tmp_path, compress=compress, highest=103)
    assert "label 102, out of range" in refusal(tmp_path)
    (tmp_path / "setid.mat").write_bytes(b"nothing")
    assert "setid.mat cannot be read" in refusal(tmp_path)


def test_cub(tmp_path: Path) -> None:
    root = tmp_path / "CUB_200_2011"
    names = ["001.Black_footed_Albatross/a.jpg", "002.Laysan_Albatross/b.jpg", "002.Laysan_Albatross/c.jpg"]
    for name in names:
        put_picture(root / "images" / name)
    put_text(root / "images.txt", *(f"{i} {name}" for i, name in enumerate(names, 1)))
    put_text(root / "classes.txt", "1 001.Black_footed_Albatross", "2 002.Laysan_Albatross")
    put_text(root / "image_class_labels.txt", "1 1", "2 2", "3 2")
    put_text(root / "train_test_split.txt", "1 1", "2 1", "3 0")
    data = gf.open_data(str(tmp_path))
    assert data.classes == ("Black footed Albatross", "Laysan Albatross")
    assert (labels_of(data.train), labels_of(data.test)) == ([0, 1], [1])
    put_text(root / "image_class_labels.txt", "1 1", "2 3", "3 2")
    assert "has no known label" in refusal(tmp_path)


# Segmentation


def put_pairs(root: Path, count: int = 5, values: tuple[int, ...] = (0, 1, 2, 255)) -> None:
    for index in range(count):
        put_picture(root / "images" / f"{index}.jpg")
        put_mask(root / "masks" / f"{index}.png", *values)


def test_images_and_masks(tmp_path: Path) -> None:
    put_pairs(tmp_path)
    data = gf.open_data(str(tmp_path))
    assert (data.task, data.classes) == ("segment", ("class 0", "class 1", "class 2"))
    assert (len(data.train), len(data.test)) == (4, 1)
    assert values_of(data.train) == [[0, 1, 2, 255]] * 4
    data = gf.open_data(f"masks:{tmp_path}", ignore=2)
    assert data.classes == ("class 0", "class 1")
    assert values_of(data.test) == [[0, 1, 255]]
    check(data)
    put_text(tmp_path / "classes.txt", "sky", "road")
    assert "has the value 2, but the classes have 0 to 1" in refusal(tmp_path)


def test_images_and_masks_in_two_parts(tmp_path: Path) -> None:
    put_pairs(tmp_path / "train", 3)
    put_pairs(tmp_path / "val", 2, (0, 1, 2, 3))
    data = gf.open_data(str(tmp_path))
    assert (len(data.train), len(data.test), len(data.classes)) == (3, 2, 4)


def test_a_palette_mask_means_its_indices(tmp_path: Path) -> None:
    put_pairs(tmp_path)
    mask = Image.fromarray(np.tile(np.array([0, 1, 2] * 4, np.uint8), (10, 1)))
    mask.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200])
    mask.save(tmp_path / "masks" / "0.png")
    data = gf.open_data(str(tmp_path), holdout=0.5)
    assert sorted(map(len, values_of(data.train) + values_of(data.test))) == [3, 4, 4, 4, 4]


def test_wrong_masks_are_refused(tmp_path: Path) -> None:
    put_pairs(tmp_path)
    put_mask(tmp_path / "masks" / "3.png", 0, 1, size=(10, 12))
    put_text(tmp_path / "classes.txt", "a", "b", "c")
    text = refusal(tmp_path)
    assert f"{tmp_path / 'masks' / '3.png'} has 10x12 pixels, but its picture 12x10" in text
    with pytest.raises(gf.GradFilterError, match="make them the same size"):
        check(gf.open_data(str(tmp_path)))
    put_mask(tmp_path / "masks" / "3.png", 0, 300, dtype=np.uint16)
    assert "has values from 0 to 300" in refusal(tmp_path)
    put_picture(tmp_path / "masks" / "3.png")
    assert "has colours" in refusal(tmp_path)
    (tmp_path / "masks" / "3.png").unlink()
    assert "has no mask" in refusal(tmp_path)
    put_pairs(tmp_path / "flat", values=(0, 255))
    assert "save the second class as 1" in refusal(tmp_path / "flat")


@pytest.mark.parametrize("inside", ["", "VOCdevkit/VOC2012"])
def test_voc_and_its_augmentation(tmp_path: Path, inside: str) -> None:
    root = tmp_path / inside
    for stem in ("a", "b", "c", "d"):
        put_picture(root / "JPEGImages" / f"{stem}.jpg")
        if stem != "d":
            put_mask(root / "SegmentationClass" / f"{stem}.png", 0, 20, 255)
    put_text(root / "ImageSets" / "Segmentation" / "train.txt", "a", "b")
    put_text(root / "ImageSets" / "Segmentation" / "val.txt", "c")
    data = gf.open_data(str(tmp_path))
    assert (data.name, len(data.classes)) == ("voc", 21)
    assert values_of(data.train) == [[0, 20, 255]] * 2
    assert "SegmentationClassAug" in refusal(f"voc-aug:{tmp_path}")
    for stem in ("a", "b", "c", "d"):
        put_mask(root / "SegmentationClassAug" / f"{stem}.png", 0, 7)
    data = gf.open_data(str(tmp_path))
    assert (data.name, len(data.train), values_of(data.test)) == ("voc-aug", 3, [[0, 20, 255]])
    put_text(root / "ImageSets" / "Segmentation" / "train_aug.txt", "a", "d")
    assert values_of(gf.open_data(f"voc-aug:{tmp_path}").train) == [[0, 7]] * 2
    put_mask(root / "SegmentationClass" / "a.png", 21)
    assert "has the value 21" in refusal(f"voc:{tmp_path}")


def test_voc_augmented_by_sbd_itself(tmp_path: Path) -> None:
    root, sbd = tmp_path / "VOCdevkit" / "VOC2012", tmp_path / "benchmark_RELEASE" / "dataset" / "cls"
    sbd.mkdir(parents=True)
    lines = np.arange(12 * 10, dtype=np.uint8).reshape(10, 12) % 7
    for stem in ("a", "b", "c"):
        put_picture(root / "JPEGImages" / f"{stem}.jpg")
        put_mask(root / "SegmentationClass" / f"{stem}.png", 20)
        whole = {"Boundaries": np.zeros(3, "u1"), "Segmentation": lines}
        (sbd / f"{stem}.mat").write_bytes(mat_file(("GTcls", whole), compress=True))
    put_text(root / "ImageSets" / "Segmentation" / "train.txt", "a")
    put_text(root / "ImageSets" / "Segmentation" / "val.txt", "c")
    data = gf.open_data(str(tmp_path))
    check(data)
    assert (data.name, values_of(data.train)) == ("voc-aug", [[20], [0, 1, 2, 3, 4, 5, 6]])
    assert (np.asarray(data.train[1][1]) == lines).all()
    (sbd / "b.mat").write_bytes(mat_file(("other", lines), compress=True))
    assert "has no GTcls.Segmentation" in refusal(tmp_path)


def test_cityscapes(tmp_path: Path) -> None:
    for split, count in (("train", 2), ("val", 1)):
        for number in range(count):
            stem = f"ulm_{number:06d}_000019"
            put_picture(tmp_path / "leftImg8bit" / split / "ulm" / f"{stem}_leftImg8bit.png")
            put_mask(tmp_path / "gtFine" / split / "ulm" / f"{stem}_gtFine_labelIds.png", 0, 7, 33)
    data = gf.open_data(str(tmp_path))
    assert (data.name, len(data.classes), data.classes[0]) == ("cityscapes", 19, "road")
    assert values_of(data.train) == [[0, 18, 255]] * 2
    assert values_of(data.test) == [[0, 18, 255]]
    assert "cannot be downloaded" in refusal(f"cityscapes:{tmp_path / 'no'}", download=True)


def test_camvid_as_segnet_has_it(tmp_path: Path) -> None:
    for side in ("train", "val", "test"):
        put_picture(tmp_path / "CamVid" / side / "0001TP_006690.png")
        put_mask(tmp_path / "CamVid" / f"{side}annot" / "0001TP_006690.png", 0, 10, 11)
    data = gf.open_data(str(tmp_path))
    assert (data.name, data.classes[10], len(data.train)) == ("camvid", "bicyclist", 1)
    assert values_of(data.test) == [[0, 10, 255]]


FRAMES = ("0001TP_006690", "0006R0_f00930", "0016E5_07959", "Seq05VD_f00000")
SKY, TRAIN, VOID = (128, 128, 128), (192, 64, 128), (0, 0, 0)


def test_camvid_in_colours(tmp_path: Path) -> None:
    for frame in FRAMES:
        put_picture(tmp_path / "701_StillsRaw_full" / f"{frame}.png")
        put_mask(tmp_path / "LabeledApproved_full" / f"{frame}_L.png", SKY, TRAIN, VOID)
    data = gf.open_data(str(tmp_path))
    assert (len(data.train), len(data.test)) == (2, 1)
    assert values_of(data.train) == [[0, 8, 255]] * 2


def test_camvid_as_fastai_has_it(tmp_path: Path) -> None:
    put_text(tmp_path / "codes.txt", "Sky", "Train", "Void")
    for frame in FRAMES:
        put_picture(tmp_path / "images" / f"{frame}.png")
        put_mask(tmp_path / "labels" / f"{frame}_P.png", 0, 1, 2)
    data = gf.open_data(f"camvid:{tmp_path}")
    assert values_of(data.train) == [[0, 8, 255]] * 2
    (tmp_path / "labels" / f"{FRAMES[0]}_P.png").unlink()
    assert "has no mask" in refusal(tmp_path)


# Arrays


def put_npz(file: Path, **arrays: Any) -> Path:
    np.savez(file, **arrays)
    return file


def some(count: int, *shape: int, high: int = 256) -> Any:
    return np.random.default_rng(count).integers(0, high, (count, *shape), np.uint8)


@pytest.mark.parametrize("names", ["{side}_images {side}_labels {side}_masks", "x_{side} y_{side} m_{side}"])
def test_arrays_of_both_spellings_and_tasks(tmp_path: Path, names: str) -> None:
    arrays = {}
    for side, count in (("train", 6), ("test", 3)):
        images, labels, masks = names.format(side=side).split()
        arrays |= {
            images: some(count, 8, 9, 3),
            labels: np.arange(count) % 3,
            masks: some(count, 8, 9, high=4),
        }
    file = put_npz(tmp_path / "a.npz", **arrays)
    data = gf.open_data(str(file))
    assert (data.task, data.classes, labels_of(data.test)) == ("classify", ("0", "1", "2"), [0, 1, 2])
    assert (np.asarray(data.test[1][0]) == some(3, 8, 9, 3)[1]).all()
    data = gf.open_data(f"arrays:{file}", task="segment", ignore=3)
    assert (data.task, len(data.classes)) == ("segment", 3)
    assert (
        np.asarray(data.test[1][1]) == np.where(some(3, 8, 9, high=4)[1] == 3, 255, some(3, 8, 9, high=4)[1])
    ).all()


def test_labels_that_are_masks_and_names_in_the_file(tmp_path: Path) -> None:
    masks = {"y_train": some(4, 8, 8, high=12), "y_test": some(2, 8, 8, high=12)}
    images = {"x_train": some(4, 8, 8, 3), "x_test": some(2, 8, 8)}
    data = gf.open_data(str(put_npz(tmp_path / "a.npz", **masks, **images, ignore=11)))
    assert (data.task, len(data.classes)) == ("segment", 11)
    assert max(map(max, values_of(data.test))) == 255
    file = put_npz(tmp_path / "b.npz", **masks, **images, classes=np.array(["sky", "road"]))
    assert "label 11, out of range: its 2 classes are 0 to 1" in refusal(file)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"train_images": None}, "must have train_images"),
        ({"test_images": np.zeros((3, 8, 8, 3), np.float32)}, "float32"),
        ({"test_images": np.zeros((3, 3, 8, 8), np.uint8)}, "(3, 3, 8, 8)"),
        ({"test_labels": None}, "must have test_labels"),
        ({"test_labels": np.zeros(3)}, "whole numbers"),
        ({"test_labels": np.zeros(4, np.uint8)}, "one of the same size"),
        ({"test_labels": np.array([0, -1, 1])}, "label -1, out of range"),
        ({"train_labels": np.zeros(6, int), "test_labels": np.zeros(3, int)}, "one class only"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    arrays = {"train_images": some(6, 8, 8, 3), "test_images": some(3, 8, 8, 3)}
    arrays |= {"train_labels": np.arange(6) % 2, "test_labels": np.arange(3) % 2} | change
    file = put_npz(tmp_path / "a.npz", **{name: value for name, value in arrays.items() if value is not None})
    text = refusal(file)
    assert complaint in text
    assert str(file) in text


def test_an_npz_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_text("hello")
    assert "cannot be read as an .npz file" in refusal(tmp_path / "a.npz")
    put_npz(tmp_path / "b.npz", x_train=np.array([object()]))
    assert "cannot be read as an .npz file" in refusal(tmp_path / "b.npz")


# The table


def test_every_kind_is_documented_with_its_name() -> None:
    text = (ROOT / "docs" / "data.md").read_text()
    for name in KINDS:
        assert f"| `{name}` |" in text, name


def test_archives_have_checksums_and_secure_names() -> None:
    for kind in KINDS.values():
        for archive in kind.archives:
            algorithm, _, digits = archive.checksum.partition(":")
            assert len(digits) == {"md5": 32, "sha256": 64}[algorithm]
            assert archive.name


def test_parts_are_known_in_capitals_and_by_what_is_in_them(tmp_path: Path) -> None:
    put_classes(tmp_path / "a" / "Train", 4)
    put_classes(tmp_path / "a" / "TEST", 2)
    data = gf.open_data(tmp_path / "a")
    assert (data.classes, len(data.train), len(data.test)) == (("cat", "dog", "owl"), 12, 6)
    here = tmp_path / "b"
    put_classes(here / "train", 4)
    put_picture(here / "test" / "unlabelled.png")
    assert refusal(here) == (
        f"{here}/train has class folders, but {here} lacks the other part: it needs train and one of "
        "test, val, valid, validation, each with a folder per class. "
        f"Or give {here}/train: part of it is then held out."
    )
    put_classes(here / "val", 2)
    assert len(gf.open_data(here).test) == 6


def test_a_decoder_may_fail_with_any_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_classes(tmp_path)
    data = gf.open_data(tmp_path)

    def fail(path: Path) -> None:
        raise RuntimeError("Failed to decode image: Missing or empty image item")

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(
        gf.GradFilterError, match=r"15 of 15 .*0\.png is broken .*Missing or empty image item"
    ):
        check(data)


def test_a_path_that_is_too_long_is_a_sentence(tmp_path: Path) -> None:
    for spec in ("x" * 5000, f"folder:{'x' * 5000}", f"csv:{tmp_path}/{'x' * 300}.csv"):
        told = refusal(spec)
        # from Python 3.14 on, such a path is one where nothing is
        assert re.search("cannot be opened: File name too long; correct the path|is neither|no data", told)
        assert len(told) < 1000
    told = refusal(put_csv(tmp_path, "path,label", f"{'x' * 5000},cat"))
    assert "list.csv, line 2: the file " in told
    assert re.search(r"cannot be opened \(File name too long\)|does not exist", told)
    assert len(told) < 1000


@pytest.mark.parametrize("kind", ["csv", "arrays"])
def test_a_class_that_is_tested_must_be_trained(tmp_path: Path, kind: str) -> None:
    if kind == "csv":
        sides = {"cat": "train", "dog": "train", "owl": "test"}
        lines = [f"{name}/{i}.png,{name},{side}" for name, side in sides.items() for i in range(2)]
        file = put_csv(tmp_path, "path,label,split", *lines, "cat/2.png,cat,test")
    else:
        images = {"x_train": some(2, 8, 8), "x_test": some(1, 8, 8)}
        labels = {"y_train": np.array([0, 1]), "y_test": np.array([2]), "classes": ["cat", "dog", "owl"]}
        file = put_npz(tmp_path / "a.npz", **images, **labels)
    assert refusal(file) == (
        f"{file} has test samples of 'owl', but none to train on; give each class training samples, or "
        "leave it out."
    )
    assert len(gf.open_data(file, to_train=False).classes) == 3  # to test a model of three classes


def test_what_may_be_a_picture_but_is_not_read_is_counted(tmp_path: Path) -> None:
    put_classes(tmp_path / "a")
    assert gf.open_data(tmp_path / "a").left_out == ""
    for name in ("1.HEIC", "2.heic", "scan", ".DS_Store", ".heic", "Thumbs.db", "desktop.ini", "1.json"):
        (tmp_path / "a" / "dog" / name).write_text("")
    (tmp_path / "a" / "dog" / "more").mkdir()
    told = "Files left out: 1 without suffix, 2 .heic; save them as JPEG or PNG if they are pictures."
    assert gf.open_data(tmp_path / "a").left_out == told
    put_classes(tmp_path / "b" / "train")
    (tmp_path / "a").rename(tmp_path / "b" / "test")
    assert gf.open_data(tmp_path / "b").left_out == told
    put_pairs(tmp_path / "c")
    for part in ("images", "masks"):
        (tmp_path / "c" / part / "9.dng").write_text("")
    assert "Files left out: 1 .dng;" in gf.open_data(tmp_path / "c").left_out


def test_blanks_around_the_values_of_a_csv_do_not_count(tmp_path: Path) -> None:
    lines = [f"cat/{i}.png,cat" for i in range(3)], [f" dog/{i}.png , dog " for i in range(3)]
    file = put_csv(tmp_path, "path,label", *lines[0], *lines[1], "cat/3.png, cat", "dog/3.png,dog")
    data = gf.open_data(file)
    assert data.classes == ("cat", "dog")
    assert Counter(all_labels(data)) == {0: 4, 1: 4}
    assert "line 3: a value is missing" in refusal(
        put_csv(tmp_path, "path,label", "cat/0.png,a", "cat/1.png, ")
    )


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_a_csv_that_is_not_utf_8_is_refused(tmp_path: Path, encoding: str) -> None:
    file = put_csv(tmp_path)
    file.write_text("path,label\ncat/0.png,h\xfchnchen\n", encoding=encoding)
    assert f"{file} is not text in UTF-8; save it as UTF-8" in refusal(file)


def test_masks_without_classes_say_what_is_missing(tmp_path: Path) -> None:
    put_pairs(tmp_path, values=(255,))
    assert "No pixel is labelled in the masks beside" in refusal(tmp_path)
    put_text(tmp_path / "classes.txt", "")
    assert f"{tmp_path / 'classes.txt'} is empty; name the classes in it" in refusal(tmp_path)


def test_an_unknown_user_is_no_place() -> None:
    for spec in ("~nobody-of-this-name/a", "folder:~nobody-of-this-name/a"):
        assert "~nobody-of-this-name/a " in refusal(spec)


def test_a_test_folder_need_not_have_every_class(tmp_path: Path) -> None:
    for part, names in (("train", ("cat", "dog")), ("test", ("dog",))):
        for name in names:
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / part / name / "0.png")
    data = gf.open_data(tmp_path)
    assert (data.classes, len(data.train), len(data.test)) == (("cat", "dog"), 2, 1)
    assert data.test[0][1] == 1
