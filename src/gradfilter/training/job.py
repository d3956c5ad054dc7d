"""From settings to a trained run in its folder: what ``gradfilter train`` does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..bench.environment import available_memory
from ..cache import FeatureCache
from ..data.check import check
from ..data.kinds import located, path_of
from ..data.samples import Data
from ..errors import GradFilterError
from ..models._torchvision import library
from ..modules import BATCH_NORMS
from ..optional import import_optional
from ..plans import DOES_NOT_RUN, Plan, format_bytes
from ..progress import Say, Tell, silent
from ..splitting import split
from .building import built, example_of, make_ready_, plan_of
from .history import History
from .loop import Samples, Training
from .processes import any_of, from_first, is_first, together
from .run_folder import RunFolder
from .saved import holds_adapters, weights_of
from .sets import open_sets, transformed, usual_size
from .settings import Config
from .summary import write_summary
from .tasks import Classification, Segmentation, class_scores, task_of
from .tensorboard import TensorBoard

__all__ = ["Job", "go_on", "prepare"]

# FPN's group norms need no statistics, which a new head has none of
MODELS = {"classify": "mobilenet_v2", "segment": "smp:FPN/mobilenet_v2"}
NEW_HEAD = "decoder, segmentation_head"  # of segmentation-models-pytorch: only the encoder has weights
# settings that change no bit of a result: a run may go on elsewhere
OF_THE_PLACE = ("data", "weights", "download", "workers", "cache_folder", "tensorboard", "out")
Listener = Callable[[Mapping[str, float]], None]


@dataclass
class Job:
    """A run that is ready to train."""

    config: Config
    data: Data
    model: nn.Module
    plan: Plan
    run: RunFolder
    said: str = ""
    tell: Tell = silent
    say: Say = silent
    goes_on: bool = False

    def train(self) -> History:
        """Train to the end, with all that belongs into the run's folder."""
        with self.run.held() if is_first() else nullcontext():
            try:
                return self._train()
            except (GradFilterError, RuntimeError, MemoryError):  # the second where another process failed
                if is_first() and not self.goes_on:
                    self.run.discard()
                raise

    def _train(self) -> History:
        begun = time.monotonic()
        config, task = self.config, self.task()
        train, test, forward = self._sets()
        listeners: list[Listener] = [self.run.append]
        training = Training(
            self.model,
            train,
            test,
            task,
            config.loop(),
            forward=forward,
            folder=self.run.checkpoint,
            workers=0 if forward else config.workers,
            tell=self.tell,
            say=self.say,
            on_epoch=lambda history: self._end_epoch(history, task, listeners),
            settings={name: value for name, value in asdict(config).items() if name not in OF_THE_PLACE},
        )
        if training.resume() and training.step > training.steps:
            raise GradFilterError(
                f"{self.run.path} is at step {training.step} already, but its config.json now asks for "
                f"{training.steps}; put that back as it was."
            )
        if is_first():
            self.run.go_back(training.history.epochs)
            if training.step == training.steps:
                self.say("The run was complete already; its report is written anew.")
        with self._board(training.history) as board:
            if board is not None:
                listeners.append(board.append)
            training.prepared = time.monotonic() - begun
            history = training.run()
        if is_first():
            write_summary(self, training)
        return history

    def _board(self, history: History) -> TensorBoard | nullcontext[None]:
        if not self.config.tensorboard or not is_first():
            return nullcontext()
        return TensorBoard(self.run.path / "tensorboard", history.epochs)

    def task(self) -> Classification | Segmentation:
        data = self.data
        return task_of(data.task, len(data.classes), data.ignore, self.config.label_smoothing)

    def _sets(self) -> tuple[Samples, Samples, Callable[[Any], Tensor] | None]:
        """Training and test set, and what runs from a cache's features on, if there is a cache."""
        train, test = transformed(self.data, self.config, self.tell)
        if self.run.found.get("cached", self.config.cache == "on"):
            found = None
            try:
                found = self._from_features(train, test)
            except GradFilterError:  # dropout among the frozen layers, no room on the disk ...
                if self.config.cache == "on" or self.run.checkpoint.exists():
                    raise
            failed = any(any_of(found is None))  # what one cannot keep, none does
            if found and not failed:
                return found
            if is_first():
                self.run.note(cached=False)
        return train, test, None

    def _from_features(
        self, train: Samples, test: Samples
    ) -> tuple[Samples, Samples, Callable[[Any], Tensor]]:
        config = self.config
        cache = partial(
            FeatureCache,
            self.model,
            batch=config.batch,
            workers=config.workers,
            tell=self.tell,
        )
        # a folder for each: one throws away what the other keeps
        places = [
            Path(config.cache_folder, part) if config.cache_folder else None for part in ("train", "test")
        ]
        views = config.views if config.augment else 1
        kept = cache(train, views=views, seed=config.seed, folder=places[0])
        return kept, cache(test, folder=places[1]), kept.tail

    def _end_epoch(
        self, history: History, task: Classification | Segmentation, listeners: Sequence[Listener]
    ) -> None:
        self.run.save(self.model, best=history.is_best)
        if history.is_best:
            self.run.note_best(history.epochs[-1], task.confusion)
        for listener in listeners:  # an epoch is noted when its weights are there
            listener(history.epochs[-1])


def prepare(config: Config, *, tell: Tell = silent, say: Say = print) -> Job:
    """A new run, in a new folder; nothing is written before all that can be refused has been looked at."""
    data, said = open_sets(config, tell)
    config = _resolved(config, data)
    model = built(config, len(data.classes))
    plan = plan_of(config, model)
    _check_output(config, data, model)
    check(data, tell)
    make_ready_(model, plan, config)
    _check_cache(config, plan)
    _check_libraries(config)
    config = replace(config, out=config.out or from_first(_free_folder()))
    _check_place(config, data)
    facts = {"classes": list(data.classes), "ignore": data.ignore, "samples": _counts(data)}
    # by the memory that is free now: a run that goes on later must not decide otherwise
    facts["cached"] = from_first(_is_cached(config, data, model, plan))
    everything = {**asdict(config), "found": facts}
    # the others of several processes only read
    run = RunFolder.create(config.out, everything) if is_first() else RunFolder(Path(config.out), everything)
    return _introduced(Job(config, data, model, plan, run, said, tell, say))


def _check_output(config: Config, data: Data, model: nn.Module) -> None:
    """That it is of the data's task."""
    is_training = model.training
    with torch.no_grad():
        scores = class_scores(model.eval()(example_of(config)), len(data.classes))
    model.train(is_training)
    if scores.dim() != {"classify": 2, "segment": 4}[data.task]:
        gives, needs = "one class per picture", "one per pixel"
        if data.task == "classify":
            gives, needs = "one class per pixel", "one per picture"
        raise GradFilterError(
            f"The model {config.model} gives {gives}, but {data.name} needs {needs}; take a model such as "
            f"{MODELS[data.task]}."
        )


def _check_place(config: Config, data: Data) -> None:
    """That nothing is written beside the class folders: it would be taken for one of them."""
    place = path_of(config.data).resolve()
    if data.task != "classify" or not place.is_dir():
        return
    first = (file.resolve() for part in (data.train, data.test) for file in part.files(0))
    classes = (folder for file in first for folder in file.parents if folder.name in data.classes)
    roots = {folder.parent for folder in classes if folder.parent.is_relative_to(place)}
    for option, given in (("out", config.out), ("cache-folder", config.cache_folder)):
        for root in roots if given else ():
            if _is_seen_in(root, Path(given).resolve()):
                raise GradFilterError(
                    f"{given} would lie among the class folders of {root}; give another --{option}, or start "
                    "gradfilter elsewhere."
                )


def _is_seen_in(root: Path, folder: Path) -> bool:
    """Whether one that lists the folders in root finds it, or one that it is in."""
    if not folder.is_relative_to(root):
        return False
    inside = folder.relative_to(root).parts
    return not inside or inside[0][0] not in "._"


def _check_cache(config: Config, plan: Plan) -> None:
    if config.cache == "on" and not _has_frozen_prefix(plan):
        raise GradFilterError(
            f"--cache on needs frozen layers, but with --layers {config.layers} the first one trains; use "
            "--cache auto, or let fewer layers train."
        )
    if config.cache == "on" and config.precision == "bf16":
        raise GradFilterError(
            "--cache on keeps features of float32; leave --precision bf16 or the cache out."
        )


def _check_libraries(config: Config) -> None:
    """That they are there, before anything long begins."""
    library("torchmetrics", "train")
    if config.tensorboard:
        import_optional("tensorboard", "tensorboard")


def _is_cached(config: Config, data: Data, model: nn.Module, plan: Plan) -> bool:
    """Whether features are kept; ``auto``: where the samples are always the same, and features fit."""
    if config.cache != "auto":
        return config.cache == "on"
    if config.augment or config.precision == "bf16" or not _has_frozen_prefix(plan):
        return False
    with suppress(GradFilterError), torch.no_grad():  # a model that cannot be split
        features = split(model).prefix(example_of(config))
        needed = together() * sum(_counts(data)) * sum(feature.nbytes for feature in features)
        return bool(config.cache_folder) or needed < (available_memory() or 0) / 2
    return False


def go_on(folder: str | os.PathLike[str], *, tell: Tell = silent, say: Say = print) -> Job:
    """A run that was stopped, ready to go on from its last checkpoint."""
    run = RunFolder.open(folder)
    config = run.settings()
    run.check_resumable()
    try:
        data, said = open_sets(config, tell)
    except GradFilterError as error:
        raise GradFilterError(
            f"The data of {folder}, {config.data}, cannot be opened any more: {error}"
        ) from None
    if (list(data.classes), _counts(data)) != (run.found["classes"], run.found["samples"]):
        on_top = f" on top of this one: --weights {folder}" if run.best.exists() else " under another name"
        raise GradFilterError(
            f"{config.data} is not what it was when {folder} was begun: classes or the number of pictures "
            f"have changed. Put it back, or start a new run{on_top}."
        )
    model = built(config, len(data.classes))  # as at the start: methods and caches look at the first weights
    plan = plan_of(config, model)
    make_ready_(model, plan, config)
    return _introduced(Job(config, data, model, plan, run, said, tell, say, goes_on=True))


def _resolved(config: Config, data: Data) -> Config:
    processors = os.cpu_count() or 1
    most = max(16, 4 * processors)
    if config.workers > most:  # each is a process as large as this one
        raise GradFilterError(
            f"workers must be at most {most} on this machine with {processors} processors, "
            f"not {config.workers}."
        )
    workers = config.workers if config.workers >= 0 else min(2, max(1, processors // together()))
    weights = config.weights
    if Path(weights).is_dir():  # an earlier run
        earlier = RunFolder.open(weights)
        weights = str(weights_of(earlier, "best"))
        if holds_adapters(Path(weights)):
            raise GradFilterError(
                f"{earlier.path} was trained with adapters that no plain weights can replace, so that no new "
                "run can start from it; go on with the run itself, or start from the weights it started from."
            )
        config = replace(config, model=config.model or earlier.settings().model)
    model = config.model or MODELS[data.task]
    return replace(
        config,
        data=located(config.data),
        task=data.task,
        model=model,
        layers=config.layers or (NEW_HEAD if model.startswith("smp:") else "last:4"),
        size=config.size or usual_size(data),
        workers=workers,
        weights=_from_anywhere(weights) if Path(weights).exists() else weights,
        cache_folder=_from_anywhere(config.cache_folder) if config.cache_folder else "",
    )


def _from_anywhere(path: str) -> str:
    """A run may be tested, or go on, in another folder than that in which it was begun."""
    return str(Path(path).expanduser().absolute())


def _has_frozen_prefix(plan: Plan) -> bool:
    return any(row.action == "frozen" and row.reason != DOES_NOT_RUN for row in plan.rows)


def _counts(data: Data) -> list[int]:
    return [len(data.train), len(data.test)]


def _free_folder() -> str:
    number = 1
    while Path("runs", str(number)).exists():
        number += 1
    return str(Path("runs", str(number)))


def _has_new_batch_norms(model: nn.Module) -> bool:
    """Whether there are some that have seen no data: all means are zero."""
    norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
    return any(norm.running_mean is not None and not norm.running_mean.any() for norm in norms)


def _introduced(job: Job) -> Job:
    config, data, say, (before, after) = job.config, job.data, job.say, job.plan.kept
    if is_first():
        counts = f"{len(data.train)} training and {len(data.test)} test pictures"
        say(f"{data.name}: {counts}, {len(data.classes)} classes, {config.size} px. {job.said}".rstrip())
        methods = ", ".join(dict.fromkeys(str(row.method) for row in job.plan.rows if row.action == "train"))
        share = f", {after / before:.3f}x of exact" if before else ""
        say(f"{config.model}: {len(job.plan.trained)} layers train, {methods}.")
        say(f"A batch of {config.batch} keeps {format_bytes(after)} for the backward{share}.")
        if config.norm != "batch" and _has_new_batch_norms(job.model):
            say("Some batch norms have seen no data yet, as in a new head; --norm batch may serve better.")
        processes = f"; {together()} processes" if together() > 1 else ""
        say(f"The run is in {job.run.path}{processes}.")
    return job
