"""gradfilter train, eval, predict and export, from the command line to the files they leave."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import gradfilter as gf
from gradfilter import cli
from gradfilter.training.report import read_report
from gradfilter.training.saved import open_run

pytestmark = pytest.mark.usefixtures("vision")

SMALL = [
    "--model",
    "tiny",
    "--weights",
    "none",
    "--size",
    "32",
    "--workers",
    "0",
    "--batch",
    "4",
    "--lr",
    "0.05",
]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Red, green and blue pictures, as JPEG files of phone-like shapes, in a folder per class."""
    from PIL import Image

    random = np.random.default_rng(0)
    for number, name in enumerate(("blue", "green", "red")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for index in range(8):
            shape = (48, 64, 3) if index % 2 else (64, 48, 3)
            pixels = random.integers(0, 120, shape)
            pixels[..., 2 - number] += 120
            picture = Image.fromarray(pixels.astype(np.uint8))
            picture.save(tmp_path / "pictures" / name / f"{index}.jpg")
    return tmp_path / "pictures"


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    """Pictures with a bright square, and where it is."""
    from PIL import Image

    random = np.random.default_rng(0)
    for part in ("images", "masks"):
        (tmp_path / "masked" / part).mkdir(parents=True)
    for index in range(12):
        pixels, mask = random.integers(0, 100, (40, 56, 3)), np.zeros((40, 56))
        top, left = random.integers(0, 20, 2)
        pixels[top : top + 16, left : left + 16] += 150
        mask[top : top + 16, left : left + 16] = 1
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "masked" / "images" / f"{index}.png")
        Image.fromarray(mask.astype(np.uint8)).save(tmp_path / "masked" / "masks" / f"{index}.png")
    return tmp_path / "masked"


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def train(out: Path, *arguments: object) -> int:
    return run("train", *SMALL, "--out", out, *arguments)


def weights(folder: Path, which: str = "last") -> dict[str, Tensor]:
    return load_file(folder / f"{which}.safetensors")


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_folder_of_pictures_from_training_to_onnx(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert train(out, "--data", pictures, "--epochs", 6, "--layers", "all", "--augment", "false") == 0
    said = capsys.readouterr().out
    assert "18 training and 6 test pictures, 3 classes, 32 px" in said
    best = float(re.findall(r"accuracy: ([\d.]+) % best", said)[0])
    assert best > 80
    report = read_report(out / "report.json")
    assert len(report.epochs) == 6
    assert report.confusion is not None
    assert sum(map(sum, report.confusion)) == 6
    assert {cost.name.split()[0] for cost in report.costs} == {"kept", "multiply-adds", "step,", "peak"}

    assert run("eval", out, "--json", tmp_path / "scores.json") == 0
    assert json.loads((tmp_path / "scores.json").read_text())["accuracy"] == pytest.approx(best, abs=0.01)

    capsys.readouterr()
    assert run("predict", out, pictures / "red", "--out", tmp_path / "labels.csv") == 0
    with (tmp_path / "labels.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 8
    assert sum(row["label"] == "red" for row in rows) >= 6
    assert run("predict", out, pictures / "blue" / "0.jpg") == 0
    assert capsys.readouterr().out.splitlines()[-1].split("\t")[0].endswith("0.jpg")

    assert run("export", out, tmp_path / "tiny.safetensors") == 0
    plain = gf.models.build("tiny", classes=3, weights=tmp_path / "tiny.safetensors")
    assert_same(dict(plain.state_dict()), weights(out, "best"))


def test_masks_from_training_to_predictions(
    masked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    out = tmp_path / "run"
    options = ["--model", "smp:Unet/resnet18", "--layers", "last:4", "--size", "64", "--epochs", "2"]
    assert train(out, "--data", masked, *options) == 0
    assert "mean iou" in capsys.readouterr().out
    report = read_report(out / "report.json")
    assert set(report.scores) == {"mean_iou", "pixel_accuracy"}
    assert all(set(overlay.pictures) == {"picture", "found", "truth"} for overlay in report.overlays)
    assert run("eval", out) == 0
    assert run("predict", out, masked / "images", "--out", tmp_path / "found") == 0
    found = sorted((tmp_path / "found").glob("*.png"))
    assert len(found) == 12
    with Image.open(found[0]) as mask:
        assert mask.size == (56, 40)
        assert set(np.unique(np.array(mask))) <= {0, 1}


STEPS = ["--data", "digits", "--shots", "4", "--epochs", "3", "--layers", "last:3"]


def interrupting(after: int) -> Any:
    """In place of the loop's own steps: press Ctrl-C behind some step."""
    from gradfilter.training.loop import Training

    take = Training._take_step

    def stepped(self: Training, group: Any) -> None:
        take(self, group)
        if self.step == after:
            os.kill(os.getpid(), signal.SIGINT)

    return stepped


@pytest.mark.parametrize(
    ("after", "options"),  # in the first epoch, at its very end, in the second
    [(1, []), (10, []), (13, []), (13, ["--augment", "false"]), (13, ["--cache", "on", "--views", "2"])],
)
def test_interrupted_and_resumed_gives_the_same_bits(
    after: int,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from gradfilter.training.loop import Training

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train(whole, *STEPS, *options) == 0
    with monkeypatch.context() as patched:
        patched.setattr(Training, "_take_step", interrupting(after))
        assert train(stopped, *STEPS, *options) == 130
    told = capsys.readouterr().err
    assert f"gradfilter train --resume {stopped} goes on." in told
    assert "Traceback" not in told
    assert run("train", "--resume", stopped) == 0
    for which in ("last", "best"):
        assert_same(weights(whole, which), weights(stopped, which))
    epochs = [
        [json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()]
        for f in (whole, stopped)
    ]
    losses = [[entry["loss"] for entry in entries] for entries in epochs]
    assert losses[0] == losses[1]


def test_stopped_behind_any_step_of_sixty_and_resumed_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind every single one with GRADFILTER_STOPS=1, which takes some minutes."""
    from gradfilter.training.loop import Training

    options = ["--data", "digits", "--shots", "4", "--steps", "60", "--layers", "last:3"]
    assert train(tmp_path / "whole", *options) == 0
    every = int(os.environ.get("GRADFILTER_STOPS", "25"))
    for after in range(every, 60, every):
        stopped = tmp_path / str(after)
        with monkeypatch.context() as patched:
            patched.setattr(Training, "_take_step", interrupting(after))
            assert train(stopped, *options) == 130
        assert run("train", "--resume", stopped) == 0
        assert_same(weights(tmp_path / "whole"), weights(stopped))


def test_resumed_from_pretrained_weights_and_cached_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradfilter.training.loop import Training

    assert train(tmp_path / "first", *STEPS, "--seed", "7", "--epochs", "1") == 0
    options = [
        *STEPS,
        "--weights",
        str(tmp_path / "first"),
        "--augment",
        "false",
        "--method",
        "SparseUpdate(0.5)",
    ]
    assert train(tmp_path / "whole", *options) == 0
    with monkeypatch.context() as patched:
        patched.setattr(Training, "_take_step", interrupting(13))
        assert train(tmp_path / "stopped", *options) == 130
    assert run("train", "--resume", tmp_path / "stopped") == 0
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))


def test_a_run_is_tested_and_goes_on_from_any_folder(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data, weights and cache were given as seen from the folder in which it was begun."""
    from gradfilter.training.loop import Training

    assert train(tmp_path / "first", *STEPS, "--epochs", "1") == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    options = ["--data", "folder:pictures", "--steps", "6", "--model", "tiny", "--augment", "false"]
    options += ["--weights", "first/last.safetensors", "--cache", "on", "--cache-folder", "features"]
    with monkeypatch.context() as patched:
        patched.setattr(Training, "_take_step", interrupting(3))
        assert train(tmp_path / "run", *options) == 130
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run("train", "--resume", tmp_path / "run") == 0
    assert run("eval", tmp_path / "run") == 0
    assert not list(Path().iterdir())


def test_another_seed_is_another_training(tmp_path: Path) -> None:
    for seed in (0, 1):
        assert train(tmp_path / str(seed), *STEPS, "--epochs", "1", "--seed", seed) == 0
    with pytest.raises(AssertionError):
        assert_same(weights(tmp_path / "0"), weights(tmp_path / "1"))


def train_in_two_processes(options: list[str], out: Path) -> str:
    """What they say."""
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2"
    command = [sys.executable, "-W", "ignore", *launcher.split(), "-m", "gradfilter", "train"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *options, "--out", str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("augment", ["true", "false"])
def test_two_processes_segment_as_one(masked: Path, tmp_path: Path, augment: str) -> None:
    """The decoder reads heights and widths of the frozen encoder's maps."""
    options = ["--data", str(masked), "--model", "smp:DeepLabV3/mobilenet_v2", "--weights", "none"]
    options += ["--size", "64", "--epochs", "1", "--batch", "4", "--augment", augment]
    said = train_in_two_processes(options, tmp_path / "two")
    assert ("are cached" in said) == (augment == "false")
    assert run("train", *options, "--out", tmp_path / "one") == 0
    assert_same(weights(tmp_path / "one"), weights(tmp_path / "two"))
    assert_same(weights(tmp_path / "one", "best"), weights(tmp_path / "two", "best"))


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ("--augment true", ""),  # frozen layers are shared
        ("--augment false", "are cached"),  # nothing is left to share
        ("--layers all", "--accumulate 2"),
        ("--layers all --batch 2 --accumulate 2", ""),  # batches are shared
        ("--layers all --batch 4 --accumulate 2 --norm batch", "batch statistics"),
    ],
)
def test_two_processes_are_one(tmp_path: Path, options: str, advice: str) -> None:
    given = [*SMALL, "--data", "digits", "--shots", "2", "--epochs", "1", *options.split()]
    said = train_in_two_processes(given, tmp_path / "two")
    assert ("each process takes every step" in said) == bool(advice)
    assert advice in said
    assert run("train", *given, "--out", tmp_path / "one") == 0
    assert_same(weights(tmp_path / "one"), weights(tmp_path / "two"))
    reports = [read_report(tmp_path / name / "report.json") for name in ("one", "two")]
    scores = [
        [{k: v for k, v in epoch.items() if k not in ("seconds", "waited")} for epoch in report.epochs]
        for report in reports
    ]
    assert scores[0] == scores[1]
    assert reports[0].confusion == reports[1].confusion


def test_what_one_process_cannot_cache_none_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one would take every step alone, and the others wait for it."""
    from gradfilter.training import job

    options = ["--data", "digits", "--shots", "2", "--epochs", "1", "--augment", "false"]
    found = {}
    for name in ("all", "one less"):
        assert run("train", *SMALL, *options, "--out", tmp_path / name) == 0
        found[name] = json.loads((tmp_path / name / "config.json").read_text())["found"]["cached"]
        monkeypatch.setattr(job, "any_of", lambda *flags: [True for _ in flags])
    assert found == {"all": True, "one less": False}


def test_on_top_of_an_earlier_run(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = tmp_path / "first"
    assert train(first, "--data", pictures, "--epochs", "1", "--layers", "all") == 0
    options = ["--size", "32", "--workers", "0", "--epochs", "1", "--lr", "0", "--weight-decay", "0"]
    second = tmp_path / "second"
    assert run("train", "--weights", first, "--data", pictures, *options, "--out", second) == 0
    assert json.loads((second / "config.json").read_text())["model"] == "tiny"
    assert_same(weights(first, "best"), weights(second))
    # other classes: a new head on the old features
    assert (
        run(
            "train",
            "--weights",
            first,
            "--data",
            "digits",
            "--shots",
            "1",
            *options,
            "--out",
            tmp_path / "third",
        )
        == 0
    )


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [("epochs", "many", "epochs must be a whole number, not 'many'"), ("epochs", 1, "is at step 30 already")],
)
def test_a_run_whose_settings_were_edited_is_refused(
    field: str, value: Any, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", *STEPS) == 0
    file = tmp_path / "run" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    assert run("train", "--resume", tmp_path / "run") == 2
    assert sentence in capsys.readouterr().err


def test_a_run_whose_data_has_changed_is_refused(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--data", pictures, "--epochs", "1") == 0
    (pictures / "red" / "0.jpg").unlink()
    assert run("train", "--resume", tmp_path / "run") == 2
    assert "the number of pictures have changed" in capsys.readouterr().err
    pictures.rename(tmp_path / "elsewhere")
    assert run("train", "--resume", tmp_path / "run") == 2
    assert "cannot be opened any more" in capsys.readouterr().err


def test_tensorboard_has_every_epoch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert train(tmp_path / "run", *STEPS, "--epochs", "2", "--tensorboard") == 0
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))


def test_where_features_cannot_be_kept_none_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # MobileNetV2 has dropout before its classifier: frozen here, and another one at every step
    options = ["--model", "mobilenet_v2", "--layers", "classifier", "--augment", "false", "--shots", "1"]
    assert train(tmp_path / "auto", *options, "--epochs", "1") == 0
    assert train(tmp_path / "on", *options, "--cache", "on") == 2


def test_clients_and_shots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--partition",
        "dirichlet",
        "--clients",
        "5",
        "--client",
        "2",
        "--alpha",
        "0.1",
        "--epochs",
        "1",
    ]
    assert train(tmp_path / "run", *options) == 0
    said = capsys.readouterr().out
    assert re.search(r"Client 2 of 5 \(dirichlet\): \d+ samples; the clients' classes are 0\.\d+ apart", said)
    count = int(re.findall(r"digits: (\d+) training", said)[0])
    assert 0 < count < 1438


@pytest.mark.parametrize("method", ["LowRankAdapter(rank=2)", "LiteResidual()"])
def test_adapters_are_there_again(method: str, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(out, "--data", pictures, "--epochs", "1", "--method", method, "--augment", "false") == 0
    accuracy = json.loads((out / "best.json").read_text())["accuracy"]
    assert run("eval", out, "--json", tmp_path / "scores.json") == 0
    assert json.loads((tmp_path / "scores.json").read_text())["accuracy"] == pytest.approx(accuracy)


def test_a_file_of_settings_and_what_comes_after_it(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"data: {pictures}\nepochs: 7\nmethods:\n  head: Exact()\n")
    out = tmp_path / "run"
    assert train(out, "--config", file, "--epochs", "1") == 0
    resolved = json.loads((out / "config.json").read_text())
    assert (resolved["epochs"], resolved["methods"], resolved["task"]) == (1, {"head": "Exact()"}, "classify")
    second = tmp_path / "more.yaml"
    second.write_text("momentum: 0.5\nepochs: 1\n")
    assert train(tmp_path / "both", "--config", file, "--config", second) == 0
    resolved = json.loads((tmp_path / "both" / "config.json").read_text())
    assert (resolved["momentum"], resolved["epochs"], resolved["methods"]) == (0.5, 1, {"head": "Exact()"})
    file.write_text("epohs: 3\n")
    assert train(tmp_path / "other", "--config", file) == 2
    assert not (tmp_path / "other").exists()
    assert "settings.yaml has epohs, which is no setting. Did you mean epochs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--epohs", "3"], "There is no setting epohs. Did you mean epochs"),
        (["--model", "mobilenet_v22"], "There is no model mobilenet_v22. Did you mean mobilenet_v2"),
        (["--conf", "a.yaml"], "There is no setting conf. Did you mean config"),  # nothing is abbreviated
        (["--workers", "100000"], "workers must be at most"),
        (["--lr", "fast"], "lr must be a number, not fast"),
        (["--optimizer", "adam"], "optimizer must be sgd or adamw, not adam"),
        (["--data", ""], "data is empty"),
        (["--cache", "on", "--layers", "all"], "--cache on needs frozen layers"),
        (["--data", "nowhere"], "nowhere is neither a file or folder nor a known data set"),
        (["--recipe", "pets2"], "There is no recipe pets2. Did you mean pets"),
        (["--recipe"], "expected one argument"),
        (["--model", "smp:FPN/resnet18"], "gives one class per pixel, but digits needs one per picture"),
        (["--model", "smp:FPN/resnet18", "--size", "33"], "The model could not be run on the shape"),
        (["--weights", "none.pth"], "none.pth does not exist"),
        (["--method", "HOSWD(0.8)"], "There is no method HOSWD"),
        (["--layers", "conv99"], "No layer matches 'conv99'"),
        (["--partition", "shards", "--clients", "3", "--client", "3"], "client must be below clients, 3"),
        (["--resume", "nowhere"], "nowhere holds no run"),
    ],
)
def test_bad_options_get_one_sentence(
    options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = options if "--resume" in options else [*SMALL, "--out", str(tmp_path / "run"), *options]
    assert run("train", *arguments) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()


def test_a_model_of_the_other_task_is_refused(
    masked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--data", masked) == 2
    assert "tiny gives one class per picture" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_begin_leaves_nothing(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder would be in the way of the next try. One that has trained stays."""
    picture = pictures / "red" / "3.jpg"
    whole = picture.read_bytes()
    picture.write_bytes(whole[: len(whole) // 2])  # its size can be read, its pixels cannot
    assert train(tmp_path / "run", "--data", pictures, "--augment", "false") == 2
    assert "3.jpg" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    picture.write_bytes(whole)
    assert train(tmp_path / "run", "--data", pictures, "--lr", "1e30", "--clip", "0") == 2
    assert "is not finite" in capsys.readouterr().err
    assert train(tmp_path / "run", "--data", pictures, "--epochs", "1") == 0
    assert train(tmp_path / "run", "--data", pictures) == 2
    assert "holds a run already" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{}", '{"found": 3}'])
def test_settings_that_somebody_damaged(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", *STEPS, "--epochs", "1") == 0
    (tmp_path / "run" / "config.json").write_text(content)
    for command in (["train", "--resume"], ["eval"]):
        assert run(*command, tmp_path / "run") == 2
        assert "config.json is damaged" in capsys.readouterr().err


def test_labels_are_not_written_over_a_picture(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--data", pictures, "--epochs", "1") == 0
    picture = pictures / "red" / "3.jpg"
    before = picture.read_bytes()
    assert run("predict", tmp_path / "run", picture, "--out", picture) == 2
    assert "--out must end in .csv" in capsys.readouterr().err
    assert picture.read_bytes() == before
    for _ in range(2):
        assert run("predict", tmp_path / "run", picture, "--out", tmp_path / "labels.csv") == 0


def break_one_class(folder: Path) -> None:
    for name in ("green", "red"):
        for file in (folder / name).iterdir():
            file.unlink()
        (folder / name).rmdir()


def break_empty_class(folder: Path) -> None:
    (folder / "yellow").mkdir()


def break_picture(folder: Path) -> None:
    (folder / "red" / "3.jpg").write_bytes(b"no picture")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (break_one_class, "has one class only"),
        (break_empty_class, "The class folder"),
        (break_picture, "1 of 24 samples cannot be read"),
    ],
)
def test_bad_data_gets_one_sentence(
    damage: Any, sentence: str, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(pictures)
    assert train(tmp_path / "run", "--data", pictures) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()


def test_pictures_of_all_kinds(pictures: Path, tmp_path: Path) -> None:
    from PIL import Image

    grey = Image.new("L", (50, 40), 128)
    grey.save(pictures / "red" / "grey.png")
    Image.new("CMYK", (50, 40)).save(pictures / "red" / "cmyk.jpg")
    Image.fromarray(np.full((40, 50), 40000, np.uint16)).save(pictures / "red" / "deep.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (64, 32), "red").save(pictures / "red" / "turned.jpg", exif=turned)
    assert train(tmp_path / "run", "--data", pictures, "--epochs", "1") == 0


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert train(tmp_path / "file" / "run") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gradfilter.training import checkpoint

    out, save = tmp_path / "run", checkpoint.save_file

    def full(tensors: Any, file: Any) -> None:
        if "step-20" in str(file):
            raise OSError(28, "No space left on device")
        save(tensors, file)

    monkeypatch.setattr(checkpoint, "save_file", full)
    assert train(out, *STEPS) == 2
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.undo()
    assert run("train", "--resume", out) == 0
    assert train(tmp_path / "whole", *STEPS) == 0
    assert_same(weights(out), weights(tmp_path / "whole"))


def test_a_run_without_weights_says_so(tmp_path: Path) -> None:
    assert train(tmp_path / "run", *STEPS, "--epochs", "1") == 0
    for name in ("best.safetensors", "metrics.jsonl"):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(gf.GradFilterError, match="has no weights yet"):
        open_run(tmp_path / "run")


def test_time_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert train(tmp_path / "run", "--epochs", "1000", "--minutes", "0.03") == 0
    assert time.monotonic() - start < 60
    assert "the time of 0.03 minutes was over" in capsys.readouterr().out


KILLED = """
import os, random, signal, sys, time, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from gradfilter.models._torchvision import library
library("torchmetrics", "train").classification
library("torchvision.transforms.v2", "train")
from gradfilter import cli
import gradfilter.training.job
out, kills, options = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
rng, done, runs = random.Random(0), 0, 0

def child(folder):
    pid = os.fork()
    if not pid:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        begun = os.path.exists(f"{folder}/config.json")
        how = ["--resume", folder] if begun else [*options, "--out", folder]
        os._exit(cli.main(["train", *how]))
    return pid

begun = time.monotonic()
assert os.waitpid(child(f"{out}/whole"), 0)[1] == 0
takes = time.monotonic() - begun
while done < kills:
    runs += 1
    while True:
        pid = child(f"{out}/killed-{runs}")
        time.sleep(rng.random() * takes)
        if os.waitpid(pid, os.WNOHANG)[0]:
            break
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        done += 1
        if done == kills:
            assert os.waitpid(child(f"{out}/killed-{runs}"), 0)[1] == 0
            break
print(done, runs)
"""


def test_killed_at_random_moments_and_resumed_gives_the_same_bits(tmp_path: Path) -> None:
    """GRADFILTER_KILLS=200 for as many kills; a run here has 60 steps in 6 epochs."""
    kills = os.environ.get("GRADFILTER_KILLS", "4")
    options = [*SMALL, "--data", "digits", "--shots", "4", "--epochs", "6", "--layers", "last:3"]
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path), kills, *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == kills
    killed = list(tmp_path.glob("killed-*"))
    assert len(killed) == int(done.stdout.split()[1])
    for folder in killed:
        assert_same(weights(tmp_path / "whole"), weights(folder))
        assert_same(weights(tmp_path / "whole", "best"), weights(folder, "best"))


def test_masks_that_somebody_drew_are_never_written_over(
    masked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    options = ["--model", "smp:Unet/resnet18", "--layers", "last:1", "--size", "32", "--steps", "1"]
    assert train(out, "--data", masked, *options) == 0
    drawn = {file: file.read_bytes() for file in (masked / "masks").iterdir()}
    assert run("predict", out, masked / "images", "--out", masked / "masks") == 2
    assert "is there already; give a folder without masks of these pictures" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in (masked / "masks").iterdir()} == drawn
    for _ in range(2):  # those in the run are its own
        assert run("predict", out, masked / "images") == 0
    assert len(list((out / "masks").glob("*.png"))) == 12


def test_a_kill_before_the_first_checkpoint_leaves_every_epoch_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradfilter.training.loop import Training

    class KillError(Exception):
        pass

    def killed(self: Training) -> None:
        raise KillError

    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(Training, "save", killed)
        with pytest.raises(KillError):
            train(out, *STEPS)
    with (out / "metrics.jsonl").open("a") as stream:
        stream.write('{"epoch": 2, "lo')
    assert run("train", "--resume", out) == 0
    assert [json.loads(line)["epoch"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
        3,
    ]
    assert len(read_report(out / "report.json").epochs) == 3


@pytest.mark.parametrize("augment", ["true", "false"])
def test_resumed_with_less_memory_gives_the_same_bits(
    augment: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures are then read from their files each time, and features are still kept."""
    from gradfilter.training import job, sets
    from gradfilter.training.loop import Training

    options = ["--data", pictures, "--epochs", "2", "--augment", augment, "--batch", "5"]
    assert train(tmp_path / "whole", *options) == 0
    with monkeypatch.context() as patched:
        patched.setattr(Training, "_take_step", interrupting(2))
        assert train(tmp_path / "stopped", *options) == 130
    for module in (job, sets):
        monkeypatch.setattr(module, "available_memory", lambda: 1)
    assert run("train", "--resume", tmp_path / "stopped") == 0
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))


def test_a_picture_that_breaks_in_a_reader_is_one_sentence(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = pictures / "red" / "0.jpg"
    broken.write_bytes(broken.read_bytes()[:700])
    assert train(tmp_path / "run", "--data", pictures, "--workers", "2") == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith(f"gradfilter: {broken} is broken or no picture")
    assert "Traceback" not in "".join(said)


def test_exact_training_that_would_not_fit_is_left_out_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradfilter.training import summary

    monkeypatch.setattr(summary, "available_memory", lambda: 1)
    assert train(tmp_path / "run", *STEPS, "--epochs", "1") == 0
    costs = {cost.name: cost.values for cost in read_report(tmp_path / "run" / "report.json").costs}
    assert costs["step, plain PyTorch against this run"]["exact"] is None


def test_other_data_is_tested_as_a_whole(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--data", pictures, "--epochs", "1") == 0
    assert run("eval", tmp_path / "run") == 0
    assert "of 6 test pictures" in capsys.readouterr().out
    moved = pictures.rename(tmp_path / "moved")
    assert run("eval", tmp_path / "run", "--data", moved) == 0
    told = capsys.readouterr()
    assert "of 6 test pictures" in told.out
    assert "it is taken for the same, moved, and its test part alone is tested" in told.err
    for name in ("red", "green", "blue"):
        (moved / name / "0.jpg").unlink()
    assert run("eval", tmp_path / "run", "--data", moved) == 0
    assert "of 21 pictures" in capsys.readouterr().out


def test_on_top_of_a_run_with_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    assert train(first, *STEPS, "--epochs", "1", "--method", "LowRankAdapter(2)") == 0
    plain = gf.models.build("tiny", classes=10, weights=first / "best.safetensors")
    assert_same(dict(plain.state_dict()), weights(first, "best"))
    assert train(tmp_path / "second", *STEPS, "--epochs", "1", "--weights", first) == 0
    assert train(other, *STEPS, "--epochs", "1", "--method", "LiteResidual()") == 0
    assert run("eval", other) == 0
    assert train(tmp_path / "third", *STEPS, "--weights", other) == 2
    assert "was trained with adapters that no plain weights can replace" in capsys.readouterr().err


def test_features_in_a_folder_serve_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradfilter.cache import _Prefix

    compute, computed = _Prefix.features, [0]

    def counted(self: _Prefix, images: list[Tensor]) -> Any:
        computed[-1] += len(images)
        return compute(self, images)

    monkeypatch.setattr(_Prefix, "features", counted)
    for name in ("first", "second"):
        assert train(tmp_path / name, *STEPS, "--augment", "false", "--cache-folder", tmp_path / "kept") == 0
        computed.append(0)
    assert computed == [40 + 359, 0, 0]


def test_mixed_precision_leaves_the_cache_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*STEPS, "--epochs", "1", "--augment", "false", "--precision", "bf16"]
    assert train(tmp_path / "run", *options) == 0
    assert train(tmp_path / "other", *options, "--cache", "on") == 2
    assert "--cache on keeps features of float32" in capsys.readouterr().err


def test_all_of_a_new_head_trains_by_default(masked: Path, tmp_path: Path) -> None:
    options = ["--weights", "none", "--size", "64", "--workers", "0", "--steps", "1", "--batch", "4"]
    assert run("train", "--data", masked, *options, "--out", tmp_path / "run") == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"] == "smp:FPN/mobilenet_v2"
    rows = read_report(tmp_path / "run" / "report.json").plan["layers"]
    found = {(row["layer"].partition(".")[0], row["action"]) for row in rows}
    assert found == {("encoder", "frozen"), ("decoder", "train"), ("segmentation_head", "train")}


def test_the_data_of_the_run_is_known_however_its_place_is_written(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", f"folder:{pictures}", "--epochs", "1", "--shots", "2"]
    assert train(tmp_path / "run", *options) == 0
    shutil.copytree(pictures, tmp_path / "same_size")
    (tmp_path / "link").symlink_to(pictures)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    tested = {"pictures/": "6 test", "link": "6 test", f"folder:{pictures}": "6 test", "same_size": "6 test"}
    for data, count in tested.items():
        assert run("eval", "run", "--data", data) == 0
        assert f"of {count} pictures" in capsys.readouterr().out


def test_pictures_that_are_left_out_are_told(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "red" / "9.HEIC").write_bytes(b"")
    assert train(tmp_path / "run", "--data", pictures, "--epochs", "1", "--shots", "2") == 0
    told = "Files left out: 1 .heic; save them as JPEG or PNG if they are pictures."
    assert f"{told} 2 of each class, 6 samples." in capsys.readouterr().out
    assert run("eval", tmp_path / "run") == 0
    assert capsys.readouterr().err.startswith(f"warning: {told}\n")
    assert train(tmp_path / "more", "--data", pictures, "--shots", "1000") == 2
    assert "Class blue has 6 samples, less than 1000" in capsys.readouterr().err


def test_a_class_without_training_samples_can_still_be_tested(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--data", pictures, "--epochs", "1") == 0
    sides = {"blue": "test", "green": "train", "red": "test"}
    lines = [f"{name}/{i}.jpg,{name},{side}" for name, side in sides.items() for i in range(2)]
    (pictures / "list.csv").write_text("\n".join(["path,label,split", *lines]))
    assert train(tmp_path / "other", "--data", pictures / "list.csv") == 2
    assert "has test samples of 'blue', 'red', but none to train on" in capsys.readouterr().err
    assert run("eval", tmp_path / "run", "--data", pictures / "list.csv") == 0
    assert "of 4 test pictures" in capsys.readouterr().out
