"""What gradfilter train --resume goes on from, and what it refuses so that no result is lost or mixed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gradfilter as gf
from gradfilter import cli
from gradfilter.locking import held
from gradfilter.training import checkpoint

pytestmark = pytest.mark.usefixtures("vision")

TINY = [
    *("--model", "tiny", "--weights", "none", "--size", "16", "--workers", "0"),
    *("--batch", "8", "--shots", "4", "--epochs", "2", "--data", "digits"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, vision: None) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    torch.set_num_threads(1)
    assert cli.main(["train", *TINY, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != ".lock"}


def refusal(run: Path, capsys: pytest.CaptureFixture[str], command: str = "train") -> str:
    """What it says; nothing in the folder changes."""
    before = contents(run)
    assert cli.main([command, *(["--resume"] if command == "train" else []), str(run)]) == 2
    assert contents(run) == before
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return told.splitlines()[-1]


def edit(run: Path, **changes: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch": 4}, "was made with batch 8, not 4; put that back"),
        ({"lr": 0.5}, "was made with lr 0.02, not 0.5"),
        ({"optimizer": "adamw"}, "was made with optimizer sgd, not adamw"),
        ({"layers": "all"}, "was made with layers last:4, not all"),
        ({"model": "mcunet-5fps"}, "was made with model tiny, not mcunet-5fps"),
        ({"found": {}}, "config.json is damaged"),
    ],
    ids=str,
)
def test_settings_that_have_changed_since_are_told(
    run: Path, changes: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run, **changes)
    assert sentence in refusal(run, capsys)


def test_how_long_it_trains_may_change(run: Path) -> None:
    edit(run, epochs=3, workers=1)
    assert cli.main(["train", "--resume", str(run)]) == 0
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("gone", ["checkpoint", "checkpoint/checkpoint.json"])
def test_a_run_without_its_checkpoint_is_not_begun_anew(
    run: Path, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (shutil.rmtree if gone == "checkpoint" else Path.unlink)(run / gone)
    assert "has results of 2 epochs, but no checkpoint" in refusal(run, capsys)


def test_a_run_killed_before_its_first_checkpoint_is(run: Path, finished: Path) -> None:
    shutil.rmtree(run / "checkpoint")
    (run / "report.json").unlink()
    first, _ = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(first)
    assert cli.main(["train", "--resume", str(run)]) == 0
    then, now = (load_file(folder / "last.safetensors") for folder in (finished, run))
    assert all(torch.equal(now[name], then[name]) for name in then)


HOLDING = """
import sys, time
from pathlib import Path
from gradfilter.locking import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_run_in_use_is_left_alone_until_its_process_has_ended(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLDING, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert f"run is in use by process {other.pid}; wait for its end" in refusal(run, capsys)
    finally:
        other.kill()
        other.communicate()
    with held(run):
        pass


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("checkpoint/checkpoint.json", None, "is damaged; start the run anew"),
        ("config.json", "[1]", "config.json is damaged"),
    ],
)
def test_damaged_files_are_told(
    run: Path, file: str, text: str | None, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is None:
        index = json.loads((run / file).read_text())
        index["facts"]["step"] = "x"
        text = json.dumps(index)
    (run / file).write_text(text)
    assert sentence in refusal(run, capsys)


def test_a_best_epoch_that_cannot_be_read_is_left_out_of_the_report(run: Path) -> None:
    (run / "best.json").write_text("[1]")
    assert cli.main(["train", "--resume", str(run)]) == 0


def test_weights_that_are_gone_are_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "best.safetensors").unlink()
    assert "best.safetensors is gone; put it back, or train anew" in refusal(run, capsys, "eval")


def test_a_checkpoint_of_another_model_or_optimizer_is_refused() -> None:
    def made(outputs: int, momentum: float = 0.9) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, outputs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    tensors = checkpoint.training_tensors(*made(2))
    checkpoint.load_training_(*made(2), tensors)
    with pytest.raises(gf.GradFilterError, match="of another model, or other layers trained"):
        checkpoint.load_training_(*made(4), tensors)
    frozen, _ = made(2)
    with pytest.raises(gf.GradFilterError, match="of another model, or other layers trained"):
        checkpoint.load_training_(frozen, torch.optim.SGD([frozen.bias], lr=0.1), tensors)


def test_an_empty_name_of_a_run_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--resume", ""]) == 2
    assert "--resume is empty; give the folder of the run" in capsys.readouterr().err


def test_a_run_among_the_class_folders_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be taken for a class of its own from then on."""
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for index in range(4):
            Image.new("RGB", (16, 16), (60 * index, 0, 0)).save(tmp_path / name / f"{index}.png")
    monkeypatch.chdir(tmp_path)
    for options in ([], ["--out", "."], ["--out", ".run", "--cache-folder", "kept"]):
        assert cli.main(["train", *TINY, "--shots", "0", "--data", ".", *options]) == 2
        assert "would lie among the class folders" in capsys.readouterr().err
        assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    assert cli.main(["train", *TINY, "--shots", "0", "--data", ".", "--out", ".runs/1"]) == 0


def test_a_new_run_in_a_folder_that_another_holds_takes_nothing_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", HOLDING, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert cli.main(["train", *TINY, "--out", str(run)]) == 2
        assert "is in use by process" in capsys.readouterr().err
        assert (run / "config.json").exists()
    finally:
        other.kill()
        other.communicate()


def test_a_full_disk_does_not_hinder_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.getpid", full)  # which it would write
    with held(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()


def test_folders_above_the_data_may_have_the_names_of_classes(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / "a" / "data" / name).mkdir(parents=True)
        for index in range(4):
            picture = Image.new("RGB", (16, 16), (60 * index, 0, 0))
            picture.save(tmp_path / "a" / "data" / name / f"{index}.png")
    for out in (tmp_path / "run", tmp_path / "a" / "run"):
        options = ["--shots", "0", "--data", str(tmp_path / "a" / "data"), "--out", str(out)]
        assert cli.main(["train", *TINY, *options]) == 0


def test_too_large_a_picture_is_told_as_a_lack_of_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *TINY, "--size", "10000000", "--out", str(tmp_path / "run")]) == 2
    assert "the memory does not suffice" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
