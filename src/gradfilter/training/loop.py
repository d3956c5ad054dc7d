"""The training loop: steps, tests, checkpoints. What happens at a step depends on its number alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..allocator import give_back_freed_memory
from ..cache import FeatureCache
from ..errors import GradFilterError
from ..loading import read
from ..progress import Say, Tell, silent
from ..seeding import seeded
from ..splitting import Split
from . import checkpoint
from .history import History
from .interrupts import StopAsked, ignore_interrupts
from .order import batches, random_seed
from .processes import added_up, any_of, from_first, is_first, rank, together
from .relay import begin_alike_, gathered, leaves_no_trace, relayed, shared_split
from .report import plain
from .schedule import rate_at
from .settings import Loop

__all__ = ["Task", "Training"]

Samples = Dataset[tuple[Any, Any]] | Sequence[tuple[Any, Any]]
Forward = Callable[[Any], Tensor]
Batch = tuple[int, Any, Tensor]  # its number in the step, inputs and targets


class Task(Protocol):
    """What is learned: a loss to train on, and a score, higher is better, to judge by."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor: ...

    def score(self, outputs: Iterator[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Named scores over all of a set; the first one decides which epoch was the best."""

    def count(self, target: Tensor) -> int:
        """How many the loss is the mean of: parts of a batch have their weight by it."""


class _Seeded(Dataset[tuple[Any, Any]]):
    """Samples whose random numbers depend on (seed, epoch, index) alone, whichever process reads them."""

    def __init__(self, samples: Samples, seed: int, epoch: int) -> None:
        self.samples, self.seed, self.epoch = samples, seed, epoch

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        with seeded(random_seed(self.seed, "sample", self.epoch, index)):
            return self.samples[index]


_HOW_LONG = ("epochs", "steps", "minutes", "patience")  # may change while a run is stopped
_COUNTS = ("step", "losses", "seconds", "waited", "busy")


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
        say: Say = silent,
        on_epoch: Callable[[History], None] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """settings: what a training must have in common with the checkpoint it goes on from."""
        self.model, self.task, self.loop, self.on_epoch = model, task, loop, on_epoch
        self.train, self.test, self.forward = train, test, forward or model
        self.folder, self.workers, self.tell, self.say = folder, workers, tell, say
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise GradFilterError("Nothing in the model trains; call gf.apply_ with layers to train first.")
        self.optimizer = _optimizer(self.parameters, loop)
        count = len(cast(Sized, train))
        if count == 0:
            raise GradFilterError("The training set is empty.")
        self.per_epoch = math.ceil(len(self._batches(0)) / loop.accumulate)
        self.steps = loop.steps or self.per_epoch * loop.epochs
        self.warmup = loop.warmup_steps or round(loop.warmup * self.per_epoch)
        self.finite = self.parameters
        self.body = _body(model, loop.head) if loop.head_steps else []
        self.frozen: Split | None = None  # where several processes share the frozen layers
        self.shares_batches = False  # of every step
        self.shares_tests = False
        self.settings = plain({**asdict(loop), **(settings or {})})
        self.step, self.losses = 0, [0.0, 0.0]
        self.seconds = self.waited = self.busy = 0.0  # in all; waiting for samples; in steps
        self.prepared = 0.0  # seconds before the first step, which count where time is limited
        self.history = History()

    def run(self, checkpoint_every: float = 60.0) -> History:
        """Train to the end, or until time or patience are over; writes a checkpoint now and then.

        Ctrl-C ends the step, writes a checkpoint and raises ``KeyboardInterrupt``.
        """
        written = started = time.monotonic()
        before = self.seconds
        with StopAsked() as stop_asked:
            self.optimizer.zero_grad()  # what somebody else left there
            self.finite = [p for p in self.parameters if p.isfinite().all()]  # unused ones may not be
            if together() > 1 and self.step < self.steps:
                self._share_out()
            while self.step < self.steps and not self.history.why_ended:
                begun, waited = time.monotonic(), self.waited
                for batch in self._rest_of_epoch():
                    self._take_step(batch)
                    self.busy += time.monotonic() - begun - (self.waited - waited)
                    self.seconds = before + time.monotonic() - started
                    asked, over = any_of(bool(stop_asked), self._is_over_time())
                    if over:
                        self.history.why_ended = f"the time of {self.loop.minutes:g} minutes was over"
                        break
                    if self.step == self.steps or self.step % self.per_epoch == 0:
                        break
                    if asked or time.monotonic() - written >= checkpoint_every:
                        self._check_weights()
                        self.save()
                        written = time.monotonic()
                    if asked:
                        raise KeyboardInterrupt
                    begun, waited = time.monotonic(), self.waited
                self._check_weights()
                self._end_epoch()
                self.save()
                give_back_freed_memory()
                written = time.monotonic()
                if self.step < self.steps and any(any_of(bool(stop_asked))):
                    raise KeyboardInterrupt
        return self.history

    def save(self) -> None:
        """Write a checkpoint, if there is a folder for it."""
        if self.folder is not None and is_first():
            counts = {name: getattr(self, name) for name in _COUNTS}
            facts = counts | {"settings": self.settings} | vars(self.history)
            checkpoint.write(self.folder, checkpoint.training_tensors(self.model, self.optimizer), facts)

    def resume(self) -> bool:
        """Go back to the checkpoint in the folder; whether there was one."""
        found = None if self.folder is None else checkpoint.read(self.folder)
        if found is None:
            return False
        try:
            facts = dict(found.facts)
            then = dict(facts.pop("settings", {}))
            counts = {name: facts.pop(name) for name in _COUNTS}
            history = History(**facts)
            if not isinstance(counts["step"], int) or not -1 <= history.best < len(history.epochs):
                raise TypeError
        except (KeyError, TypeError, ValueError):
            raise GradFilterError(
                f"The checkpoint in {self.folder} is damaged; start the run anew."
            ) from None
        self._check_settings(then)
        self.history = history
        checkpoint.load_training_(self.model, self.optimizer, found.tensors)
        vars(self).update(counts)
        return True

    def _check_settings(self, then: Mapping[str, Any]) -> None:
        """That those are the same on which the bits of the training depend."""
        for name, now in self.settings.items():
            if name not in _HOW_LONG and then.get(name, now) != now:
                raise GradFilterError(
                    f"The checkpoint in {self.folder} was made with {name} {then[name]}, not {now}; put that "
                    "back to go on from it, or start anew."
                )

    def _batches(self, epoch: int) -> list[Tensor]:
        count = len(cast(Sized, self.train))
        return batches(count, self.loop.batch, self.loop.seed, epoch)

    def _rest_of_epoch(self) -> Iterator[list[Batch]]:
        """What this process takes of every step from the present one on."""
        epoch, done = divmod(self.step, self.per_epoch)
        batches, size = self._batches(epoch), self.loop.accumulate
        steps = [list(enumerate(batches[at : at + size])) for at in range(done * size, len(batches), size)]
        if self.shares_batches:
            steps = [step[rank() :: together()] for step in steps]
        reads = [indices.tolist() for step in steps for _, indices in step]
        samples, frozen = self._samples(epoch), self.frozen
        loader: Iterator[tuple[Any, Tensor]]
        if frozen:
            self.model.train()
            own = self._read(samples, reads[rank() :: together()])
            made = ((*frozen.prefix(_channels_last(inputs)), targets) for inputs, targets in own)
            loader = ((features, targets) for *features, targets in relayed(made, len(reads)))
        else:
            loader = self._read(samples, reads)
        for step in steps:
            yield [(number, *batch) for (number, _), batch in zip(step, loader, strict=False)]

    def _read(self, samples: Any, batches: list[list[int]]) -> Iterator[tuple[Any, Tensor]]:
        return self._timed(self._loader(samples, batch_sampler=batches))

    def _share_out(self) -> None:
        """Decide what several processes share: what changes no bit of the weights, so perhaps nothing."""
        begin_alike_(self.model)
        self.model.eval()
        first = self._inputs([0])
        with torch.no_grad():
            is_moved = self.test is None or not leaves_no_trace(
                self.model, lambda: self.forward(first), draws=True
            )
        self.shares_tests = not any(any_of(is_moved))
        why, also = "Features of the frozen layers are cached.", ""
        if self.forward is self.model:
            with self._precision():
                self.frozen, why = shared_split(self.model, first)
                also = "" if self.frozen else self._why_no_batches()
                self.shares_batches = not (self.frozen or also)
        if is_first() and not (self.frozen or self.shares_batches):
            shared = "only tests are shared" if self.shares_tests else "nothing is shared"
            self.say(f"{why} So each process takes every step, and {shared}. {also}".rstrip())

    def _why_no_batches(self) -> str:
        """Why processes cannot share the batches of a step; the same in all of them."""
        if self.loop.accumulate == 1:
            return f"With --accumulate {together()} and a smaller --batch they may share its batches."
        self.model.train()
        inputs = self._inputs(self._batches(0)[0].tolist())
        has_trace = not leaves_no_trace(self.model, lambda: self.model(inputs))
        why = "A batch moves what the next one meets: batch statistics, or what methods remember."
        return why if any(any_of(has_trace)) else ""

    def _inputs(self, indices: list[int]) -> Any:
        """Those of a batch of these samples."""
        inputs, _ = next(read(DataLoader(self._samples(0), batch_sampler=[indices])))
        return _channels_last(inputs)

    def _samples(self, epoch: int) -> Any:
        if isinstance(self.train, FeatureCache):
            self.train.set_epoch(epoch)
            return self.train
        return _Seeded(self.train, self.loop.seed, epoch)

    def _loader(self, samples: Any, **how: Any) -> Iterator[Any]:
        return read(DataLoader(samples, num_workers=self.workers, worker_init_fn=ignore_interrupts, **how))

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same, while noting how long they let us wait."""
        while True:
            start = time.monotonic()
            batch = next(batches, None)
            self.waited += time.monotonic() - start
            if batch is None:
                return
            yield batch

    def _take_step(self, step: list[Batch]) -> None:
        loop = self.loop
        self.model.train()
        total: float = sum(self.task.count(targets) for *_, targets in step)
        if self.shares_batches:
            count, total = added_up(len(step), total)
            summed = sum(gathered(self._backward(step, total), int(count), self.parameters))
        else:
            summed = sum(self._backward(step, total))
        if not math.isfinite(summed):
            raise self._diverged(f"The loss of step {self.step + 1} is")
        if self.step < loop.head_steps:
            for parameter in self.body:
                parameter.grad = None
        if loop.clip:
            nn.utils.clip_grad_norm_(self.parameters, loop.clip)
        rate = rate_at(self.step, self.steps, self.warmup, loop.lr, loop.schedule, loop.lr_end)
        for settings in self.optimizer.param_groups:
            settings["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses = [self.losses[0] + summed, self.losses[1] + total]
        self.step += 1
        self.tell("training", self.step, self.steps)

    def _check_weights(self) -> None:
        """Before they are kept: no run can go on from, or be tested with, what is not finite."""
        if not all(bool(parameter.isfinite().all()) for parameter in self.finite):
            raise self._diverged(f"After step {self.step} some weights are")

    def _diverged(self, what: str) -> GradFilterError:
        return GradFilterError(
            f"{what} not finite, so the training was stopped; try again with a smaller lr than "
            f"{self.loop.lr:g}, or with clip."
        )

    def _backward(self, step: list[Batch], total: float) -> Iterator[float]:
        """The loss of each batch, summed; its gradients are added to those that are there."""
        for number, inputs, targets in step:
            # for dropout, whichever process has the batch
            torch.manual_seed(random_seed(self.loop.seed, "step", self.step * self.loop.accumulate + number))
            loss, count = self._loss(inputs, targets), self.task.count(targets)
            (loss * (count / max(1, total))).backward()
            yield float(loss.detach()) * count if count else 0.0

    def _loss(self, inputs: Any, targets: Tensor) -> Tensor:
        try:
            with self._precision():
                forward = self.frozen.tail if self.frozen else self.forward
                return self.task.loss(forward(_channels_last(inputs)), targets)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise GradFilterError(
                "A batch norm cannot take its statistics from one sample; choose a batch so that none "
                "is left with a single one, or norm fixed."
            ) from None

    def _precision(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.loop.precision == "bf16" else nullcontext()

    def _end_epoch(self) -> None:
        scores = self.evaluate() if self.test is not None else {}
        history = self.history
        loss = self.losses[0] / max(1.0, self.losses[1])
        epoch = (self.step - 1) // self.per_epoch + 1
        times = {"seconds": self.seconds, "waited": self.waited}
        history.add({"epoch": epoch, "loss": loss, **times}, scores, self.loop.patience)
        self.losses = [0.0, 0.0]
        history.why_ended = from_first(history.why_ended)  # on other processors scores may differ
        if self.on_epoch is not None and is_first():
            self.on_epoch(history)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The scores on the test set."""
        self.model.eval()
        count = len(cast(Sized, self.test))
        reads = [part.tolist() for part in torch.arange(count).split(self.loop.batch)]
        mine = reads[rank() :: together()] if self.shares_tests else reads
        loader = self._loader(self.test, batch_sampler=mine)
        found = ((self.forward(_channels_last(inputs)), targets) for inputs, targets in loader)
        with seeded(random_seed(self.loop.seed, "test", self.step)):  # for a model that draws in tests too
            return self.task.score(relayed(found, len(reads)) if self.shares_tests else found)

    def _is_over_time(self) -> bool:
        return bool(self.loop.minutes) and self.prepared + self.seconds >= 60 * self.loop.minutes


def _channels_last(inputs: Any) -> Any:
    is_pictures = isinstance(inputs, Tensor) and inputs.dim() == 4
    return inputs.to(memory_format=torch.channels_last) if is_pictures else inputs


def _body(model: nn.Module, head: str) -> list[nn.Parameter]:
    """The parameters that train, but for the head's."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    last = list(trained)[-1].rpartition(".")[0] + ".*"
    body = [p for name, p in trained.items() if not fnmatchcase(name, head or last)]
    if len(body) == len(trained):
        raise GradFilterError(f"head={head!r} names no parameter that trains, such as {list(trained)[-1]}.")
    return body


def _optimizer(parameters: list[nn.Parameter], loop: Loop) -> torch.optim.Optimizer:
    if loop.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=loop.lr, weight_decay=loop.weight_decay)
    return torch.optim.SGD(parameters, lr=loop.lr, momentum=loop.momentum, weight_decay=loop.weight_decay)
