"""The training loop: what it does, and that it can be stopped anywhere."""

from __future__ import annotations

import copy
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import gradfilter as gf
from gradfilter.methods.text import method_from
from gradfilter.progress import silent
from gradfilter.training import checkpoint
from gradfilter.training.loop import Training
from gradfilter.training.settings import Loop


class Noisy(Dataset[tuple[Tensor, int]]):
    """Two classes, augmented at random."""

    def __init__(self, count: int = 22, noise: float = 0.5) -> None:
        random_ = torch.Generator().manual_seed(0)
        self.images = torch.randn(count, 3, 16, 16, generator=random_)
        self.images += torch.arange(count).view(-1, 1, 1, 1) % 2
        self.noise = noise

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        return image + self.noise * torch.randn(image.shape) if self.noise else image, index % 2


TASK = gf.Classification(2)
pytestmark = pytest.mark.usefixtures("vision")  # torchmetrics imports torchvision, which may warn


def net(method: str = "GradientFilter(2)", layers: str = "last:3", norm: Any = "fixed") -> nn.Module:
    torch.manual_seed(1)
    model = gf.models.build("tiny", classes=2)
    model.add_module("dropout", nn.Dropout(0.2))
    return gf.apply_(model, method_from(method), layers, norm=norm)


class Counting(nn.Module):
    """Changed by a batch of more than one sample in training, or by any batch of a test; or draws there."""

    def __init__(self, during: str) -> None:
        super().__init__()
        self.during = during
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.during == ("training" if self.training else "test") and (len(x) > 1 or not self.training):
            self.seen += 1
        noise = torch.randn_like(x) if self.during == "draws" and not self.training else 0
        return x / self.seen.clamp(min=1) + noise


def training(
    folder: Path | None = None,
    count: int = 22,
    accelerated: bool = False,
    counting: str = "",
    planned: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Training:
    loop = Loop(**{"epochs": 4, "batch": 4, "lr": 0.05, "momentum": 0.9, **settings})
    model = net(**planned or {})
    model = gf.accelerate_(model) if accelerated else model
    model = nn.Sequential(model, Counting(counting)) if counting else model
    return Training(model, Noisy(count), Noisy(10, noise=0), TASK, loop, folder=folder)


def state(made: Training) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in checkpoint.training_tensors(made.model, made.optimizer).items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


class StopError(Exception):
    pass


def stopping_after(steps: int) -> Any:
    def tell(task: str, step: int, total: int) -> None:
        if step == steps:
            raise StopError

    return tell


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw", "lr": 0.001}, {"accumulate": 2}], ids=str)
def test_stopped_at_every_step_and_resumed_gives_the_same_bits(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    whole = training(**settings)
    whole.run()
    for steps in range(1, whole.steps, 1 if not settings else 5):
        folder = tmp_path / str(steps)
        first = training(folder, **settings)
        first.tell = stopping_after(steps)
        with pytest.raises(StopError):
            first.run(checkpoint_every=0)
        again = training(folder, **settings)
        assert again.resume() == (steps > 1)  # the step that was stopped in had not been saved
        again.run()
        assert_same(state(whole), state(again))
        assert [e["loss"] for e in again.history.epochs] == [e["loss"] for e in whole.history.epochs]


LONG = """
import os, sys
from pathlib import Path
import torch
from test_training import training

sizes, kept = [], []

def note(task, step, total):
    if sys.argv[1] == "True":
        kept.append(torch.ones(2**14))
    if task == "training" and step in (150, 600):
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))

made = training(steps=600)
made.tell = note
made.run()
print(sizes[1] - sizes[0])
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("leaks", [False, True])
def test_memory_stays_flat(leaks: bool) -> None:
    """experiments/long_run.py has 3,000 steps of a real model. The negative control keeps 64 KiB per step."""
    command = [sys.executable, "-W", "ignore", "-c", LONG, str(leaks)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 8 * 2**20) == leaks


FREED = """
import os
from pathlib import Path
import torch
from gradfilter.allocator import give_back_freed_memory, keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

told = keep_freed_memory()
full = [torch.ones(2**18) for _ in range(64)]
first, last = full[0], full[-1]  # memory between two that stay is given back too
del full
before = resident()
give_back_freed_memory()
print(told, before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_memory_is_kept_until_it_is_given_back() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-W", "ignore", "-c", FREED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    told, freed = done.stdout.split()
    assert told == "True"
    assert int(freed) > 56 * 2**20


def test_a_resumed_training_without_the_optimizers_state_is_another_one(tmp_path: Path) -> None:
    """The negative control of the test above."""
    whole = training()
    whole.run()
    first = training(tmp_path)
    first.tell = stopping_after(9)
    with pytest.raises(StopError):
        first.run(checkpoint_every=0)
    again = training(tmp_path)
    again.resume()
    again.optimizer.state.clear()
    again.run()
    with pytest.raises(AssertionError):
        assert_same(state(whole), state(again))


def test_resumed_with_a_method_that_remembers_gives_the_same_bits(tmp_path: Path) -> None:
    """Also in the layout of what it remembers: products with another one round otherwise."""
    made = {}
    for name, steps in (("whole", None), ("stopped", 9), ("again", None)):
        model = gf.apply_(gf.restore_(net()), gf.SubspaceIteration(rank=2), "last:3")
        loop = Loop(epochs=4, batch=4, lr=0.05, momentum=0.9)
        made[name] = Training(model, Noisy(), None, TASK, loop, folder=None if name == "whole" else tmp_path)
        made[name].tell = stopping_after(steps) if steps else silent
        assert made[name].resume() == (name == "again")
        with pytest.raises(StopError) if steps else nullcontext():
            made[name].run(checkpoint_every=0)
    assert_same(state(made["whole"]), state(made["again"]))


KILLED = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
import torch
torch.set_num_threads(1)
from test_training import training
made = training(Path(sys.argv[1]))
made.resume()
made.run(checkpoint_every=0)
"""


def test_killed_at_any_moment_and_resumed_gives_the_same_bits(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(KILLED.format(path=[str(Path(__file__).parent), *sys.path]))
    whole = training()
    whole.run()
    folder, rng, kills = tmp_path / "run", random.Random(0), 0  # noqa: S311
    command = [sys.executable, "-W", "ignore", str(script), str(folder)]
    while kills < 6:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=1.5 + rng.random() * 2)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    subprocess.run(command, check=True, capture_output=True)
    found = checkpoint.read(folder)
    assert found is not None
    assert_same(state(whole), found.tensors)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    made = training(tmp_path, epochs=1)
    made.run()
    file = next(tmp_path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(gf.GradFilterError, match="checksum differs"):
        training(tmp_path).resume()
    for content in ("{", "{}", "[]"):
        (tmp_path / "checkpoint.json").write_text(content)
        with pytest.raises(gf.GradFilterError, match="is damaged"):
            training(tmp_path).resume()
    training(tmp_path, epochs=1).run()
    index = json.loads((tmp_path / "checkpoint.json").read_text())
    for facts in ({}, [], None, index["facts"] | {"later": 1}):
        (tmp_path / "checkpoint.json").write_text(json.dumps(index | {"facts": facts}))
        with pytest.raises(gf.GradFilterError, match="is damaged"):
            training(tmp_path).resume()
    (tmp_path / "checkpoint.json").unlink()
    (tmp_path / "checkpoint.json").mkdir()
    with pytest.raises(gf.GradFilterError, match="cannot be read"):
        training(tmp_path).resume()


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = training(tmp_path, epochs=1)
    made.run()
    before = checkpoint.read(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(gf.GradFilterError, match="No space left on device"):
        made.save()
    monkeypatch.undo()
    after = checkpoint.read(tmp_path)
    assert before is not None
    assert after is not None
    assert_same(before.tensors, after.tensors)


def test_samples_do_not_depend_on_who_reads_them() -> None:
    one, two = training(epochs=1), training(epochs=1)
    two.workers = 2
    one.run()
    two.run()
    assert_same(state(one), state(two))


def test_samples_are_asked_for_by_whole_numbers_and_gradients_begin_at_none() -> None:
    """Hugging Face's sets take no tensors; what somebody left in .grad is no part of a step."""

    class Strict(Noisy):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            assert type(index) is int
            return super().__getitem__(index)

    made, clean = (Training(net(), Strict(8), Strict(4), TASK, Loop(epochs=1, batch=4)) for _ in range(2))
    for parameter in made.parameters:
        parameter.grad = torch.ones_like(parameter)
    made.run()
    clean.run()
    assert_same(state(made), state(clean))


def test_accumulated_batches_are_one_large_batch() -> None:
    large, small = training(epochs=1, batch=8, clip=0), training(epochs=1, batch=4, accumulate=2, clip=0)
    for made in (large, small):
        made.model.get_submodule("dropout").p = 0.0  # type: ignore[assignment]
        made.run()
    for a, b in zip(state(large).values(), state(small).values(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_time_and_patience_end_a_training() -> None:
    made = training(minutes=1e-9)
    assert made.run().why_ended == "the time of 1e-09 minutes was over"
    assert made.step == 1
    waiting = training(epochs=50, lr=0.0, patience=2)
    assert waiting.run().why_ended == "accuracy had not grown for 2 epochs"
    assert len(waiting.history.epochs) == 3


@pytest.mark.parametrize(
    ("scores", "losses", "best", "ends"),
    [
        ([50, 50, 50], [0.7, 0.2, 0.3], 1, True),
        ([50, 50, 50], [0.1, 0.2, 0.3], 0, True),
        ([math.nan, 50, 40], [0.1, 0.2, 0.3], 1, False),
        ([50, math.nan, 60], [0.1, 0.2, 0.3], 2, False),
    ],
)
def test_of_epochs_with_the_same_score_that_with_the_least_loss_is_best(
    scores: list[float], losses: list[float], best: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And patience still waits for a better score."""
    made = training(epochs=3, patience=2)
    for score, loss in zip(scores, losses, strict=True):
        monkeypatch.setattr(made, "evaluate", lambda score=score: {"accuracy": score})
        made.step, made.losses = made.step + made.per_epoch, [loss, 1.0]
        made._end_epoch()
    assert made.history.best == best
    assert made.history.why_ended == ("accuracy had not grown for 2 epochs" if ends else "")


def test_the_best_epoch_is_one_whose_weights_were_kept() -> None:
    """Of a run begun when the first of equal epochs was the best one."""
    made = training()
    made.history.epochs = [{"epoch": i, "loss": 1 / i, "accuracy": 101.0} for i in (1, 2)]
    made.history.best, made.step = 0, 3 * made.per_epoch
    made._end_epoch()
    assert made.history.best == 0


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    made = training(tmp_path, lr=1e30, momentum=0, clip=0)
    with pytest.raises(gf.GradFilterError, match=r"loss of step \d+ is not finite.* smaller lr than 1e\+30"):
        made.run(checkpoint_every=0)
    assert made.step > 0
    found = checkpoint.read(tmp_path)
    assert found is not None
    assert found.facts["step"] == made.step


@pytest.mark.parametrize("step", [6, 8, 24], ids=["end of an epoch", "within one", "end of the training"])
def test_weights_that_are_not_finite_are_not_kept(tmp_path: Path, step: int) -> None:
    made = training(tmp_path)

    def spoil(task: str, now: int, total: int) -> None:
        if now == step:
            made.parameters[-1].data[0] = math.inf

    made.tell = spoil
    with pytest.raises(gf.GradFilterError, match=f"After step {step} some weights are not finite"):
        made.run(checkpoint_every=0)
    found = checkpoint.read(tmp_path)
    assert found is not None
    assert found.facts["step"] == step - 1
    assert len(made.history.epochs) == (step - 1) // 6
    assert all(tensor.isfinite().all() for tensor in found.tensors.values())


def test_a_batch_of_one_sample_has_no_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 16), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    made = Training(model, Noisy(5), None, TASK, Loop(epochs=1, batch=4))
    with pytest.raises(gf.GradFilterError, match="so that none is left with a single one"):
        made.run()


@pytest.mark.parametrize(
    "method", [gf.GradientFilter(2), gf.SubspaceIteration(rank=2), gf.Quantized(4)], ids=str
)
def test_fit_with_a_cache_is_fit_without(method: gf.Method) -> None:
    """Also with methods that remember: what they see in a test is not for them."""
    found = []
    for cache in (True, False):
        model = gf.apply_(gf.restore_(net()), method, "last:3")
        gf.fit(model, Noisy(16, 0), Noisy(8, 0), TASK, cache=cache, epochs=2, batch=4)
        found.append(copy.deepcopy(gf.restore_(model)).state_dict())
    assert_same(*found)


def test_fit_leaves_a_plain_model_behind(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = gf.models.build("tiny", classes=2)
    history = gf.fit(
        model, Noisy(), Noisy(10, 0), TASK, gf.GradientFilter(2), folder=tmp_path, epochs=6, batch=4, lr=0.05
    )
    assert history.best_scores["accuracy"] > 80
    facts = json.loads((tmp_path / "checkpoint.json").read_text())["facts"]
    assert facts["epochs"] == history.epochs
    plain = gf.models.build("tiny", classes=2)
    plain.load_state_dict(gf.restore_(model).state_dict())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"epoch": 3}, "fit has no setting epoch. Did you mean epochs?"),
        ({"epochs": 0}, "epochs must be at least 1, not 0."),
        ({"lr": -1.0}, "lr must be at least 0, not -1.0."),
        ({"resume": True, "folder": "nowhere"}, "There is no checkpoint in nowhere to go on from"),
        ({"train": []}, "The training set is empty."),
        ({"task": gf.Classification(3)}, "but there are 3 classes, one score each; build it with classes=3."),
    ],
)
def test_bad_input_gets_one_sentence(change: dict[str, Any], sentence: str) -> None:
    given = {"train": Noisy(), "test": None, "task": TASK, "epochs": 1, **change}
    with pytest.raises(gf.GradFilterError) as caught:
        gf.fit(net(), **given)
    assert sentence in str(caught.value)


def test_segmentation_scores_ignore_what_is_not_labelled() -> None:
    task = gf.Segmentation(2)
    output = torch.tensor([[[[4.0, 0.0]], [[0.0, 4.0]]]])  # classes 0, 1
    assert task.score(iter([(output, torch.tensor([[[0, 1]]]))])) == {
        "mean_iou": 100.0,
        "pixel_accuracy": 100.0,
    }
    half = task.score(iter([(output, torch.tensor([[[0, 0]]]))]))
    assert half["pixel_accuracy"] == 50.0
    assert task.score(iter([(output, torch.tensor([[[0, 255]]]))]))["pixel_accuracy"] == 100.0
    large = torch.tensor([[[0, 0, 1, 1], [0, 0, 1, 1]]])  # the map is scaled to the mask's size
    assert task.score(iter([({"out": output}, large)]))["mean_iou"] == 100.0
    assert task.loss(output, torch.tensor([[[0, 255]]])) < 0.1


class WithBranch(nn.Module):
    """As torchvision's googlenet: in training another part of the model judges too."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.branch = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        features = x.mean((2, 3))
        main = self.main(features)
        return (main, self.branch(features)) if self.training else main


def test_of_several_outputs_the_first_is_trained_and_tested() -> None:
    model = WithBranch()
    before = copy.deepcopy(model)
    history = gf.fit(model, Noisy(16, 0), Noisy(8, 0), TASK, epochs=4, batch=4, lr=0.5)
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]
    assert not torch.equal(before.main.weight, model.main.weight)
    assert torch.equal(before.branch.weight, model.branch.weight)


class Masks(Dataset[tuple[Tensor, Tensor]]):
    """Of every picture another part is labelled."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        mask = (image[0] > 0).long()
        mask[index:] = 255
        return image, mask


def segmenting(task: gf.Segmentation, **settings: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = gf.apply_(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)), gf.Exact())
    made = Training(model, Masks(), None, task, Loop(epochs=2, lr=0.1, **settings))
    made.run()
    return state(made)


def test_accumulated_masks_are_one_large_batch_by_their_pixels() -> None:
    large, parts = (segmenting(gf.Segmentation(2), batch=b, accumulate=a) for b, a in ((8, 1), (2, 4)))
    for key, value in large.items():
        assert torch.allclose(value, parts[key], atol=1e-6), key

    class BySamples(gf.Segmentation):
        def count(self, target: Tensor) -> int:
            return len(target)

    wrong = segmenting(BySamples(2), batch=2, accumulate=4)
    assert not all(torch.allclose(value, wrong[key], atol=1e-6) for key, value in large.items())


def test_label_smoothing_of_masks() -> None:
    scores, mask = torch.randn(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long)
    wanted = nn.functional.cross_entropy(scores, mask, label_smoothing=0.2)
    assert torch.equal(gf.Segmentation(2, label_smoothing=0.2).loss(scores, mask), wanted)


class ByNumpy(Noisy):
    """Augmented with the random numbers of numpy and of Python."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index], index % 2
        return image * random.random() + numpy.random.rand(), label  # noqa: S311


def test_random_numbers_of_any_kind_depend_on_seed_epoch_and_index() -> None:
    found = []
    for disturbance in (0, 1):
        numpy.random.seed(disturbance)
        random.seed(disturbance)
        made = Training(net(), ByNumpy(), None, TASK, Loop(epochs=1, batch=4))
        made.run()
        found.append(state(made))
    assert_same(*found)


def test_mixed_precision_trains_but_not_from_a_cache() -> None:
    history = gf.fit(net(), Noisy(16, 0), None, TASK, epochs=8, batch=4, lr=0.05, precision="bf16")
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]
    with pytest.raises(gf.GradFilterError, match="cache keeps features of float32"):
        gf.fit(net(), Noisy(16, 0), None, TASK, cache=True, precision="bf16")


class AsDictionaries(Noisy):
    """As Hugging Face's datasets give them."""

    names = ("label", "pixel_values")

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return dict(zip(self.names, (label, image), strict=True))


@pytest.mark.parametrize("cache", [False, True])
def test_items_may_be_dictionaries(cache: bool) -> None:
    found = []
    for kind in (Noisy, AsDictionaries):
        model = net()
        gf.fit(model, kind(16, 0), kind(8, 0), TASK, cache=cache, epochs=1, batch=4)
        found.append(copy.deepcopy(gf.restore_(model)).state_dict())
    assert_same(*found)


def test_dictionaries_of_other_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsDictionaries, "names", ("what", "picture"))
    with pytest.raises(gf.GradFilterError, match="have the fields what, picture; name the image one of"):
        gf.fit(net(), AsDictionaries(), None, TASK)
