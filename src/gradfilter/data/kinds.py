"""The table of data sets that can be opened, and opening one by name, by path or by both."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import GradFilterError, nearest
from ..progress import Tell, silent
from . import arrays, camvid, cifar, cityscapes, cub200, flowers102, folders, idx, pets, tables, voc
from .check import check_classes
from .download import Archive, fetch
from .request import Request, shortened
from .samples import Data, Task

__all__ = ["KINDS", "Kind", "is_same_place", "located", "open_data", "path_of"]


@dataclass(frozen=True)
class Kind:
    """One kind of data set: how it is recognised and read, and where it comes from."""

    open: Callable[[Request], Data]
    is_at: Callable[[Path], bool]
    layout: str
    tasks: tuple[Task, ...] = ("classify",)
    archives: tuple[Archive, ...] = ()  # the last one has what is_at looks for
    places: tuple[str, ...] = ()  # where a system's packages put it


_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_VGG = "https://www.robots.ox.ac.uk/~vgg/data/"
_VOC = "https://thor.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar"


def _idx(root: str, **checksums: str) -> tuple[Archive, ...]:
    ends = {"images": "images-idx3-ubyte.gz", "labels": "labels-idx1-ubyte.gz"}
    names = {key: f"{key.split('_')[0]}-{ends[key.split('_')[1]]}" for key in checksums}
    return tuple(Archive(root + names[key], f"md5:{md5}", unpack=False) for key, md5 in checksums.items())


def _is_nowhere(path: Path) -> bool:
    return False


def _is_fashion(path: Path) -> bool:
    return "fashion" in str(path.absolute()).lower() and idx.has_idx(path)


def _is_imagenet(path: Path) -> bool:
    """Class folders named by WordNet numbers, n and eight digits."""
    first = next(iter(sorted((path / "train").glob("n*"))), None)
    return first is not None and first.name[1:].isdigit() and len(first.name) == 9 and (path / "val").is_dir()


# A path is what the first kind says that recognises it: those that look for more come first.
KINDS: dict[str, Kind] = {
    "digits": Kind(arrays.open_digits, _is_nowhere, "nothing: 1797 digits of 8x8 pixels are in the package"),
    "arrays": Kind(
        arrays.open_arrays,
        arrays.is_npz,
        "an .npz file with train_images, test_images and labels or masks",
        ("classify", "segment"),
    ),
    "csv": Kind(tables.open_csv, tables.is_csv, "a .csv file with the columns path and label"),
    "cifar10": Kind(
        cifar.open_cifar10,
        cifar.has_cifar10,
        "cifar-10-python.tar.gz, cifar-10-binary.tar.gz, or the folder of either",
        archives=(
            Archive(_CIFAR + "cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a", unpack=False),
        ),
    ),
    "cifar100": Kind(
        cifar.open_cifar100,
        cifar.has_cifar100,
        "cifar-100-python.tar.gz, cifar-100-binary.tar.gz, or the folder of either",
        archives=(
            Archive(_CIFAR + "cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85", unpack=False),
        ),
    ),
    "fashion-mnist": Kind(
        idx.open_fashion_mnist,
        _is_fashion,
        "train-images-idx3-ubyte and its three relatives, gzipped or not, with fashion in the path",
        archives=_idx(
            _FASHION,
            train_labels="25c81989df183df01b3e8a0aad5dffbe",
            t10k_images="bef4ecab320f06d8554ea6380940ec79",
            t10k_labels="bb300cfdad3c16e7a12a480ee83cd310",
            train_images="8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        ),
        places=("/usr/share/datasets/fashion-mnist",),
    ),
    "mnist": Kind(
        idx.open_mnist,
        idx.has_idx,
        "train-images-idx3-ubyte and its three relatives, gzipped or not",
        archives=_idx(
            _MNIST,
            train_labels="d53e105ee54ea40749a09fcbcd1e9432",
            t10k_images="9fb629c4189551a2d022fa330f9573f3",
            t10k_labels="ec29112dd5afa0611ce80d1b7f02629c",
            train_images="f68b3c2dcbeaaa9fbdd348bbdeb94873",
        ),
        places=("/usr/share/datasets/mnist",),
    ),
    "pets": Kind(
        pets.open_pets,
        pets.has_pets,
        "images/ and annotations/ with trainval.txt and test.txt",
        ("classify", "segment"),
        archives=(
            Archive(_VGG + "pets/data/images.tar.gz", "md5:5c4f3ee8e5d25df40f4fd59a7f44e54c"),
            Archive(_VGG + "pets/data/annotations.tar.gz", "md5:95a8c909bbe2e81eed6a22bccdf3f68f"),
        ),
    ),
    "flowers102": Kind(
        flowers102.open_flowers,
        flowers102.has_flowers,
        "jpg/, imagelabels.mat and setid.mat",
        archives=(
            Archive(_VGG + "flowers/102/102flowers.tgz", "md5:52808999861908f626f3c1f4e79d11fa"),
            Archive(
                _VGG + "flowers/102/imagelabels.mat", "md5:e0620be6f572b9609742df49c70aed4d", unpack=False
            ),
            Archive(_VGG + "flowers/102/setid.mat", "md5:a5357ecc9cb78c4bef273ce3793fc85c", unpack=False),
        ),
    ),
    "cub200": Kind(
        cub200.open_cub,
        cub200.has_cub,
        "images/, images.txt, classes.txt, image_class_labels.txt and train_test_split.txt",
        archives=(
            Archive(
                "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
                "md5:97eceeb196236b17998738112f37df78",
            ),
        ),
    ),
    "voc-aug": Kind(
        voc.open_voc_aug,
        voc.has_voc_aug,
        "as voc, with SegmentationClassAug/ or SBD's benchmark_RELEASE/",
        ("segment",),
    ),
    "voc": Kind(
        voc.open_voc,
        voc.has_voc,
        "JPEGImages/, SegmentationClass/ and ImageSets/Segmentation/train.txt and val.txt",
        ("segment",),
        archives=(Archive(_VOC, "md5:6cd6e144f989b92b3379bac3b3de84fd"),),
    ),
    "cityscapes": Kind(
        cityscapes.open_cityscapes,
        cityscapes.has_cityscapes,
        "leftImg8bit/ and gtFine/, each with train/ and val/",
        ("segment",),
    ),
    "camvid": Kind(
        camvid.open_camvid,
        camvid.has_camvid,
        "train/ and trainannot/ (SegNet), train/ and train_labels/, LabeledApproved_full/, "
        "or images/, labels/ and codes.txt",
        ("segment",),
        archives=(
            Archive(
                "https://s3.amazonaws.com/fast-ai-imagelocal/camvid.tgz",
                "md5:648371e4f3a833682afb39b08a3ce2aa",
            ),
        ),
    ),
    "masks": Kind(
        folders.open_masks,
        folders.has_masks,
        "images/ and masks/ with the same names, or both under train/ and test/",
        ("segment",),
    ),
    "imagenet": Kind(
        folders.open_imagenet, _is_imagenet, "train/ and val/ with folders like n01440764, one per class"
    ),
    "folder": Kind(
        folders.open_folder,
        folders.has_class_folders,
        "a folder per class, or these under train/ and test/ (or val/)",
    ),
}


def open_data(
    spec: str | os.PathLike[str],
    *,
    download: bool = False,
    task: Task | None = None,
    holdout: float = 0.2,
    seed: int = 0,
    ignore: int = 255,
    to_train: bool = True,
    tell: Tell = silent,
) -> Data:
    """Open a data set: "digits", a path, KIND:PATH, or the name of a kind alone.

    >>> data = open_data("digits")
    >>> data.classes, len(data.train), len(data.test)
    (('0', '1', '2', '3', '4', '5', '6', '7', '8', '9'), 1438, 359)

    Args:
        download: fetch it if it is not there; without, nothing is ever fetched.
        task: "classify" or "segment", for data sets that serve both.
        holdout: the part of each class that is held out for the test, where the data has no test part.
        seed: which part that is.
        ignore: a mask value that does not count, beside 255.
        to_train: whether the user's own data must have training samples of every class that is tested.
    """
    spec = os.fspath(spec)
    try:
        kind, path = _parse(spec)
        if kind not in ("", "digits") and not KINDS[kind].is_at(path):
            if not download:
                raise GradFilterError(_not_there(kind, path))
            _fetch_all(kind, path, tell)
        kind = kind or _recognised(path, task)
        data = KINDS[kind].open(Request(path, _known_task(kind, task), holdout, seed, ignore))
    except OSError as error:  # a name that is too long, a folder without permission
        raise GradFilterError(
            f"{shortened(error.filename or spec)} cannot be opened: {error.strerror or error}; "
            "correct the path or its access rights."
        ) from error
    _check_parts(data, path)
    if to_train and not KINDS[kind].archives:  # of what is published, a user has no say in it
        check_classes(data, path)
    return data


def located(spec: str) -> str:
    """The same text, with a path that is understood from any folder.

    >>> located("digits"), located("cifar10:/data")
    ('digits', 'cifar10:/data')
    """
    name, _, rest = spec.partition(":")
    if name in KINDS:
        return f"{name}:{path_of(spec).absolute()}" if rest else spec
    return str(path_of(spec).absolute())


def is_same_place(one: str, other: str) -> bool:
    """Whether two texts name data in the same place, however they spell it.

    >>> is_same_place("folder:/data/pets", "/data/../data/pets/"), is_same_place("/data/a", "/data/b")
    (True, False)
    """
    return path_of(one).resolve() == path_of(other).resolve()


def path_of(spec: str) -> Path:
    """Where a text says that the data lies."""
    name, _, rest = spec.partition(":")
    if name in KINDS and not rest:
        return _usual_place(name)
    written = rest if name in KINDS else spec
    return Path(os.path.expanduser(written))  # Path's own fails at users that are not known


def _parse(spec: str) -> tuple[str, Path]:
    """The kind that a text names, or "", and the path."""
    name, path = spec.partition(":")[0], path_of(spec)
    if name in KINDS:
        return name, path
    if not path.exists():
        hint = nearest(name, KINDS)
        raise GradFilterError(
            f"{spec} is neither a file or folder nor a known data set.{hint} Known: {', '.join(KINDS)}."
        )
    return "", path


def _usual_place(kind: str) -> Path:
    """Where a kind lies if no path is given: in a system's package, or where a download puts it."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    there = (Path(place) for place in KINDS[kind].places)
    return next((path for path in there if path.is_dir()), caches / "gradfilter" / kind)


def _not_there(kind: str, path: Path) -> str:
    problem = "does not exist" if not path.exists() else f"is not {kind}"
    fetched = " --download fetches it." if KINDS[kind].archives else ""
    return f"{path} {problem}; {kind} must have: {KINDS[kind].layout}.{fetched}"


def _fetch_all(kind: str, path: Path, tell: Tell) -> None:
    if not KINDS[kind].archives:
        raise GradFilterError(
            f"{kind} cannot be downloaded; put it into {path} by hand: {KINDS[kind].layout}."
        )
    for archive in KINDS[kind].archives:
        fetch(archive, path, tell)
    if not KINDS[kind].is_at(path):
        raise GradFilterError(f"What was fetched into {path} is not {kind}; remove the folder and try again.")


def _recognised(path: Path, task: Task | None) -> str:
    there = [name for name, kind in KINDS.items() if kind.is_at(path)]
    for name in there:
        # images/ and masks/ look like class folders too
        if (task is None or task in KINDS[name].tasks) and not (name == "folder" and "masks" in there):
            return name
    wanted = "" if task is None else f" to {task}"
    instead = f"; it is {there[0]}, data to {' or '.join(KINDS[there[0]].tasks)}" if there else ""
    served = [name for name, kind in KINDS.items() if task is None or task in kind.tasks]
    own = ", or ".join(f"{name} ({KINDS[name].layout})" for name in ("folder", "masks") if name in served)
    others = ", ".join(name for name in served if name not in ("digits", "folder", "masks"))
    raise GradFilterError(
        f"{path} has no data{wanted} that is known{instead}. Looked for {own}, and for {others}; "
        f"with one of these names before it, as {served[-1]}:{path}, you are told what is missing."
    )


def _known_task(kind: str, task: Task | None) -> Task | None:
    tasks = KINDS[kind].tasks
    if task is not None and task not in tasks:
        raise GradFilterError(f"{kind} is data to {' or '.join(tasks)}, not to {task}.")
    return task


def _check_parts(data: Data, where: object) -> None:
    if len(data.classes) < 2:
        raise GradFilterError(
            f"{where} has one class only, {data.classes[0]!r}; there must be two to tell apart."
            if data.classes
            else f"{where} has no classes."
        )
    for side, samples in (("training", data.train), ("test", data.test)):
        if not len(samples):
            raise GradFilterError(
                f"{where} has no {side} samples; classes need two samples, or a {side} part."
            )
