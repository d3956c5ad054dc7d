"""The training loop: steps, tests, checkpoints. What happens at a step depends on its number alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..errors import GradFilterError
from ..progress import Tell, silent
from . import checkpoint
from .order import batches, random_seed
from .processes import add_up_, is_first, my_share
from .schedule import rate_at
from .settings import Loop

__all__ = ["History", "Task", "Training"]

Samples = Dataset[tuple[Any, Any]] | Sequence[tuple[Any, Any]]
Forward = Callable[[Any], Tensor]


class Task(Protocol):
    """What is learned: a loss to train on, and a score, higher is better, to judge by."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor: ...

    def score(self, outputs: Iterator[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Named scores over all of a set; the first one decides which epoch was the best."""


@dataclass
class History:
    """One entry per epoch: its number, the mean training loss, the seconds so far, and the scores."""

    epochs: list[dict[str, float]] = field(default_factory=list)
    best: int = -1
    why_ended: str = ""

    @property
    def best_scores(self) -> dict[str, float]:
        return self.epochs[self.best]


class _Seeded(Dataset[tuple[Any, Any]]):
    """Samples whose random numbers depend on (seed, epoch, index) alone, whichever process reads them."""

    def __init__(self, samples: Samples, seed: int, epoch: int) -> None:
        self.samples, self.seed, self.epoch = samples, seed, epoch

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(random_seed(self.seed, "sample", self.epoch, index))
            return self.samples[index]


class Training:
    """One training of one model, which can be stopped after any step and gone on with."""

    def __init__(
        self,
        model: nn.Module,
        train: Samples,
        test: Samples | None,
        task: Task,
        loop: Loop,
        *,
        forward: Forward | None = None,
        folder: Path | None = None,
        workers: int = 0,
        tell: Tell = silent,
    ) -> None:
        self.model, self.task, self.loop = model, task, loop
        self.train, self.test, self.forward = train, test, forward or model
        self.folder, self.workers, self.tell = folder, workers, tell
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise GradFilterError("Nothing in the model trains; call gf.apply_ with layers to train first.")
        self.optimizer = _optimizer(self.parameters, loop)
        count = len(cast(Sized, train))
        if count == 0:
            raise GradFilterError("The training set is empty.")
        self.per_epoch = math.ceil(len(self._batches(0)) / loop.accumulate)
        self.steps = self.per_epoch * loop.epochs
        self.step, self.losses, self.seconds = 0, [0.0, 0.0], 0.0
        self.history = History()

    def run(self, checkpoint_every: float = 60.0) -> History:
        """Train to the end, or until time or patience are over; writes a checkpoint now and then."""
        written = started = time.monotonic()
        before = self.seconds
        while self.step < self.steps and not self.history.why_ended:
            for batch in self._rest_of_epoch():
                self._take_step(batch)
                self.seconds = before + time.monotonic() - started
                if self._is_over_time():
                    self.history.why_ended = f"the time of {self.loop.minutes:g} minutes was over"
                    break
                if time.monotonic() - written >= checkpoint_every and self.step % self.per_epoch:
                    self.save()
                    written = time.monotonic()
            self._end_epoch()
            self.save()
            written = time.monotonic()
        return self.history

    def save(self) -> None:
        """Write a checkpoint, if there is a folder for it."""
        if self.folder is not None and is_first():
            facts = {"step": self.step, "losses": self.losses, "seconds": self.seconds, **vars(self.history)}
            checkpoint.write(self.folder, checkpoint.training_tensors(self.model, self.optimizer), facts)

    def resume(self) -> bool:
        """Go back to the checkpoint in the folder; whether there was one."""
        found = None if self.folder is None else checkpoint.read(self.folder)
        if found is None:
            return False
        checkpoint.load_training_(self.model, self.optimizer, found.tensors)
        facts = dict(found.facts)
        self.step, self.losses, self.seconds = (facts.pop(name) for name in ("step", "losses", "seconds"))
        self.history = History(**facts)
        return True

    def _batches(self, epoch: int) -> list[Tensor]:
        count = len(cast(Sized, self.train))
        return batches(count, self.loop.batch, self.loop.seed, epoch, drop_last=False)

    def _rest_of_epoch(self) -> Iterator[list[tuple[Any, Tensor, int]]]:
        """Groups of ``accumulate`` batches from the present step on: input, target, how many samples."""
        epoch, done = divmod(self.step, self.per_epoch)
        parts = self._batches(epoch)[done * self.loop.accumulate :]
        seeded = _Seeded(self.train, self.loop.seed, epoch)
        shares = [my_share(part).tolist() for part in parts]
        loader = DataLoader(seeded, batch_sampler=shares, num_workers=self.workers)
        group: list[tuple[Any, Tensor, int]] = []
        for number, ((inputs, targets), part) in enumerate(zip(loader, parts, strict=True), 1):
            group.append((inputs, targets, len(part)))
            if len(group) == self.loop.accumulate or number == len(parts):
                yield group
                group = []

    def _take_step(self, group: list[tuple[Any, Tensor, int]]) -> None:
        loop, total = self.loop, sum(count for _, _, count in group)
        torch.manual_seed(random_seed(loop.seed, "step", self.step))  # for dropout
        self.model.train()
        summed = 0.0
        for inputs, targets, _ in group:
            with self._precision():
                loss = self.task.loss(self.forward(inputs), targets)
            share = len(targets) / total
            (loss * share).backward()
            summed += float(loss.detach()) * len(targets)
        add_up_([p.grad for p in self.parameters if p.grad is not None])
        if loop.clip:
            nn.utils.clip_grad_norm_(self.parameters, loop.clip)
        warmup = round(loop.warmup * self.per_epoch)
        rate = rate_at(self.step, self.steps, warmup, loop.lr, loop.schedule)
        for settings in self.optimizer.param_groups:
            settings["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses = [self.losses[0] + summed, self.losses[1] + sum(len(t) for _, t, _ in group)]
        self.step += 1
        self.tell("training", self.step, self.steps)

    def _precision(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.loop.precision == "bf16" else nullcontext()

    def _end_epoch(self) -> None:
        scores = self.evaluate() if self.test is not None else {}
        history = self.history
        loss = self.losses[0] / max(1.0, self.losses[1])
        epoch = (self.step - 1) // self.per_epoch + 1
        history.epochs.append({"epoch": epoch, "loss": loss, "seconds": self.seconds, **scores})
        self.losses = [0.0, 0.0]
        judge = next(iter(scores), "loss")
        values = [entry[judge] if scores else -entry[judge] for entry in history.epochs]
        history.best = max(range(len(values)), key=lambda i: values[i])
        waited = len(values) - 1 - history.best
        if self.loop.patience and waited >= self.loop.patience and not history.why_ended:
            history.why_ended = f"{judge} had not grown for {waited} epochs"

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The scores on the test set."""
        self.model.eval()
        loader = DataLoader(cast(Any, self.test), batch_size=self.loop.batch, num_workers=self.workers)
        return self.task.score((self.forward(inputs), targets) for inputs, targets in loader)

    def _is_over_time(self) -> bool:
        return bool(self.loop.minutes) and self.seconds >= 60 * self.loop.minutes


def _optimizer(parameters: list[nn.Parameter], loop: Loop) -> torch.optim.Optimizer:
    if loop.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=loop.lr, weight_decay=loop.weight_decay)
    return torch.optim.SGD(parameters, lr=loop.lr, momentum=loop.momentum, weight_decay=loop.weight_decay)
