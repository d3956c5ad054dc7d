"""Labels and masks for pictures, and the files they go to."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradfilter as gf
from gradfilter import prediction
from gradfilter.errors import GradFilterError
from gradfilter.prediction import Label, Mask, predict, read_pictures, write_labels, write_masks

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
pytestmark = pytest.mark.usefixtures("vision")
NAMES = ["red", "green", "blue"]


class Colours(nn.Module):
    """Scores are the channels: of the whole picture, or of its pixels at a quarter of the size."""

    def __init__(self, pixels: bool = False) -> None:
        super().__init__()
        self.pixels, self.dropout = pixels, nn.Dropout(0.5)
        self.batches: list[int] = []

    def forward(self, x: Tensor) -> Any:
        self.batches.append(len(x))
        x = self.dropout(4 * x)
        return {"out": nn.functional.avg_pool2d(x, 4)} if self.pixels else x.mean((2, 3))


def tensor(picture: Any, size: int = 16) -> Tensor:
    small = picture.resize((size, size), Image.Resampling.NEAREST)
    return torch.tensor(list(small.tobytes()), dtype=torch.float32).view(size, size, 3).permute(2, 0, 1) / 255


def plain(colour: str, size: tuple[int, int] = (40, 24)) -> Any:
    return Image.new("RGB", size, colour)


def labels(pictures: list[tuple[str, Any]], model: nn.Module | None = None, **more: Any) -> list[Label]:
    found = list(predict(model or Colours(), pictures, tensor, NAMES, "classify", **more))
    assert all(isinstance(label, Label) for label in found)
    return found  # type: ignore[return-value]


def test_labels_come_in_order_with_probabilities() -> None:
    found = labels([("a", plain("blue")), ("b", plain("red")), ("c", plain("lime"))], batch=2)
    assert [(label.name, label.label) for label in found] == [("a", "blue"), ("b", "red"), ("c", "green")]
    expected = torch.tensor([4.0, 0.0, 0.0]).softmax(0)[0]
    assert found[0].probability == pytest.approx(float(expected), rel=1e-5)


def test_batches_do_not_change_what_is_found() -> None:
    pictures = [(str(i), plain(colour)) for i, colour in enumerate(["red", "blue", "lime", "red", "navy"])]
    model = Colours()
    assert labels(pictures, model, batch=2) == labels(pictures, batch=1)
    assert model.batches == [2, 2, 1]


def test_pictures_of_other_sizes_run_apart() -> None:
    model = Colours()
    sizes = iter([16, 16, 8, 16])
    pictures = [(str(i), plain("red")) for i in range(4)]
    list(predict(model, pictures, lambda p: tensor(p, next(sizes)), NAMES, "classify"))
    assert model.batches == [2, 1, 1]


def test_the_model_keeps_its_modes() -> None:
    model = gf.apply_(gf.models.build("tiny", classes=3), gf.GradientFilter(2), "last:2").train()
    modes = [module.training for module in model.modules()]
    record = [m.__dict__["gradfilter_record"]["training"] for m in model.modules()]
    list(predict(model, [("a", plain("red"))], lambda p: tensor(p, 32), NAMES, "classify"))
    assert [module.training for module in model.modules()] == modes
    assert [m.__dict__["gradfilter_record"]["training"] for m in model.modules()] == record
    assert Colours().train().training  # dropout would have changed the labels above


def halves(size: tuple[int, int]) -> Any:
    """Red on the left, blue on the right."""
    picture = plain("red", size)
    picture.paste("blue", (size[0] // 2, 0, *size))
    return picture


def in_a_square(picture: Any) -> Tensor:
    side = max(picture.size)
    whole = plain("green", (side, side))
    whole.paste(picture, (0, 0))
    return tensor(whole)


@pytest.mark.parametrize("size", [(40, 24), (24, 40), (7, 5), (64, 64)])
@pytest.mark.parametrize("at_once", [1, 2**24])
def test_masks_have_the_size_of_their_picture(
    size: tuple[int, int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "_AT_ONCE", at_once)  # one class at a time gives the same
    (found,) = predict(Colours(pixels=True), [("a", halves(size))], in_a_square, NAMES, "segment")
    assert isinstance(found, Mask)
    assert found.classes.shape == (size[1], size[0])
    assert (found.classes[:, : size[0] // 3] == 0).all()
    assert (found.classes[:, -(size[0] // 3) :] == 2).all()


def test_the_csv_holds_the_labels(tmp_path: Path) -> None:
    found = [Label("a,b.jpg", 'the "red"\none', 0.25), Label("ü.png", "blue", 1.0)]
    assert write_labels(tmp_path / "labels.csv", found) == 2
    with (tmp_path / "labels.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.reader(stream))
    assert rows[0] == ["path", "label", "probability"]
    assert rows[1:] == [["a,b.jpg", 'the "red"\none', "0.250000"], ["ü.png", "blue", "1.000000"]]


def test_a_csv_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("older")

    def failing() -> Iterator[Label]:
        yield Label("a", "b", 0.5)
        raise GradFilterError("stop")

    with pytest.raises(GradFilterError, match="stop"):
        write_labels(tmp_path / "labels.csv", failing())
    assert [path.name for path in tmp_path.iterdir()] == ["labels.csv"]
    assert (tmp_path / "labels.csv").read_text() == "older"


def test_masks_are_pictures_of_class_numbers(tmp_path: Path) -> None:
    mask = torch.tensor([[0, 1, 2], [255, 20, 3]])
    files = write_masks(tmp_path / "masks", [Mask("x/a.jpg", mask), Mask("y/a.jpg", mask.T)])
    assert [file.name for file in files] == ["a.png", "a-2.png"]
    with Image.open(files[0]) as picture:
        assert picture.mode == "P"
        assert picture.size == (3, 2)
        assert list(picture.tobytes()) == mask.flatten().tolist()
        assert picture.convert("RGB").getpixel((1, 0)) == (128, 0, 0)
    with Image.open(files[1]) as picture:
        assert list(picture.tobytes()) == mask.T.flatten().tolist()


@pytest.mark.parametrize("number", [-1, 256])
def test_a_mask_with_too_many_classes_is_refused(tmp_path: Path, number: int) -> None:
    with pytest.raises(GradFilterError, match="from 0 to 255"):
        write_masks(tmp_path, [Mask("a", torch.tensor([[number]]))])
    assert list(tmp_path.iterdir()) == []


def test_unreadable_pictures_are_named_and_left_out(tmp_path: Path) -> None:
    plain("red").save(tmp_path / "good.png")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.jpg").write_text("no picture")
    files = [tmp_path / name for name in ("cut.png", "good.png", "text.jpg", "none.jpg")]
    told: list[str] = []
    found = list(read_pictures(files, told.append))
    assert [name for name, _ in found] == [str(tmp_path / "good.png")]
    assert [Path(sentence.split(" cannot be read")[0]).name for sentence in told] == [
        "cut.png",
        "text.jpg",
        "none.jpg",
    ]
    assert all(sentence.endswith("and is left out.") and "\n" not in sentence for sentence in told)
    with pytest.warns(UserWarning, match=r"text\.jpg cannot be read \(no picture\)"):
        list(read_pictures(files[1:3]))
    with pytest.raises(GradFilterError, match="None of the 2 files"):
        list(read_pictures(files[2:], told.append))
    with pytest.raises(GradFilterError, match="No files"):
        list(read_pictures([]))


def test_pictures_of_every_kind_are_read_upright_in_colour(tmp_path: Path) -> None:
    turned = halves((40, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees
    turned.save(tmp_path / "turned.png", exif=exif)
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg")
    Image.new("L", (8, 8), 77).save(tmp_path / "grey.png")
    Image.frombytes("I;16", (2, 1), (51400).to_bytes(2, "little") * 2).save(tmp_path / "deep.png")
    Image.new("RGBA", (8, 8), (9, 8, 7, 0)).save(tmp_path / "clear.png")
    names = ("turned.png", "cmyk.jpg", "grey.png", "deep.png", "clear.png")
    found = {Path(name).name: picture for name, picture in read_pictures(tmp_path / n for n in names)}
    assert {picture.mode for picture in found.values()} == {"RGB"}
    assert found["turned.png"].size == (20, 40)
    assert found["turned.png"].getpixel((10, 2)) == (255, 0, 0)
    assert found["cmyk.jpg"].getpixel((4, 4))[0] > 200
    assert found["grey.png"].getpixel((0, 0)) == (77, 77, 77)
    assert found["deep.png"].getpixel((0, 0)) == (200, 200, 200)  # and not clipped to white
    assert found["clear.png"].getpixel((0, 0)) == (255, 255, 255)  # transparency is seen over white


def test_errors_are_sentences() -> None:
    task: Any = "detection"
    with pytest.raises(GradFilterError, match="not 'detection'"):
        list(predict(Colours(), [], tensor, NAMES, task))
    with pytest.raises(GradFilterError, match="there are 4 classes"):
        list(predict(Colours(), [("a", plain("red"))], tensor, [*NAMES, "black"], "classify"))
    with pytest.raises(GradFilterError, match="use task='classify'"):
        list(predict(Colours(), [("a", plain("red"))], tensor, NAMES, "segment"))
    with pytest.raises(GradFilterError, match="use task='segment'"):
        list(predict(Colours(pixels=True), [("a", plain("red"))], tensor, NAMES, "classify"))
