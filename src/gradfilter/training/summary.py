"""The report of a finished job: its curves, what it costs against exact training, and what the model sees."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor, nn

from ..bench.baseline import train_plainly_
from ..bench.environment import available_memory, environment
from ..bench.memory import peak_of_process
from ..bench.timing import in_turn, median_of
from ..data.transforms import test_transform
from ..masks import overlay_png, picture_png
from ..prediction import Mask, predict
from ..surgery import restore_
from .loop import Training
from .report import Comparison, Overlay, Report, plan_facts
from .saved import open_run

if TYPE_CHECKING:
    from .job import Job

__all__ = ["write_summary"]

ROUNDS = 5
OVERLAYS = 4


def write_summary(job: Job, training: Training) -> None:
    """report.json and report.html in the run's folder."""
    history, noted = training.history, job.run.best_noted()
    job.run.write_report(
        Report(
            f"{job.data.name}, {job.config.model}",
            settings={name: value for name, value in job.run.config.items() if name != "found"},
            epochs=job.run.epochs(),
            scores=history.score_names,
            best=history.best,
            why_ended=history.why_ended,
            classes=job.data.classes,
            plan=plan_facts(job.plan),
            costs=_costs(job, training),
            confusion=noted.get("confusion"),
            overlays=_overlays(job) if job.data.task == "segment" else (),
            environment=environment(),
            notes=[job.said] if job.said else [],
        )
    )


def _costs(job: Job, training: Training) -> list[Comparison]:
    before, after = job.plan.total
    peak = peak_of_process()  # before exact training has its turn
    own_ms = 1e3 * training.busy / max(1, training.step)
    exact_ms = _exact_step(job, training) if _exact_fits(before.kept) else None
    return [
        Comparison("kept for the backward", "bytes", {"exact": before.kept, "this run": after.kept}),
        Comparison(
            "multiply-adds of the backward",
            "",
            {"exact": before.backward_macs, "this run": after.backward_macs},
        ),
        Comparison("step, plain PyTorch against this run", "ms", {"exact": exact_ms, "this run": own_ms}),
        Comparison("peak memory of the process", "bytes", {"exact": None, "this run": peak}),
    ]


def _exact_fits(kept: int) -> bool:
    """Exact training may well need more than there is, where the run itself did not."""
    free = available_memory()
    return free is None or kept < free / 2


def _exact_step(job: Job, training: Training) -> float:
    """Milliseconds of a step of exact training, of the same layers and as many samples, on average."""
    plain = train_plainly_(restore_(copy.deepcopy(job.model)), job.plan)
    inputs, targets = _batch(job)
    parameters = [p for p in plain.parameters() if p.requires_grad]

    def step() -> float:
        start = time.perf_counter()
        plain.zero_grad()
        training.task.loss(plain(inputs), targets).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        return time.perf_counter() - start

    once = 1e3 * median_of(in_turn({"exact": step}, ROUNDS, 1)["exact"]).median
    return once * len(job.data.train) / training.per_epoch / len(targets)


def _batch(job: Job) -> tuple[Tensor, Tensor]:
    transform = test_transform(job.data.task, job.config.size, job.data.ignore)
    count = min(job.config.batch, len(job.data.train))
    samples = [transform(*job.data.train[index]) for index in range(count)]
    images, targets = zip(*samples, strict=True)
    stacked = torch.stack(images).to(memory_format=torch.channels_last)
    return stacked, torch.stack([torch.as_tensor(target) for target in targets])


def _overlays(job: Job) -> list[Overlay]:
    """A few test pictures, what the best weights find in them, and what there is."""
    transform = test_transform("segment", job.config.size, job.data.ignore)
    chosen = range(0, len(job.data.test), max(1, len(job.data.test) // OVERLAYS))[:OVERLAYS]
    pictures, truths = zip(*(job.data.test[index] for index in chosen), strict=True)
    named = [(f"test picture {index}", picture) for index, picture in zip(chosen, pictures, strict=True)]
    best = open_run(job.run.path).model
    masks = predict(best, named, transform.of_picture, job.data.classes, "segment")
    made = []
    for (name, picture), truth, found in zip(named, truths, masks, strict=True):
        assert isinstance(found, Mask)  # noqa: S101
        true = torch.from_numpy(numpy.array(truth)).long()
        drawn = {"found": overlay_png(picture, found.classes), "truth": overlay_png(picture, true)}
        seen = sorted({*found.classes.unique().tolist(), *true.unique().tolist()} - {job.data.ignore})
        made.append(Overlay(name, {"picture": picture_png(picture), **drawn}, seen))
    return made
