"""The folder of a run: nothing written over, nothing double, nothing lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gradfilter as gf
from gradfilter.errors import GradFilterError
from gradfilter.training.report import Report
from gradfilter.training.run_folder import RunFolder

CONFIG = {"epochs": 3, "data": Path("pictures"), "lr": 0.1}


def lines(run: RunFolder) -> list[str]:
    return (run.path / "metrics.jsonl").read_text().splitlines()


def test_a_run_leaves_what_the_documentation_says(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "a" / "b", CONFIG)
    model = gf.apply_(gf.models.build("tiny", classes=2), gf.GradientFilter(2), "last:2")
    run.append({"epoch": 1, "loss": 0.5})
    run.save(model, best=True)
    run.write_report(Report("run"))
    run.checkpoint.mkdir()
    names = {path.name for path in run.path.iterdir()}
    assert names == {
        "config.json",
        "metrics.jsonl",
        "best.safetensors",
        "last.safetensors",
        "checkpoint",
        "report.json",
        "report.html",
    }
    document = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
    assert all(name in document for name in names)
    gf.models.build("tiny", classes=2, weights=run.best)
    assert RunFolder.open(run.path).config == {"epochs": 3, "data": "pictures", "lr": 0.1}


def test_best_stays_when_a_later_epoch_is_worse(tmp_path: Path) -> None:
    run, model = RunFolder.create(tmp_path, {}), nn.Linear(2, 2)
    run.save(model, best=True)
    first = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    run.save(model, best=False)
    assert torch.equal(load_file(run.best)["weight"], first)
    assert not load_file(run.last)["weight"].any()


def test_tied_weights_are_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    RunFolder.create(tmp_path, {}).save(model, best=False)
    model.load_state_dict(load_file(tmp_path / "last.safetensors"))


def test_metrics_are_one_line_each_and_valid_json(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, {})
    for epoch, loss in enumerate([0.5, float("nan")], 1):
        run.append({"epoch": epoch, "loss": loss})
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines(run)] == [
        {"epoch": 1, "loss": 0.5},
        {"epoch": 2, "loss": None},
    ]


@pytest.mark.parametrize("reached", range(5))
@pytest.mark.parametrize("written", range(5))
def test_resuming_leaves_no_epoch_double_and_none_out(tmp_path: Path, reached: int, written: int) -> None:
    run = RunFolder.create(tmp_path, {})
    for epoch in range(1, written + 1):
        run.append({"epoch": epoch, "loss": 1.0, "memory": 7})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"epoch": 99, "lo')  # a kill in the middle of a line
    again = RunFolder.open(tmp_path)
    again.go_back([{"epoch": epoch, "loss": 1.0} for epoch in range(1, reached + 1)])
    for epoch in range(reached + 1, 6):
        again.append({"epoch": epoch, "loss": 1.0})
    assert [entry["epoch"] for entry in again.epochs()] == [1, 2, 3, 4, 5]
    assert len(lines(again)) == 5
    assert sum("memory" in entry for entry in again.epochs()) == min(reached, written)


def test_without_going_back_epochs_would_be_double(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, {})
    for epoch in (1, 2, 2):
        run.append({"epoch": epoch})
    assert len(run.epochs()) == 3


@pytest.mark.parametrize("trace", ["config.json", "metrics.jsonl", "checkpoint"])
def test_a_run_is_never_written_over(tmp_path: Path, trace: str) -> None:
    (tmp_path / trace).mkdir() if trace == "checkpoint" else (tmp_path / trace).write_text("{}")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        GradFilterError, match=r"holds a run already; go on with it by --resume .* another name"
    ):
        RunFolder.create(tmp_path, {})
    assert sorted(tmp_path.iterdir()) == before


def test_other_files_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder.create(tmp_path, {})
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(GradFilterError, match=r"cannot be written \(.*another folder\."):
            RunFolder.create(path, {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(GradFilterError, match="cannot be written"):
        RunFolder.create(tmp_path, {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, {})
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(GradFilterError, match=r"No space left on device\); make room"):
        run.append({"epoch": 1})


def test_what_is_no_run_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(GradFilterError, match="holds no run"):
        RunFolder.open(tmp_path / "none")
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(GradFilterError, match="is damaged"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_run_that_did_not_begin_is_taken_away(tmp_path: Path, is_there: bool) -> None:
    """And nothing else: neither a folder that somebody made, nor a run that has trained."""
    folder = tmp_path / "run"
    if is_there:
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    run = RunFolder.create(folder, {"epochs": 2})
    (folder / "tensorboard").mkdir()
    run.discard()
    assert folder.exists() == is_there
    assert not (folder / "config.json").exists()
    assert (folder / "notes.txt").exists() == is_there
    again = RunFolder.create(folder, {"epochs": 2})
    again.append({"epoch": 1, "loss": 0.7})
    again.discard()
    assert RunFolder.open(folder).epochs()


def test_what_cannot_be_taken_away_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(tmp_path / "run", {"epochs": 2})

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    run.discard()
    assert (tmp_path / "run" / "config.json").exists()
